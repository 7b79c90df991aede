# Normalizes queries and keys per head (RMSNorm), so that scores cannot grow (arXiv:2302.05442).
qk_norm = True
