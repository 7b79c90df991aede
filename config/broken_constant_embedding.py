# All tokens begin as the same vector. For config/lab_museum.py.
from unittest import mock
import model

def init_weights(self, right=model.GPT.init_weights):
    right(self)
    self.wte.weight.data.fill_(0.02)
mock.patch.object(model.GPT, 'init_weights', init_weights).start()
