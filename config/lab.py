# A model that a CPU core trains in a minute or so, for experiments with many runs: 4 layers, 128 wide, 1.1M
# parameters, 614,400 tokens. It composes with any data set and with the questions in config/lab_*.py, which compute
# their variants from the options set before them:
#   python bench.py config/lab.py config/lab_ablations.py --dataset=my_text.txt
dataset = 'tinystories'
vocab_size = 1024
block_size = 128
n_layer = 4
n_head = 4
n_embd = 128
tie_weights = False
qk_norm = False

batch_size = 16
max_iters = 300
warmup_iters = 30
optimizer = 'adamw'
adamw_scale = embed_scale = 1.0         # one rate for all weights
learning_rate = 5e-3
lr_decay = 'cosine'
min_lr = 0.0
beta2 = 0.95

eval_interval = 1_000_000   # only at the end
log_interval = 10
keep_checkpoints = 1
sample_tokens = 0
