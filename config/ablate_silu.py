# Replaces SwiGLU's three matrices by two and SiLU, keeping the number of parameters.
from model import GPTConfig

_swiglu = GPTConfig(n_embd=n_embd, n_head=n_head, d_ff=d_ff).d_ff
mlp = 'silu'
d_ff = _swiglu * 3 // 2
