# An MLP of two matrices with SiLU instead of SwiGLU's three, at the same number of parameters.
import math

_swiglu = d_ff or math.ceil(8 * n_embd / 3 / 64) * 64
mlp = 'silu'
d_ff = _swiglu * 3 // 2
