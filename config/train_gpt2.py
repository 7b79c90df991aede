# Trains GPT-2 124M (GELU, LayerNorm, learned positions, biases, tied weights) on 10B tokens of FineWeb-Edu with the
# schedule of Karpathy's build-nanogpt: 19,073 steps of 512 sequences x 1,024 = 524,288 tokens. It takes 8.5e18 FLOPs
# (8.54e8 per token): 5.4 hours at the 510,000 tokens/s of one H100 (measured), or 45 minutes on eight at 40% of their
# peak.
#   torchrun --nproc_per_node=8 train.py config/train_gpt2.py
# The result has not been measured here.
dataset = 'fineweb_edu'
tokenizer = 'gpt2'
block_size = 1024
n_layer = 12
n_head = 12
n_embd = 768
bias = True
tie_weights = True
qk_norm = False
norm = 'layer'
position = 'learned'
mlp = 'gelu'

batch_size = 512
max_iters = 19_073
warmup_iters = 715
optimizer = 'adamw'
learning_rate = 6e-4
min_lr = 6e-5
lr_decay = 'cosine'
weight_decay = 0.1
beta2 = 0.95

eval_interval = 1000
eval_tokens = 2_000_000
log_interval = 10
