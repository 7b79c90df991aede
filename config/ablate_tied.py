# The head is the embedding (arXiv:1608.05859): vocab_size x n_embd parameters fewer.
tie_weights = True
