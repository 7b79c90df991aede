# The gradients of all steps before stay in the sum. For config/lab_museum.py.
import torch

def zero_grad(self, set_to_none=True):
    pass

torch.optim.Optimizer.zero_grad = zero_grad
