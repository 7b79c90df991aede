# Uses GPT-2's architecture (2019): LayerNorm, GELU, learned positions, biases, tied weights. A block keeps about as
# many weights, in two MLP matrices of 4 n_embd columns instead of three of 8/3 n_embd.
norm = 'layer'
mlp = 'gelu'
position = 'learned'
bias = True
tie_weights = True
qk_norm = False
d_ff = 0
