# Normalizes queries and keys per head (RMSNorm), so that scores do not grow with q_proj and k_proj (arXiv:2302.05442).
qk_norm = True
