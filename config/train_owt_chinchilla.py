# Trains 110M parameters on OpenWebText, 20 tokens per parameter (arXiv:2203.15556): 2,088 steps of 1,024 sequences x
# 1,024 = 1,048,576 tokens. It takes 1.7e18 FLOPs (7.70e8 for each of 2.19e9 tokens); it has not been measured here.
dataset = 'openwebtext'
vocab_size = 32_000
block_size = 1024
n_layer = 12
n_head = 12
n_embd = 768
d_ff = 2048
tie_weights = True
qk_norm = False

batch_size = 1024           # sequences per step, accumulated over as many micro-batches as needed
max_iters = 2_088
warmup_iters = 100
optimizer = 'adamw'
learning_rate = 3e-3
min_lr = 3e-5
lr_decay = 'cosine'
weight_decay = 0.1
beta2 = 0.95

eval_interval = 200
eval_tokens = 2_000_000
log_interval = 10
