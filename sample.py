"""
Generates text from a trained model.

    python sample.py                                       # from the newest run in out/
    python sample.py --out_dir=out/python --start='def' --temperature=0.8 --top_p=0.9
    python sample.py --out_dir=path/to/a/huggingface/folder --start=FILE:prompt.txt

The first sample appears as it is generated, the others of the batch after it, then the speed.
"""
import codecs
import sys
import time
from pathlib import Path

import torch

from configurator import UserError, configure, launch, read_json
from model import checkpoints, load_model, newest_whole, softmax
from tokenizer import load_tokenizer

# -----------------------------------------------------------------------------
out_dir = ''            # a run, a checkpoint, or a Hugging Face folder; '': the newest run in out/
start = ''              # the prompt, or FILE:path; '': the end-of-text token, so that a new document begins
num_samples = 4         # texts, generated as one batch
max_new_tokens = 256    # tokens per text; a text that ends by itself is shorter
temperature = 0.8       # below 1: more likely tokens only; 0: always the likeliest
top_k = 0               # only the k likeliest tokens; 0: all
top_p = 1.0             # only the likeliest tokens that together have this probability
seed = 1337             # the same seed, device and settings give the same text
device = 'auto'         # auto, cpu, cuda, cuda:1, mps
dtype = 'auto'          # auto (bfloat16 on a GPU that has it, else float32), float32, bfloat16
# -----------------------------------------------------------------------------
config = configure(globals(), quiet=True)     # so that standard output is the text alone

def filter_logits(logits, temperature, top_k=0, top_p=1.0):
    """
    logits (B, V) -> probabilities (B, V): softmax of logits / temperature, of the top_k likeliest tokens, and of the
    fewest likeliest ones whose probabilities reach top_p (nucleus sampling, arXiv:1904.09751).
    """
    logits = logits / temperature
    if 0 < top_k < logits.size(-1):
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float('-inf'))
    probs = softmax(logits, -1)
    if top_p < 1:
        ordered, order = probs.sort(descending=True)
        before = ordered.cumsum(-1) - ordered           # what the likelier ones have together
        ordered[before >= top_p] = 0
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs

