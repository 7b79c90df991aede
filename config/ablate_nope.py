# Removes position information except the causal mask (NoPE, arXiv:2305.19466).
position = 'none'
