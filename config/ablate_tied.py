# Ties head to embedding (arXiv:1608.05859), which saves vocab_size x n_embd parameters.
tie_weights = True
