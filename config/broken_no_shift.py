# The target of each token is the token itself. For config/lab_museum.py.
from unittest import mock
import prepare

def batch(self, starts, T, place, right=prepare.Shards.batch):
    x, _ = right(self, starts, T, place)
    return x, x
mock.patch.object(prepare.Shards, 'batch', batch).start()
