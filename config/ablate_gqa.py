# Shares one head of keys and values among all query heads: multi-query attention (arXiv:1911.02150), the extreme of GQA
# (arXiv:2305.13245).
n_kv_head = 1
