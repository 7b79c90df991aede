# Trains a small model in one to two minutes on a CPU core, for experiments with many runs: 4 layers, 128 wide, 1.1M
# parameters, 614,400 tokens. It works with any data set and with the questions in config/lab_*.py, which compute their
# variants from the options set before them:
#   python bench.py config/lab.py config/lab_ablations.py --dataset=my_text.txt
# An experiment ends with a table, and a picture in its out_dir. If it is interrupted, the same command continues it
# without repeating finished runs (those that diverged are repeated).
#
# The answers in config/lab_*.py are validation losses on 3.5 MB of TinyStories, means of seeds 1 to 3 unless stated,
# measured on an AMD EPYC with AVX512_BF16, or with AVX2 where they say so. The baseline is this file with that text,
# AdamW at 5e-3. It ends at 3.138 on both, with a standard deviation of 0.011 over seeds. The answers hold for short
# runs of a small model: repeat the experiments with yours.
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
