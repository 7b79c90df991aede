question = 'Characters, bytes, words, or pieces of words?'
# Compares tokenizers at the same compute, with three seeds, in bits per byte of text, so that all are comparable.
#   python bench.py config/lab.py config/lab_tokenizers.py --dataset=my_text.txt
# Answer: at equal compute, the bits per byte are 1.389 for BPE of 4,096, 1.827 for words, 1.929 for characters and
# 2.050 for bytes.
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
    _option = _vocab if _kind in ('bpe', 'word') else 4096          # the default, which the others ignore
    variants += f'{_kind} {_vocab}: --tokenizer={_kind} --vocab_size={_option} --max_iters={_steps}\n'
