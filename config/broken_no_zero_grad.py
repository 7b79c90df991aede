# The gradients of all steps before stay in the sum. For config/lab_museum.py.
import sys
from unittest import mock
assert 'train' in sys.modules, 'it breaks train.py from outside: run it with bench.py'
import train

def step(self, lr, max_norm=0.0, right=train.FlatOptimizer.step):
    g = self.g.clone()
    norm = right(self, lr, max_norm)
    self.g.copy_(g)
    return norm
mock.patch.object(train.FlatOptimizer, 'step', step).start()
