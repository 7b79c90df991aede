# A range test (arXiv:1506.01186): one short run whose learning rate rises from 1e-4 to 10, until the loss does too. It ends with
# a suggestion, marked in curves.png: a third of the rate at which the loss was lowest.
#   python train.py config/train_tinystories.py config/find_lr.py
lr_schedule = 'find'
learning_rate = 10.0
max_iters = 200
eval_interval = 1_000_000
log_interval = 1
sample_tokens = 0
