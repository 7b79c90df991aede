# Puts norms after the residual sum, as the first Transformer did (arXiv:1706.03762), not before attention and MLP.
norm_position = 'post'
