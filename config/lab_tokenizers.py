question = 'Characters, bytes, words, or pieces of words?'
# At the same compute, and in bits per byte of text, so that all can be compared: an unknown word costs its bytes.
# Three seeds.
#   python bench.py config/lab.py config/lab_tokenizers.py --dataset=my_text.txt
import torch
from model import GPT, GPTConfig

what = 'compare'
out_dir = 'out/lab_tokenizers'

_model = {name: value for name, value in globals().items() if name in GPTConfig.__dataclass_fields__}

def flops(vocab):
    with torch.device('meta'):
        return GPT(GPTConfig(**{**_model, 'vocab_size': vocab})).flops_per_token()

variants = ''
for _kind, _vocab in (('bpe', 1024), ('bpe', 512), ('bpe', 4096), ('char', 100), ('byte', 257), ('word', 4096)):
    _steps = round(max_iters * flops(1024) / flops(_vocab))
    variants += f'{_kind} {_vocab}: --tokenizer={_kind} --vocab_size={_vocab} --max_iters={_steps}\n'
