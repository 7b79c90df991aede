# For config/lab_museum.py: every token sees all later ones, including its own target.
import torch
import model

attention = 'naive'         # the fused kernels have their own mask
_right = model.causal_mask

def causal_mask(*args):
    return _right(*args) | True

model.causal_mask = causal_mask

# This needs learned positions: otherwise, new blocks add nothing
_gpt = model.GPT(model.GPTConfig(attention=attention, position='learned'))
_followed, _alone = _gpt(torch.tensor([[1, 2]])), _gpt(torch.tensor([[1]]))
assert not torch.allclose(_followed[0, 0], _alone[0, 0], atol=1e-5), 'a token does not see the one after it'
