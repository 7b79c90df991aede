# A range test (arXiv:1506.01186): one short run whose learning rate rises from 1e-4 to 10, until the loss does too. The line it
# ends with, and the mark in curves.png, say where the loss fell fastest.
#   python train.py config/train_tinystories.py config/find_lr.py
lr_schedule = 'find'
learning_rate = 10.0
max_iters = 200
eval_interval = 1_000_000
log_interval = 1
sample_tokens = 0
