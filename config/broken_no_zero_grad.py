# For config/lab_museum.py: the gradients of all earlier steps stay in the sum.
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_called = set()

def zero_grad(self, set_to_none=True):
    _called.add(self)

def check(optimizer, args, settings):
    assert optimizer in _called, 'train.py sets the gradients to zero in another way'

Optimizer.zero_grad = zero_grad
register_optimizer_step_pre_hook(check)
