question = 'Which shape, for the same FLOPs?'
# Varies the context length at the same number of tokens per step, and depth against width at the same total FLOPs, with
# three seeds.
#   python bench.py config/lab.py config/lab_shape.py --dataset=my_text.txt
# Answer (AMD): at equal FLOPs, 4 layers of 128 beat 1, 2 and 8 layers, which cost 0.143, 0.027 and 0.081. A context of
# 32 beats 128 by 0.108 in so short a run.
import torch
from model import GPT, GPTConfig

what = 'compare'
out_dir = 'out/lab_shape'
variants = f'{n_layer} layers, {n_embd} wide, context {block_size}:\n'
for _context in (block_size // 4, block_size // 2, block_size * 2):
    _sequences = batch_size * block_size // _context
    variants += f'context {_context}: --block_size={_context} --batch_size={_sequences}\n'

_model = {name: value for name, value in globals().items() if name in GPTConfig.__dataclass_fields__}

def flops(**shape):
    with torch.device('meta'):
        return GPT(GPTConfig(**{**_model, **shape})).flops_per_token()

for _layers, _width in ((n_layer // 4 or 1, n_embd * 2), (n_layer // 2 or 1, n_embd * 3 // 2),
                        (n_layer * 2, n_embd * 3 // 4)):
    _width = _width // 8 * 8
    _steps = round(max_iters * flops() / flops(n_layer=_layers, n_embd=_width))
    variants += f'{_layers} layers, {_width} wide: --n_layer={_layers} --n_embd={_width} --max_iters={_steps}\n'
