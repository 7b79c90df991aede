# Characters, bytes, words, or pieces of words? At the same compute, in bits per byte of text, so that all can be compared: an
# unknown word costs its bytes. Three seeds.
#   python bench.py config/lab.py config/lab_tokenizers.py --dataset=my_text.txt
import torch
from model import GPT, GPTConfig

what = 'compare'
out_dir = 'out/lab_tokenizers'

def flops(vocab):
    with torch.device('meta'):
        return GPT(GPTConfig(vocab_size=vocab, block_size=block_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd)).flops_per_token()

arms = '\n'.join(f'{name}: --tokenizer={name.split()[0]} --vocab_size={vocab} --max_iters={round(max_iters * flops(1024) / flops(vocab))}'
                 for name, vocab in (('bpe 1,024', 1024), ('bpe 512', 512), ('bpe 4,096', 4096), ('char', 100), ('byte', 257), ('word 4,096', 4096)))
