# Trains the model of train_tinystories.py on a CPU: 5,000 steps of 32 sequences x 256 = 8,192 tokens, 40,960,000 in
# all. It takes 4.6e15 FLOPs, or an estimated 2.5 hours on two cores with AMX.
# The target is a validation loss of 2.00; it has not been measured here.
dataset = 'tinystories'
vocab_size = 10_000
block_size = 256
n_layer = 4
n_head = 16
n_embd = 512
d_ff = 1344
tie_weights = False
qk_norm = False

batch_size = 32
max_iters = 5_000
warmup_iters = 200
optimizer = 'adamw'
learning_rate = 1e-3
min_lr = 1e-5
lr_decay = 'cosine'
beta2 = 0.95

eval_interval = 500
eval_tokens = 200_000
log_interval = 20
sample_start = 'Once upon a time'