@torch.no_grad()
def generate(model, ids, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, stop=None, vocab_size=None,
             generator=None, cache=True):
    """
    Continues a batch of prompts of equal length: ids (B, T) -> yields (B,) ids, one for each text, max_new_tokens times
    or until every text has had the token `stop` (after which it yields `stop` for that text).

    When the context is full, its last half is kept and goes through the model again. Ids from vocab_size on, which the
    model may have but the tokenizer lacks, are never drawn. cache=False computes the same without a KV cache.
    """
    block_size = model.config.block_size
    ids = ids[:, -block_size:]
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    kv, new = (model.new_cache(len(ids)) if cache else None), ids
    for _ in range(max_new_tokens):
        if ids.size(1) > block_size:
            ids = new = ids[:, -max(block_size // 2, 1):]
            kv = model.new_cache(len(ids)) if cache else None
        logits = (model(new, cache=kv) if cache else model(ids))[0][:, -1, :vocab_size]
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            new = torch.multinomial(filter_logits(logits, temperature, top_k, top_p), 1, generator=generator)
        if stop is not None:
            new = torch.where(ended[:, None], stop, new)
            ended |= new[:, 0] == stop
        yield new[:, 0]
        if stop is not None and ended.all():
            return
        ids = torch.cat((ids, new), 1)

class TextStream:
    """Ids in, text out, never half a character: a character of several bytes appears when its last byte does."""

    def __init__(self, tok):
        self.tok, self.decoder = tok, codecs.getincrementaldecoder('utf-8')('replace')

    def __call__(self, id):
        return self.decoder.decode(self.tok.decode_bytes([id]))

    def end(self):
        return self.decoder.decode(b'', True)

def visible(text):
    """Control characters, which could steer a terminal, as escapes; line breaks and tabs stay."""
    return ''.join(c if c in '\n\t' or c.isprintable() else c.encode('unicode_escape').decode() for c in text)

def find_checkpoint(path):
    """A run's newest checkpoint, a checkpoint itself, or a Hugging Face folder; '' is the newest run in out/."""
    if not path:
        runs = [r for r in Path('out').glob('*') if checkpoints(r)]
        if not runs:
            raise UserError('there is no run in out/ yet: `python train.py` makes one in about 3 minutes')
        path = max(runs, key=lambda r: checkpoints(r)[-1].stat().st_mtime)
    path = Path(path)
    if checkpoints(path):
        return newest_whole(path, lambda text: print(text, file=sys.stderr))
    if not (path / 'config.json').exists():
        raise UserError(f'there is no checkpoint in {path}: give the folder of a run, of a checkpoint, or of a '
                        f'Hugging Face model; `ls out` shows the runs')
    return path

def read_prompt(start):
    if not start.startswith('FILE:'):
        return start
    try:
        with open(start[5:], encoding='utf-8') as f:
            return f.read()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f'can not read the prompt {start[5:]}: {getattr(e, "strerror", None) or e}; check the path')

def check_knobs():
    if num_samples < 1 or max_new_tokens < 1:
        raise UserError('num_samples and max_new_tokens must be 1 or more')
    if not temperature >= 0 or not 0 < top_p <= 1 or top_k < 0:
        raise UserError('temperature must be 0 or more, top_p above 0 and at most 1, top_k 0 or more; '
                        'try --temperature=0.8 --top_p=0.9')
    if dtype not in ('auto', 'float32', 'bfloat16'):
        raise UserError(f'dtype = {dtype!r}: give auto, float32 or bfloat16')

def main():
    check_knobs()
    folder = find_checkpoint(out_dir)
    if not (folder / 'tokenizer.json').exists():
        raise UserError(f'{folder} has no tokenizer.json; put that of its tokenizer there')
    tok = load_tokenizer(folder / 'tokenizer.json')
    place = device if device != 'auto' else \
        'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    try:
        model = load_model(folder).to(place).eval()
    except (RuntimeError, AssertionError) as e:
        raise UserError(f'device {device!r} can not be used ({str(e).splitlines()[0]}); try --device=cpu')
    half = dtype == 'bfloat16' or \
        dtype == 'auto' and place.startswith('cuda') and torch.cuda.is_bf16_supported(including_emulation=False)
    model.compute_dtype = torch.bfloat16 if half else torch.float32
    stop = tok.eot if tok.eot is not None else read_json(folder / 'config.json').get('eos_token_id')
    stop = stop[0] if isinstance(stop, list) else stop
    ids = tok.encode(read_prompt(start)) or ([stop] if stop is not None else [0])
    if max(ids) >= model.config.vocab_size:
        raise UserError(f'{folder}/tokenizer.json has ids outside the vocabulary of the model; use its own')
    print(f'{folder} | {model.num_params():,} parameters | {place}, {str(model.compute_dtype)[6:]}', file=sys.stderr)

    generator = torch.Generator(place).manual_seed(seed)
    batch = torch.tensor([ids] * num_samples, device=place)
    prompt, stream, texts = tok.decode(ids if start else []), TextStream(tok), [[] for _ in range(num_samples)]
    print(visible(prompt), end='', flush=True)
    t, done, count = time.perf_counter(), False, 0
    for new in generate(model, batch, max_new_tokens, temperature, top_k, top_p, stop, tok.vocab_size, generator):
        for text, id in zip(texts, new.tolist()):
            if not text or text[-1] != stop:
                text.append(id)
                count += 1
        if not done:
            done = texts[0][-1] == stop
            print(visible(stream.end() if done else stream(texts[0][-1])), end='', flush=True)
    seconds = time.perf_counter() - t
    print('' if done else visible(stream.end()))
    out = [prompt + tok.decode([i for i in text if i != stop]) for text in texts]
    for text in out[1:]:
        print('-' * 40)
        print(visible(text))
    print(f'{count} tokens in {seconds:.2f} s: {count / seconds:.0f} tokens/s', file=sys.stderr)
    return out

if __name__ == '__main__':
    launch(main)
