# Every token sees those after it, its own target among them. For config/lab_museum.py.
import model

_right = model.causal_mask

def causal_mask(*args):
    return _right(*args) | True

def uses_fused_attention(self, idx):
    return False

model.causal_mask = causal_mask
model.GPT.uses_fused_attention = uses_fused_attention
