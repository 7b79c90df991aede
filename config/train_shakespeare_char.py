# Trains on Shakespeare, character by character, at nanoGPT's GPU size (6 layers, 384 wide, context 256), with nanoGPT's
# optimizer and schedule, but not its layers: 5,000 steps of 64 sequences x 256 = 16,384 tokens, or 82 epochs of 1 MB,
# hence the dropout.
# Measured on an H100 with --sample_tokens=0 --log_interval=250 --keep_checkpoints=1: 93 s after compiling, a best
# validation loss of 1.4734 (at step 1,000, after 18 s) and 1.9479 at the end (nanoGPT reports a best one of 1.4697).
dataset = 'shakespeare'
tokenizer = 'char'
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2

batch_size = 64
max_iters = 5_000
warmup_iters = 100
optimizer = 'adamw'
learning_rate = 1e-3
min_lr = 1e-4
lr_decay = 'cosine'
beta2 = 0.99

eval_tokens = 0
log_interval = 10
sample_tokens = 100
sample_start = '\n'
