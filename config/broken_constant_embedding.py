# For config/lab_museum.py: all tokens start as the same vector.
import model

_right = model.GPT.init_weights

def init_weights(self):
    _right(self)
    self.model.embed_tokens.weight.data.fill_(0.02)

model.GPT.init_weights = init_weights

_gpt = model.GPT(model.GPTConfig())
assert len(_gpt.model.embed_tokens.weight.unique()) == 1, 'the embedding is not constant'
