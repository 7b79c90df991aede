# Context length at the same tokens a step, and depth against width at the same FLOPs in all. Three seeds.
#   python bench.py config/lab.py config/lab_shape.py --dataset=my_text.txt
import torch
from model import GPT, GPTConfig

what = 'compare'
out_dir = 'out/lab_shape'

def flops(**shape):
    with torch.device('meta'):
        return GPT(GPTConfig(**dict(dict(vocab_size=vocab_size, block_size=block_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd), **shape))
                   ).flops_per_token()

arms = '\n'.join([
    f'{n_layer} layers, {n_embd} wide, context {block_size}:',
    *(f'context {T}: --block_size={T} --batch_size={batch_size * block_size // T}' for T in (block_size // 4, block_size // 2, block_size * 2)),
    *(f'{n} layers, {C} wide: --n_layer={n} --n_embd={C} --max_iters={round(max_iters * flops() / flops(n_layer=n, n_embd=C))}'
      for n, C in ((n_layer // 4 or 1, n_embd * 2), (n_layer // 2 or 1, n_embd * 3 // 2 // 8 * 8), (n_layer * 2, n_embd * 3 // 4 // 8 * 8)))])
