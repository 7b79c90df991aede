question = 'Which shape, for the same FLOPs?'
# Context length at the same number of tokens a step; depth against width at the same total FLOPs. Three seeds.
#   python bench.py config/lab.py config/lab_shape.py --dataset=my_text.txt
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
