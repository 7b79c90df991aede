# The target of each token is the token itself. For config/lab_museum.py.
import prepare

_right = prepare.Shards.batch

def batch(self, starts, T, place='cpu'):
    x, y = _right(self, starts, T, place)
    return x, x

prepare.Shards.batch = batch
