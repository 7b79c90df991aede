# Every token sees those after it, its own target among them. For config/lab_museum.py.
from unittest import mock
import torch.nn.functional as F
import model

def attend(self, q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=k.size(1) < q.size(1))
mock.patch.object(model.Attention, 'attend', attend).start()
