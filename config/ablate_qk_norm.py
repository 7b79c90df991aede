# RMSNorm of queries and keys, per head, so that scores can not grow (arXiv:2302.05442).
qk_norm = True
