# Names, one a document (makemore's names.txt): a model of 0.2M parameters that makes up new ones in about a minute.
dataset = 'names'
tokenizer = 'char'
block_size = 32
n_layer = 4
n_head = 4
n_embd = 64

batch_size = 64
max_iters = 2_000
learning_rate = 3e-3
warmup_iters = 50

eval_interval = 500
log_interval = 100
sample_tokens = 12
