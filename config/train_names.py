# Names, one a document (makemore's names.txt): a model of 0.2M parameters that makes up new ones.
# 20 epochs. measured: validation loss 1.838 after 1 min 56 s on two CPU cores; its first names: alexander, matsaly,
# yvangel, maryah.
dataset = 'names'
tokenizer = 'char'
block_size = 32
n_layer = 4
n_head = 4
n_embd = 64

batch_size = 64
max_iters = 2_000
muon = False
learning_rate = 3e-3
warmup_iters = 50

eval_interval = 500
log_interval = 100
sample_tokens = 12
