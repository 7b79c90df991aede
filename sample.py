"""
Generates text from a trained model, and looks into one that is being trained.

    python sample.py                                       # from the newest run in out/
    python sample.py --out_dir=out/python --start='def' --temperature=0.8 --top_p=0.9
    python sample.py --out_dir=path/to/a/huggingface/folder --start=FILE:prompt.txt
    python sample.py --start='Once upon a time' --num_samples=20 --table      # what temperature and top_p do

The first sample appears as it is generated, the others of the batch after it, then the speed.
"""
import codecs
import math
import re
import sys
import time
from pathlib import Path

import torch

from configurator import UserError, all_reduce, check_ranges, configure, launch, read_json, visible
from model import checkpoints, choose_compile, choose_device, choose_dtype, load_model, newest_whole, set_up, softmax
from tokenizer import load_tokenizer

# -----------------------------------------------------------------------------
out_dir = ''            # a run, a checkpoint, or a Hugging Face folder; '': the newest run in out/
start = ''              # the prompt, or FILE:path; '': the end-of-text token, so that a new document begins
num_samples = 4         # texts, generated as one batch
max_new_tokens = 256    # tokens per text; a text that ends by itself is shorter
temperature = 0.8       # below 1: more likely tokens only; 0: always the likeliest
top_k = 0               # only the k likeliest tokens; 0: all
top_p = 1.0             # only the likeliest tokens that together have this probability
table = False           # instead: temperatures 0, 0.2, 1, 2 and top_p 0.9 side by side, and how many of the texts begin differently
seed = 1337             # the same seed, device and settings give the same text
device = 'auto'         # auto, cpu, cuda, cuda:1, mps
dtype = 'auto'          # auto, float32, bfloat16, float16: of the weights and all that is computed
compile = False         # faster tokens, after half a minute of compiling: for long texts
# -----------------------------------------------------------------------------
config = configure(globals(), quiet=True)     # so that standard output is the text alone

