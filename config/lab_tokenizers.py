question = 'Characters, bytes, words, or pieces of words?'
# Compares tokenizers at the same compute, with three seeds. Compare bits per byte: losses per token, also those in
# the picture, are not comparable.
#   python bench.py config/lab.py config/lab_tokenizers.py --dataset=my_text.txt
# Answer (AMD): at equal compute, the bits per byte are 1.348 for words (4,096 tokens; bytes spell other words), 1.378,
# 1.469 and 1.579 for BPE of 4,096, 1,024 and 512, 1.915 for characters and 1.998 for bytes, with standard deviations of
# up to 0.034 over seeds. TinyStories has few different words.
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
