# Trains 12 layers with 134M parameters on OpenWebText (the sample of Stanford's CS336): 50,000 steps of 64 sequences x
# 256 = 16,384 tokens, or 8.2e8 tokens in all. It takes 5.6e17 FLOPs (6.85e8 per token).
# Others report a validation loss of about 3.4 after 5 h 38 min on an RTX 5090; it has not been measured here.
dataset = 'openwebtext'
vocab_size = 32_000
block_size = 256
n_layer = 12
n_head = 12
n_embd = 768
d_ff = 2048
tie_weights = False
qk_norm = False

batch_size = 64
max_iters = 50_000
warmup_iters = 5_000
optimizer = 'adamw'
learning_rate = 1e-3
min_lr = 1e-4
lr_decay = 'cosine'
weight_decay = 0.01
beta2 = 0.95

eval_interval = 1_000
eval_tokens = 2_000_000
log_interval = 100
