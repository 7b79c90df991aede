# Trains a model of 0.2M parameters to make up names, on makemore's names.txt, one name per document: 2,000 steps of
# 64 x 32 = 2,048 tokens, or 20 epochs. The rate falls linearly (the default).
# Measured: validation loss 1.837 after 1 min 13 s on two cores of an AMD EPYC with AVX512_BF16. Some of its names:
# nalia, leonnie, addaley, keilan.
dataset = 'names'
tokenizer = 'char'
block_size = 32
n_layer = 4
n_head = 4
n_embd = 64
tie_weights = True

batch_size = 64
max_iters = 2_000
optimizer = 'adamw'     # with muon, the loss ends at 1.914
learning_rate = 3e-3
warmup_iters = 50

eval_interval = 500
log_interval = 100
sample_tokens = 12
