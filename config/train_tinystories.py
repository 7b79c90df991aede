# Trains on TinyStories (arXiv:2305.07759) at the size used in courses: 22.7M parameters, 5,000 steps of 256 sequences x
# 256 = 65,536 tokens, 327,680,000 in all. It takes 3.7e16 FLOPs (1.12e8 per token): two minutes at the 23.5 ms per step
# of an H100 (measured), or about 20 hours on two CPU cores with AMX (an estimate, like that in
# train_tinystories_cpu.py). The target is a validation loss of 1.45; it has not been measured here.
dataset = 'tinystories'
vocab_size = 10_000
block_size = 256
n_layer = 4
n_head = 16
n_embd = 512
d_ff = 1344
tie_weights = False
qk_norm = False

batch_size = 256
max_iters = 5_000
warmup_iters = 250
optimizer = 'adamw'
learning_rate = 2e-3
min_lr = 2e-5
lr_decay = 'cosine'
beta2 = 0.95

eval_interval = 1000
eval_tokens = 2_000_000
log_interval = 50
sample_start = 'Once upon a time'