def filter_logits(logits, temperature, top_k=0, top_p=1.0):
    """
    logits (B, V) -> probabilities (B, n) and ids (B, n) of the tokens that may come, None for all V: softmax of logits /
    temperature, of the top_k likeliest tokens, and of the fewest likeliest ones whose probabilities reach top_p (nucleus
    sampling, arXiv:1904.09751).
    """
    ids = None
    if 0 < top_k < logits.size(-1) or top_p < 1:
        logits, ids = logits.topk(top_k) if 0 < top_k < logits.size(-1) else logits.sort(descending=True)
    probs = softmax(logits / temperature, -1)
    if top_p < 1:
        before = probs.cumsum(-1) - probs               # what the likelier ones have together
        probs = probs.masked_fill(before >= top_p, 0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs, ids

def draw(probs, ids, u):
    """One id (B,) for each row of probabilities, by its number u (B,) from 0 to 1."""
    edges = probs.cumsum(-1)
    i = torch.searchsorted(edges, (u * (1 - 1e-6))[:, None] * edges[:, -1:], right=True).clamp(max=edges.size(-1) - 1)
    return (i if ids is None else ids.gather(-1, i))[:, 0]

@torch.no_grad()
def generate(model, prompts, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, stop=None, vocab_size=None, seed=0,
             cache=True, step=None):
    """
    Continues a batch of prompts, lists of ids that may differ in length -> yields (B,) ids, one for each text,
    max_new_tokens times or until every text has had the token `stop` (after which it yields `stop` for that text).

    Text i is drawn with numbers that depend on seed + i alone: it is what its prompt gives alone, with that seed. When
    a context is full, its last half is kept and goes through the model again. Ids from vocab_size on, which the model may
    have but the tokenizer lacks, are never drawn. cache=False computes the same without a KV cache. step: the model,
    compiled or not, for one token at a time.
    """
    place, block_size, B = model.wte.weight.device, model.config.block_size, len(prompts)
    texts = [list(map(int, p))[-block_size:] for p in prompts]
    if temperature:
        u = torch.stack([torch.rand(max_new_tokens, generator=torch.Generator().manual_seed(seed + i)) for i in range(B)], 1).to(place)
    ended, kv = torch.zeros(B, dtype=torch.bool, device=place), None
    if cache:
        kv = model.new_cache(B, min(block_size, max(map(len, texts)) + max_new_tokens))
    new, step = None, model if step is None else step
    for i in range(max_new_tokens):
        full = [len(t) > block_size for t in texts]
        if new is None or any(full) or not cache:       # all of the texts
            texts = [t[-max(block_size // 2, 1):] if f else t for t, f in zip(texts, full)]
            lengths = torch.tensor([*map(len, texts)], device=place)
            T = max(map(len, texts))
            idx = torch.tensor([t + [0] * (T - len(t)) for t in texts], device=place)
            if cache:
                kv.lengths.zero_()
                logits = model(idx, cache=kv, lengths=lengths)[0][:, 0]
            else:
                logits = model(idx)[0][torch.arange(B, device=place), lengths - 1]
        else:
            logits = step(new[:, None], cache=kv)[0][:, 0]
        logits = logits[:, :vocab_size]
        new = draw(*filter_logits(logits, temperature, top_k, top_p), u[i]) if temperature else logits.argmax(-1)
        if stop is not None:
            new = torch.where(ended, stop, new)
            ended |= new == stop
        yield new
        for text, id in zip(texts, new.tolist()):
            text.append(id)
        if all(t[-1] == stop for t in texts):
            return

def compile_step(model, place):
    """The model, compiled for one token at a time; on a GPU with its launches recorded, and played back as one."""
    from torch._inductor import decomposition
    # the compiler's own product of a matrix and a vector runs at half the speed of torch.mv in bfloat16
    for op in (torch.ops.aten.mv.default, torch.ops.aten.addmv.default):
        getattr(decomposition, 'decompositions', {}).pop(op, None)
    return torch.compile(model, dynamic=False, mode='reduce-overhead' if place.startswith('cuda') else None)

class TextStream:
    """Ids in, text out, never half a character: a character of several bytes appears when its last byte does."""

    def __init__(self, tok):
        self.tok, self.decoder = tok, codecs.getincrementaldecoder('utf-8')('replace')

    def __call__(self, id):
        return self.decoder.decode(self.tok.decode_bytes([id]))

    def end(self):
        return self.decoder.decode(b'', True)

# -----------------------------------------------------------------------------
# a look into a model in training

def peek(model, tok, start, num_samples, max_new_tokens, seed):
    """Some texts of a model in training, for a person to look at."""
    model.eval()
    prompts = [tok.encode(start) or [tok.eot or 0]] * num_samples
    rows = torch.stack(list(generate(model, prompts, max_new_tokens, 0.8, stop=tok.eot, vocab_size=tok.vocab_size, seed=seed)), 1).tolist()
    model.train()
    return [start + tok.decode([i for i in row if i != tok.eot]) for row in rows]

LOG_BINS = [x / 4 for x in range(-40, 12)]      # powers of ten: |value| from 1e-10 to 1e3
SEEN = dict(activations='share of activations by log10 |x|', gradients='share of gradients by log10 |x|',
            weights='share of weights by log10 |x|', updates='log10 of |update| / |weight| by step',
            dead='share of MLP units that no token uses, by step', entropy='entropy of attention by step (1: all alike)')

@torch.no_grad()
def diagnose(model, idx, before, gradients, after):
    """
    What one learns to read in a network, by layer, after a step of the optimizer that took the weights `before` with these
    gradients to `after` ({name: tensor}): histograms of activations (outputs of blocks, for idx), gradients and weights; how
    far the step went for its weights; units of the MLP below 1% of its usual output for every token; and the entropy of
    attention as a share of the largest that so many tokens allow. -> {name in SEEN: {layer: number or shares}}
    """
    found = {name: {} for name in SEEN}
    def shares(x):
        x = x.float().abs()
        return (torch.histc(x[x > 0].log10(), len(LOG_BINS), -10, 3) / x.numel()).tolist()
    for name in after:
        layer = re.match(r'h\.\d+|\w+', name)[0]
        if after[name].dim() >= 2 and layer not in found['weights']:
            own = [n for n in after if n.startswith(f'{layer}.') and after[n].dim() >= 2]
            w, g, old = (torch.cat([x[n].flatten() for n in own]) for x in (after, gradients, before))
            found['weights'][layer], found['gradients'][layer] = shares(w), shares(g)
            found['updates'][layer] = math.log10(max(float((w - old).norm() / old.norm()), 1e-10))
    def watch(name, block):
        def attend(q, k, v, mask=None):
            T = q.size(2)
            scores = (q @ k.repeat_interleave(q.size(1) // k.size(1), 1).mT / q.size(-1) ** 0.5).float()
            probs = softmax(scores.masked_fill(torch.ones(T, T, device=q.device).tril() == 0, -math.inf), -1)
            most = torch.arange(1, T + 1, device=q.device).log()        # the first token sees itself alone
            found['entropy'][name] = float((torch.special.entr(probs).sum(-1) / most)[..., 1:].mean())
            return right(q, k, v, mask)
        right, block.attn.attend = block.attn.attend, attend
        yield block.register_forward_hook(lambda module, args, out: found['activations'].update({name: shares(out)}))
        yield block.mlp.down.register_forward_pre_hook(lambda module, args: found['dead'].update(
            {name: float((args[0].abs().flatten(0, -2).amax(0) < 0.01 * args[0].float().pow(2).mean().sqrt()).float().mean())}))
    hooks = [hook for i, block in enumerate(model.h) for hook in watch(f'h.{i}', block)]
    model.eval()(idx)
    model.train()
    for hook in hooks:
        hook.remove()
    for block in model.h:
        del block.attn.attend
    return found

@torch.no_grad()
def first_not_finite(model, batches, loss, rank, world_size):
    """
    The name of what was not finite first in a step: a weight, an output of the forward pass, which is done again, the
    loss, or, from the loss down, a gradient. Of several processes that in which it came first has the name, the others ''.
    """
    finite, outputs = lambda x: not torch.is_tensor(x) or bool(x.isfinite().all()), []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, _, out, name=name: None if finite(out) else outputs.append(f'output of {name}'))
    for x, y in batches:
        model(x, y)
    params = list(model.named_parameters())
    found = [[f'weight {name}' for name, p in params if not finite(p)], outputs, ['loss'] * (not math.isfinite(loss)),
             [f'gradient of {name}' for name, p in reversed(params) if not finite(p.grad)], ['norm of the gradient']]
    stage = next(i for i, names in enumerate(found) if names)
    first = torch.tensor([stage * world_size + rank], device=params[0][1].device)
    if world_size > 1:
        all_reduce(first, 'MIN')
    return found[stage][0] if int(first) == stage * world_size + rank else ''

# -----------------------------------------------------------------------------

def print_table(model, tok, ids, prompt, stop, step):
    """The first of num_samples texts at several temperatures, and how many different five words they begin with."""
    for t, p in (0.0, 1.0), (0.2, 1.0), (1.0, 1.0), (1.0, 0.9), (2.0, 1.0):
        new = generate(model, [ids] * num_samples, max_new_tokens, t, top_k, p, stop, tok.vocab_size, seed, step=step)
        texts = [tok.decode([i for i in row if i != stop]) for row in torch.stack(list(new), 1).tolist()]
        openings = {tuple(text.split()[:5]) for text in texts}
        print(f'temperature {t:g}, top_p {p:g}: {len(openings)} of {num_samples} begin differently\n{prompt}{texts[0]}\n' + '-' * 40)

def say(text):
    print(visible(str(text)), file=sys.stderr)

def find_checkpoint(path):
    """A run's newest checkpoint, a checkpoint itself, or a Hugging Face folder; '' is the newest run in out/."""
    if not path:
        runs = [r for r in Path('out').glob('*') if checkpoints(r)]
        if not runs:
            raise UserError('there is no run in out/ yet: `python train.py` makes one in about 2 minutes')
        path = max(runs, key=lambda r: checkpoints(r)[-1].stat().st_mtime)
    path = Path(path)
    if checkpoints(path):
        return newest_whole(path, say)
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
    check_ranges(config, (1, 10 ** 4, 'num_samples'), (1, 10 ** 7, 'max_new_tokens'), (0, 10 ** 18, 'top_k'), (0, 1000, 'temperature'),
                 (0, 1, 'top_p'))
    if not top_p or 0 < temperature < 1e-6:     # which logits can not be divided by
        raise UserError('top_p must be above 0, temperature 0 or at least 1e-6; try --temperature=0.8 --top_p=0.9')

def main():
    check_knobs()
    folder = find_checkpoint(out_dir)
    place, _ = choose_device(device)
    type_, _ = choose_dtype(dtype, place)
    set_up(place)
    model = load_model(folder).to(place, getattr(torch, type_)).eval()
    model.compute_dtype = getattr(torch, type_)
    if not (folder / 'tokenizer.json').exists():
        raise UserError(f'{folder} has no tokenizer.json; put that of its tokenizer there')
    tok = load_tokenizer(folder / 'tokenizer.json')
    stop = tok.eot if tok.eot is not None else read_json(folder / 'config.json').get('eos_token_id')
    stop = stop[0] if isinstance(stop, list) and stop else stop
    stop = stop if type(stop) is int and 0 <= stop < tok.vocab_size else None
    ids = tok.encode(read_prompt(start)) or ([stop] if stop is not None else [0])
    if max(ids) >= model.config.vocab_size:
        raise UserError(f'{folder}/tokenizer.json has ids outside the vocabulary of the model; use its own')
    compiled, why = choose_compile(compile, place)
    step = compile_step(model, place) if compiled else model
    say(f'{folder} | {model.num_params():,} parameters | {place}, {type_}, compile {compiled} ({why})')

    prompt, stream, texts = tok.decode(ids if start else []), TextStream(tok), [[] for _ in range(num_samples)]
    if table:
        return print_table(model, tok, ids, prompt, stop, step)
    print(prompt, end='', flush=True)
    t, done, count = time.perf_counter(), False, 0
    for new in generate(model, [ids] * num_samples, max_new_tokens, temperature, top_k, top_p, stop, tok.vocab_size, seed, step=step):
        for text, id in zip(texts, new.tolist()):
            if not text or text[-1] != stop:
                text.append(id)
                count += 1
        if not done:
            done = texts[0][-1] == stop
            print(stream.end() if done else stream(texts[0][-1]), end='', flush=True)
    seconds = time.perf_counter() - t
    print('' if done else stream.end())
    out = [prompt + tok.decode([i for i in text if i != stop]) for text in texts]
    for text in out[1:]:
        print('-' * 40)
        print(text)
    say(f'{count} tokens in {seconds:.2f} s: {count / seconds:.0f} tokens/s')
    return out

if __name__ == '__main__':
    launch(main)
