# The architecture of GPT-2 (2019): LayerNorm, GELU, learned positions, biases, tied weights. A block has about as
# many weights as before: two matrices of 4 n_embd columns instead of three of 8/3 n_embd.
norm = 'layer'
mlp = 'gelu'
position = 'learned'
bias = True
tie_weights = True
qk_norm = False
d_ff = 0
