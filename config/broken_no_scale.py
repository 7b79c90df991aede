# For config/lab_formats.py, with --dtype=float16: the loss is not scaled, as if it were bfloat16, so small gradients
# become 0.
from torch.amp import GradScaler

_right = GradScaler.__init__

def init(self, *args, **settings):
    settings['enabled'] = False
    _right(self, *args, **settings)

GradScaler.__init__ = init
assert not GradScaler('cpu', enabled=True).is_enabled(), 'the loss is still scaled'
