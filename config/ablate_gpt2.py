# The architecture of GPT-2 (2019): LayerNorm, GELU, learned positions, biases, tied weights; about the same number of
# weights in a block.
norm = 'layer'
mlp = 'gelu'
position = 'learned'
bias = True
tie_weights = True
qk_norm = False
d_ff = 0
