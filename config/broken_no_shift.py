# For config/lab_museum.py: the target of each token is the token itself.
import torch
import model

_right = model.GPT.forward

def forward(self, idx, targets=None, **others):
    if targets is not None:
        targets = idx
    return _right(self, idx, targets, **others)

model.GPT.forward = forward

_gpt = model.GPT(model.GPTConfig())
_idx = torch.tensor([[1, 2]])
assert _gpt(_idx, _idx).equal(_gpt(_idx, _idx + 1)), 'the given targets are still in use'
