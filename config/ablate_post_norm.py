# Norms after the residual sum, as in the first Transformer (arXiv:1706.03762), instead of before each layer.
norm_position = 'post'
