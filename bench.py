"""
How fast things are on this machine, and how close to the limit.

    python bench.py                                # a training step of the default model
    python bench.py config/train_gpt2.py --batch_size=32 --micro_batch_size=32
    torchrun --nproc_per_node=4 bench.py
    python bench.py --what=sample --samples=4      # tokens/s of generation, and the share of the memory's bandwidth
    python bench.py --what=ladder                  # from the plain form to the fast one, a row for each step
    python bench.py --what=check                   # does this device compute what it should?
    python bench.py --what=formats                 # what fp32, fp16, bf16 and fp8 can hold, and what becomes of gradients
    python bench.py --what=toy                     # SGD to AdamW, at rates from too low to too high
    python bench.py --what=curves --runs=out/a,out/b             # several runs in one picture and one table
    python bench.py --what=resources config/train_gpt2.py        # parameters, FLOPs, memory, days: what it will cost
    python bench.py config/lab.py config/lab_ablations.py        # what does each part buy? see config/lab_*.py
    python bench.py --what=tokenizer --dataset=my_text.txt       # beside rustbpe, tokenizers, tiktoken, riptoken where installed

It takes the knobs of train.py, trains on random tokens, and prints milliseconds, tokens/s, MFU and peak memory, and how long two well-known
runs would take. MFU is achieved over peak dense bf16 FLOP/s, counting 6 FLOPs per weight of a matmul and 12 n_layer n_embd T for attention
per token (no discount for the causal mask). Where the peak is not known it is the rate of the largest matmul measured here.
"""
import bisect
import contextlib
import itertools
import math
import multiprocessing
import os
import re
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module, metadata, util
from json import dumps
from pathlib import Path
from statistics import median, stdev
from unittest import mock

import numpy as np
import torch

import prepare
import sample
import tokenizer as bpe
import train
from configurator import (Diverged, UserError, all_reduce, as_file, check_ranges, configure, connect, default_workers, duration, is_rank_0,
                          launch, leave, parallel_map, peak_memory, read_arguments, read_log, run_file, setup_ranks, short, unlock)
from model import GPT, GPT2, GPTConfig, choose_compile, choose_device, choose_dtype, peak_flops, set_up, synchronize

# -----------------------------------------------------------------------------
what = 'train'          # a training step, or: sample, tokenizer, check (is this device right?), ladder (what each step of the way
                        # buys), resources (what a model costs), formats (what numbers hold), toy (optimizers on a toy),
                        # compare (arms with seeds, see config/lab_*.py), scaling (a law fitted to these), curves (of runs)
arms = ''               # of compare: 'name: arguments of train.py', in lines or with ; between them
seeds = 3               # of compare: runs of each arm, from --seed on
runs = ''               # of curves: folders, with commas between them
rounds = 3              # of samples and tokenizers, in turns; the median counts
samples = 1             # texts at once
new_tokens = 200        # of each text
steps = 20              # measured optimizer steps
warmup_steps = 5        # steps before them
profile = False         # also say where the time of a step goes
json = False            # end with a line for machines
memory_gb = 80.0        # resources: memory of a card, in GB of 10^9 bytes
num_gpus = 1            # resources: cards
peak_tflops = 989.5     # resources: of a card, dense (989.5: an H100 in bfloat16; the 1,979 of its data sheet are for sparse matrices)
mfu = 0.4               # resources: the share of that which training reaches
tokens = 0.0            # resources: to train on, such as 15e12; 0: those of the run
flop_budget = 0.0       # resources: to spend on a model of the best size; 0: the FLOPs of the run
# -----------------------------------------------------------------------------
defaults = dict(train.config)
config = configure(globals(), vars(train))
train.config.update({k: config[k] for k in train.config})

TOY_RATES = 1e-1, 1e0, 1e1, 1e2, 1e3
folder_of = partial(re.sub, '[^A-Za-z0-9.]+', '_')      # name of an arm -> name of its folder

# what people ask about: config files, whose runs `python bench.py` estimates
HERE = Path(__file__).parent
RUNS = [HERE / 'config' / name for name in ('train_tinystories.py', 'train_gpt2.py')]

def seconds_of(function, place='cpu'):
    """Seconds until a device has done all that a function asks of it."""
    synchronize(place)
    t = time.perf_counter()
    function()
    synchronize(place)
    return time.perf_counter() - t

def measure(function, place):
    """Median of the seconds that a function takes, `steps` times after a warm-up."""
    return median([seconds_of(function, place) for _ in range(warmup_steps + steps)][warmup_steps:])

def matmul_flops(place, dtype):
    """The largest rate of a square matmul on this device, in FLOP/s."""
    best = 0.0
    for n in (1024, 2048, 4096, 8192) if place.startswith('cuda') else (512, 1024, 2048):
        a, b = torch.randn(2, n, n, device=place, dtype=dtype)
        best = max(best, 2 * n ** 3 / min(seconds_of(lambda: a @ b, place) for _ in range(5)))
    return best

def bandwidth(place):
    """Bytes per second at which this device reads its memory."""
    x = torch.ones(500_000_000 if place.startswith('cuda') else 50_000_000, device=place)
    return 4 * len(x) / min(seconds_of(x.sum, place) for _ in range(10))

@dataclass
class RandomTokens:
    """Stands for the shards of a data set."""
    vocab_size: int

    def batch(self, starts, T, place):
        x = torch.randint(self.vocab_size, (len(starts), T + 1)).to(place)
        return x[:, :-1], x[:, 1:]

def make_step(fast, optimizer, batch, grad_accum, world_size=1):
    """A function that does one optimizer step of train.py, always on the same batch."""
    def step():
        for _ in range(grad_accum):
            (fast(*batch)[1] * (optimizer.loss_scale / (grad_accum * world_size))).backward()
        if world_size > 1:
            all_reduce(optimizer.g)
        optimizer.step(train.learning_rate, train.grad_clip)
    return step

def print_profile(step, place):
    """Where the time of a step goes: the ten operators or kernels that take the most."""
    with torch.profiler.profile() as found:
        step()
        synchronize(place)
    spent = lambda e: e.self_device_time_total if place.startswith('cuda') else e.self_cpu_time_total
    rows = sorted(found.key_averages(), key=spent, reverse=True)
    total = sum(map(spent, rows))
    for e in rows[:10]:
        print(f'profile | {100 * spent(e) / total:5.1f}% | {spent(e) / 1e3:8.2f} ms | {e.count:5} calls | {e.key[:70]}')

# -----------------------------------------------------------------------------
# tokenizers, beside the packages that are installed

def in_a_fork(function, before, after):
    """function() in a new process, when before() has run there. -> (its seconds, its peak memory in MB, after(its result))"""
    def child():
        before()
        (start, _), t = peak_memory(), time.perf_counter()
        result = function()
        seconds, (own, worker) = time.perf_counter() - t, peak_memory()
        theirs.send((seconds, (own - start + default_workers() * max(worker - start, 0)) / 1e6, after(result)))
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context('fork').Process(target=child)
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise UserError('a measurement died: is there enough memory? give a smaller --dataset')
    finally:
        process.join()

def contest(title, size, contestants, before=lambda: None, after=lambda result: None):
    """Runs {name: function}, those that are installed, in turns on `size` bytes, and prints medians. -> {name: after(its result)}"""
    runs = {name: [] for name in contestants if name in ('ours', *installed())}
    for i in range(rounds):
        for name in itertools.islice(itertools.cycle(runs), i, i + len(runs)):
            runs[name].append(in_a_fork(contestants[name], before, after))
    ours = median(s for s, *_ in runs['ours'])
    for name, seen in runs.items():
        seconds, memory = median(s for s, *_ in seen), median(m for _, m, _ in seen)
        print(f'{title:26} | {name:10} | {seconds:7.2f} s | {size / 1e6 / seconds:6.1f} MB/s | {memory:5.0f} MB'
              + (f' | {seconds / ours:.2f} times ours' if name != 'ours' else ''), flush=True)
        title = ''
    return {name: seen[0][2] for name, seen in runs.items()}

def installed():
    """{name: package} of those that do the same work"""
    return {name: import_module(name) for name in ('tokenizers', 'rustbpe', 'tiktoken', 'riptoken') if util.find_spec(name)}

def train_rustbpe(docs, vocab_size):
    """The tokens (as bytes) that it learns with GPT-2's pattern, without special ones."""
    tok = installed()['rustbpe'].Tokenizer()
    tok.train_from_iterator(iter(docs), vocab_size - 1, pattern=bpe.PATTERNS['gpt2'])
    return {bytes(token) for token, _ in tok.get_mergeable_ranks()}

def train_hf(docs, vocab_size):
    hf = installed()['tokenizers']
    level, tok = hf.pre_tokenizers.ByteLevel, hf.Tokenizer(hf.models.BPE())
    tok.pre_tokenizer = level(add_prefix_space=False)
    tok.train_from_iterator(docs, hf.trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, initial_alphabet=level.alphabet(),
                                                         special_tokens=[bpe.END_OF_TEXT]))
    return tok

def bench_tokenizer():
    if 'fork' not in multiprocessing.get_all_start_methods():
        raise UserError('--what=tokenizer needs processes that can fork: run it on Linux or macOS')
    source, end, kind = prepare.find_source(config['dataset']), bpe.END_OF_TEXT, config['tokenizer']
    found = prepare.documents(sum(prepare.fetch(source), []), source['separator'], config['dataset'] == 'python')
    raw = b''.join(text + end.encode() * ends for text, ends in found)
    docs = raw.decode().split(end)
    print(f'{len(raw) / 1e6:.1f} MB in {len(docs):,} documents, {default_workers()} cores, median of {rounds} rounds in turns; '
          + ', '.join(f'{name} {metadata.version(name)}' for name in installed()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'text.txt'
        path.write_bytes(raw)
        for vocab_size in (10_000, 32_000):
            found = contest(f'train {vocab_size:,}', len(raw), {
                'ours': lambda: bpe.train_bpe(path, vocab_size, [end])[0].values(),
                'tokenizers': lambda: map(bpe.from_printable, train_hf(docs, vocab_size).get_vocab().keys() - {end}),
                'rustbpe': lambda: train_rustbpe(docs, vocab_size)}, after=set)
            print(f'{"":26} | tokens that are not ours: ' + ', '.join(
                f'{name} {len(tokens - found["ours"]):,}' for name, tokens in found.items() if name != 'ours'))
        tok = prepare.gpt2_tokenizer() if kind == 'gpt2' else bpe.load_tokenizer(kind) if os.path.isfile(kind) else \
            bpe.Tokenizer(*bpe.train_bpe(path, 32_000, [end]), [end])
        tok.save(path.with_suffix('.json'))
        encode_contests(tok, docs, path.with_suffix('.json'))
        prepare_contest(folder, path, len(raw))

def encode_contests(tok, docs, path):
    """All encoders with one vocabulary."""
    there, text, cores = installed(), '\n\n'.join(docs), default_workers()
    ranks, pattern = {b: i for i, b in tok.vocab.items() if i not in tok.special_ids.values()}, bpe.PATTERNS[tok.pattern_name]
    tik = 'tiktoken' in there and there['tiktoken'].Encoding('same', pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    rip = 'riptoken' in there and there['riptoken'].CoreBPE(ranks, {}, pattern)
    hf = 'tokenizers' in there and there['tokenizers'].Tokenizer.from_file(str(path))
    size, lists = len(text.encode()), {'ours': tok.encode_ordinary, 'tiktoken': tik and tik.encode_ordinary,
                                       'riptoken': rip and rip.encode_ordinary, 'tokenizers': hf and (lambda doc: hf.encode(doc).ids)}
    for name, f in lists.items():
        if f and any(f(doc) != tok.encode_ordinary(doc) for doc in docs[:50]):
            raise UserError(f'{name} gives other ids with this vocabulary: they can not be compared')
    tok.forget()
    for state, before in ('cold', lambda: None), ('warm', partial(tok.encode_to_numpy, '\n\n'.join(docs[::-1]))):
        found = contest(f'encode, array, {state}', size, {
            'ours': lambda: tok.encode_to_numpy(text), 'tiktoken': lambda: tik.encode_to_numpy(text, disallowed_special=())},
            before, lambda ids: hash(np.asarray(ids, np.uint32).tobytes()))
        assert len(set(found.values())) == 1, 'the ids differ'
    del lists['tokenizers']     # minutes
    each = lambda f: sum(len(f(doc)) for doc in docs)
    contest('list per document, warm', size, {name: partial(each, f) for name, f in lists.items()}, partial(each, tok.encode_ordinary))
    block = [b'\xff'.join(doc.encode() for doc in docs[i:i + 100]) for i in range(0, len(docs), 100)]
    contest(f'encode, {cores} cores', size, {
        'ours': lambda: [*parallel_map(partial(tok.encode_bytes, special=tok.eot), block, cores)],
        'tiktoken': lambda: tik.encode_ordinary_batch(docs, num_threads=cores), 'tokenizers': lambda: hf.encode_batch(docs)})
    if tik:
        short_contest(tok, tik, text)
    ids = np.resize(tok.encode_to_numpy(text), 10_000_000)
    found = contest('decode 10,000,000 ids', len(tok.decode_bytes(ids)), {
        'ours': lambda: tok.decode_bytes(ids), 'tiktoken': lambda: tik.decode_bytes(ids.tolist())}, after=hash)
    assert len(set(found.values())) == 1, 'the texts differ'

def short_contest(tok, tik, text):
    """Strings of a few characters, as lists, when all words were seen before."""
    for length in (20, 200, 1000, 10_000):
        some = [text[i:i + length] for i in range(len(text) // 2, len(text) - length, length)][:max(5, 100_000 // length)] or [text]
        seconds = [[seconds_of(lambda: [f(s) for s in some]) for f in (tok.encode, tik.encode_ordinary)] for _ in range(20 + rounds)]
        ours, theirs = (1e6 * median(seen) / len(some) for seen in zip(*seconds[20:]))
        print(f'{f"encode {length:,} characters":26} | {ours:.1f} us | tiktoken {theirs:.1f} us | {ours / theirs:.2f} of its time')

def prepare_contest(folder, path, size):
    """From raw text to shards, vocabulary 10,000: the whole of prepare.py, and the same job with tokenizers."""
    def ours():
        os.chdir(tempfile.mkdtemp(dir=folder))
        with contextlib.redirect_stdout(open(os.devnull, 'w')):
            prepare.prepare(str(path), 'bpe', 10_000)

    def tokenizers():
        docs = path.read_bytes().decode().split(bpe.END_OF_TEXT)
        tok = train_hf(docs, 10_000)
        end = tok.token_to_id(bpe.END_OF_TEXT)
        with open(Path(folder) / 'theirs.bin', 'wb') as f:
            for i in range(0, len(docs), 1000):
                for one in tok.encode_batch(docs[i:i + 1000]):
                    np.array([*one.ids, end], np.uint16).tofile(f)
    contest('text to shards', size, {'ours': ours, 'tokenizers': tokenizers})

def main():
    known = {**{name[6:]: f for name, f in globals().items() if name.startswith('bench_')}, 'scaling': bench_compare}
    if what not in known:
        raise UserError(f'--what={what} is not known: give one of {", ".join(known)}')
    check_ranges(config, (1, 10 ** 6, 'steps rounds samples new_tokens seeds'), (0, 10 ** 6, 'warmup_steps'), (1, 10 ** 7, 'num_gpus'),
                 (1e-3, 1e9, 'memory_gb peak_tflops'), (1e-3, 1, 'mfu'), (0, 1e40, 'tokens flop_budget'))
    result = known[what]()
    if json and is_rank_0():
        print(dumps(dict(what=what, **(result or {}))))
    return result

def machine(local_rank=0, world_size=1, say=print):
    """-> device, dtype, whether to compile and why, for all that is not a run of train.py"""
    place, why_place = choose_device(train.device, local_rank)
    type_, why_type = choose_dtype(train.dtype, place)
    compiled, why = choose_compile(True if train.compile == 'auto' else train.compile, place)
    set_up(place), connect(place, world_size)
    say(f'device  | {place} ({why_place})\ndtype   | {type_} ({why_type})')
    return place, type_, compiled, why

def model_config(knobs=config):
    """What the knobs describe, with the vocabulary of the data, or about that if they are not here."""
    fields = {k: knobs[k] for k in GPTConfig.__dataclass_fields__ if k in knobs}
    if knobs['tokenizer'] not in prepare.TOKENIZERS and not os.path.isfile(knobs['tokenizer']):
        raise UserError(f'there is no tokenizer {knobs["tokenizer"]!r}: give one of {", ".join(prepare.TOKENIZERS)}')
    folder = prepare.data_folder(knobs['dataset'], knobs['tokenizer'], knobs['vocab_size'])
    fields['vocab_size'] = prepare.read_meta(folder)['vocab_size'] if (folder / 'meta.json').exists() else \
        dict(gpt2=50257, byte=257, char=100).get(knobs['tokenizer'], knobs['vocab_size'])
    return GPTConfig(**fields)

def build(place, type_, knobs=config):
    """The model that the knobs describe, on a device."""
    torch.manual_seed(train.seed)
    model = GPT(model_config(knobs)).to(place)
    model.compute_dtype = getattr(torch, type_)
    return model

def bench_sample():
    """Tokens per second of generation, and the share of what reading the weights and the cache once per token allows."""
    place, type_, compiled, why = machine()
    model = build(place, type_).to(getattr(torch, type_)).eval()
    step, c, size = sample.compile_step(model, place) if compiled else model, model.config, model.wte.weight.element_size()
    print(f'compile | {compiled} ({why})\nmodel   | {model.num_params():,} parameters, context {c.block_size}')
    n = min(new_tokens, c.block_size - 1)
    if not n:
        raise UserError('a context of one token leaves none to generate: give a larger --block_size')
    generate = lambda: [*sample.generate(model, [[0]] * samples, n, 0.8, top_k=200, step=step)]
    seconds = median([seconds_of(generate, place) for _ in range(rounds + 1)][1:])       # the first compiles
    read = size * (model.flops_per_token(1) // 6 + samples * c.n_layer * c.n_kv_head * (c.n_embd // c.n_head) * n)
    limit, rate = bandwidth(place), n / seconds
    print(f'sample  | {samples} x {n} tokens in {seconds:.2f} s: {samples * rate:,.1f} tokens/s, {1e3 / rate:.2f} ms a token')
    print(f'memory  | {read / 1e6:.0f} MB read per step, {100 * rate * read / limit:.0f}% of what {limit / 1e9:.1f} GB/s allow')
    return dict(tokens_per_second=samples * rate, share_of_bandwidth=rate * read / limit)

def bench_check():
    """Whether loss, gradients, their norm and the weights after one clipped step are those of the plain forms in float64 on the CPU."""
    (place, type_, compiled, _), failed = machine(), 0
    for name, fields in dict(llama=dict(qk_norm=True), gpt2=GPT2).items():
        torch.manual_seed(1)
        true = GPT(GPTConfig(vocab_size=2000, n_layer=2, n_head=4, n_embd=128, block_size=64, attention='naive', **fields)).double()
        true.compute_dtype = torch.float64
        for w in true.parameters():
            w.data += 0.02 * torch.randn_like(w)        # no layer is the identity
        start, (x, y) = {n: w.clone() for n, w in true.state_dict().items()}, torch.randint(2000, (2, 4, 64))
        (loss := true(x, y)[1]).backward()
        grads = {n: w.grad.clone() for n, w in true.named_parameters()}
        norm = train.clip_grad_norm(true.parameters(), 0.5)
        train.AdamW([dict(params=[w], weight_decay=0.1 * (w.dim() >= 2)) for w in true.parameters()]).step()
        for dtype, fast in itertools.product(sorted({'float32', type_}), sorted({False, compiled})):
            model = GPT(replace(true.config, attention='flash')).to(place)
            model.load_state_dict(start)
            model.compute_dtype = getattr(torch, dtype)
            optimizer = train.FlatOptimizer(model, weight_decay=0.1)
            optimizer.compile(fast)
            got = (torch.compile(model, dynamic=False) if fast else model)(x.to(place), y.to(place))[1]
            (got * optimizer.loss_scale).backward()
            pairs = {f'gradient of {n}': (g / optimizer.loss_scale, grads[n]) for n, g in optimizer.views(optimizer.g.clone()).items()}
            pairs = {'loss': (got.detach(), loss.detach()), 'gradient norm': (optimizer.step(1e-3, 0.5), norm), **pairs}
            # Adam's first step is lr times the sign of a gradient, which of a tiny one may be either
            for (n, v), w in zip(true.named_parameters(), model.parameters()):
                sure = grads[n].abs() > 1e-2 * grads[n].abs().max()
                pairs[f'{n} after a step'] = torch.where(sure, w.detach().cpu(), v.detach()), v.detach()
            errors = {what: float((a.cpu() - b).norm() / b.norm()) for what, (a, b) in pairs.items()}
            tolerance = 2e-2 if dtype != 'float32' else 2e-3 if place.startswith('cuda') else 1e-5      # TF32 on a GPU
            wrong = next((what for what, error in errors.items() if not error < tolerance), None)
            failed += wrong is not None
            print(f'check   | {name}, {dtype}{", compiled" if fast else ""}: ' + (
                f'pass (largest relative error {max(errors.values()):.1e})' if wrong is None else
                f'{wrong} differs, relative error {errors[wrong]:.1e} > {tolerance:g}'))
    if failed:
        raise UserError(f'{failed} of these are wrong on this device: train with --device=cpu, and report the lines above')

def bench_formats():
    """What the formats of numbers hold, found by casting, and what they make of the first gradients of the model."""
    train.check_knobs(), set_up(place := choose_device(train.device)[0])
    model, T, found, casts = build(place, 'float32'), train.block_size, {}, []
    micro, powers = train.micro_batch_size or min(train.batch_size, 16384 // T or 1), 2.0 ** torch.arange(-200, 200).double()
    model(*RandomTokens(model.config.vocab_size).batch(range(micro), T, place))[1].backward()
    g = torch.cat([p.grad[p.grad != 0].cpu() for p in model.parameters()])      # many are 0: blocks begin as the identity
    print('format  |      | bytes | exponent + fraction | largest    | normal from | above 0 from | after 1 comes  | 12,288 x 49,152')
    for name, kind in dict(fp32='float32', fp16='float16', bf16='bfloat16', E4M3='float8_e4m3fn', E5M2='float8_e5m2').items():
        cast, size = lambda x: x.to(getattr(torch, kind)).to(x.dtype), getattr(torch, kind).itemsize
        eps = float(powers[cast(1 + powers) > 1][0])
        least, normal = (float(powers[cast(powers * x) == powers * x][0]) for x in (1, 1 + eps))
        top = max(float(x[cast(x) == x][-1]) for x in (powers * (2 - eps), powers * (2 - 2 * eps)))     # some lack the first
        lost = [100 * float(where.float().mean()) for x in (cast(g), cast(65536 * g)) for where in (x == 0, ~(x.abs() < top))]
        bits = dict(exponent=8 * size - 1 + round(np.log2(eps)), fraction=-round(np.log2(eps)))
        found[name] = dict(bits, largest=top, normal=normal, least=least, eps=eps, lost=lost)
        print('format  | {} | {:5} | {exponent:8} + {fraction:<8} | {:<10.5g} | {:<11.5g} | {:<12.5g} | 1 + {:<10.5g} | {:.2f} GB'.format(
            name, size, top, normal, least, eps, size * 12288 * 49152 / 1e9, **bits))
        casts += [f'cast    | {name}' + (' | {:<10.5g}' * 4 + ' |{:9.2f}%' * 4).format(*cast(torch.tensor([1e-8, 7e4, 1.001, 0.1])), *lost)]
    print('cast    |      | 1e-8       | 70,000     | 1 + 1e-3   | 0.1        | g to 0    | too large | 65,536 g to 0, too large', *casts,
          f'cast    | g: {len(g):,} gradients of {micro} x {T} random tokens; too large: inf, nan, or cut to the largest', sep='\n')
    return found

def bench_ladder():
    """What each step from the plain form to the fast one buys on this machine, one after the other."""
    train.check_knobs(), train.check_batch(1)
    place, type_, compiled, why = machine()
    cuda, times, T, micro = place.startswith('cuda'), [], train.block_size, train.micro_batch_size or train.batch_size
    now = dict(dtype='float32', attention='naive', pad_to=1, flat=False, compile=False, tf32=False, capture=False)
    for name, change, missing in (
            ('float32, written out', {}, ''), ('TF32', dict(tf32=True), '' if cuda else 'not on this device'),
            (type_, dict(dtype=type_), '' if type_ != 'float32' else 'as before'), ('compile', dict(compile=True), '' if compiled else why),
            ('flash attention', dict(attention='flash'), ''), ('vocabulary padded', dict(pad_to=64), ''),
            ('flat optimizer', dict(flat=True), ''),
            ('captured step', dict(capture=True), '' if cuda and compiled else why if cuda else 'not on this device')):
        if missing:
            print(f'ladder  | {name:22} | {missing}')
            continue
        now = {**now, **change}
        torch.set_float32_matmul_precision('high' if now['tf32'] else 'highest')
        GPT.pad_to, config['attention'] = now['pad_to'], now['attention']
        model = build(place, now['dtype'])
        optimizer = train.FlatOptimizer(model) if now['flat'] else PlainOptimizer(model.parameters())
        if now['flat']:
            optimizer.compile(compiled)
        fast = torch.compile(model, dynamic=False) if now['compile'] else model
        try:
            batch = RandomTokens(model.config.vocab_size).batch(range(micro), T, place)
            step = make_step(fast, optimizer, batch, train.batch_size // micro)
            times.append(measure(capture(step) if now['capture'] else step, place))
        except torch.OutOfMemoryError:
            print(f'ladder  | {name:22} | does not fit into the memory with --micro_batch_size={micro}')
            continue
        first, before, seconds = times[0], times[-2:][0], times[-1]
        print(f'ladder  | {name:22} | {1e3 * seconds:8.1f} ms | {train.batch_size * T / seconds:10,.0f} tokens/s | '
              f'{before / seconds:.2f} times the row before, {first / seconds:.2f} times the first', flush=True)

def capture(step):
    """A step recorded as one CUDA graph, which plays all its launches back at once."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):       # compiles and warms up
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step()
    return graph.replay

class PlainOptimizer(train.AdamW):
    """Clipping and AdamW tensor by tensor, with the interface of FlatOptimizer."""
    loss_scale = 1.0

    def step(self, lr, max_norm):
        train.clip_grad_norm(self.param_groups[0]['params'], max_norm)
        super().step()
        self.zero_grad(set_to_none=True)

def print_runs(place, type_, compiled, world_size, say):
    """How long well-known runs would take here, by a pass over a part of a batch; no optimizer, no evaluation. -> {name: minutes}"""
    minutes = {}
    for path in RUNS:
        knobs = {**defaults, **run_file(path, defaults, defaults)}
        T, tokens = knobs['block_size'], knobs['max_iters'] * knobs['batch_size'] * knobs['block_size']
        try:
            model = build(place, type_, knobs)
            batch = RandomTokens(model.config.vocab_size).batch(range((16384 if place.startswith('cuda') else 1024) // T or 1), T, place)
            fast = torch.compile(model, dynamic=False) if compiled and place != 'cpu' else model     # there it would take longer
            seconds = train.estimate(fast, batch, place) / batch[0].numel() * tokens / world_size
        except torch.OutOfMemoryError:
            say(f'here    | {path.stem}: 16,384 tokens at once do not fit into the memory')
            continue
        say(f'here    | {path.stem}, {model.num_params() / 1e6:.0f}M parameters on {tokens / 1e9:.2g}B tokens: about {duration(seconds)}')
        minutes[path.stem] = seconds / 60
    return minutes

# -----------------------------------------------------------------------------
# experiments: arms and seeds, one table, one picture

def read_arms():
    """{name of an arm: its arguments}"""
    lines = [line.partition(':') for line in re.split('[\n;]', arms) if line.strip()]
    here = lambda a: str(HERE / a) if a.endswith('.py') and not os.path.exists(a) else a
    found = {name.strip(): [here(a) for a in text.split()] for name, _, text in lines}
    if 'RANK' in os.environ or mock._patch._active_patches:
        raise UserError('experiments run in one process, and config/broken_*.py belong into arms: start bench.py without these')
    if not found or len({folder_of(x).lower() for x in found}) < len(lines) or any(x.startswith('-') for x in found):
        raise UserError('arms need names of their own: give config/lab_ablations.py, or --arms="small: --n_embd=64; big: --n_embd=128"')
    return found

def run_arm(args, folder, seed):
    """Trains with these arguments, in this process, unless that has been done. -> the knobs, the entries of the log"""
    try:
        knobs, end = read_arguments(args, dict(config, seed=seed))[0], []       # a file may patch the code, see config/broken_*.py
        if other := [k for k in ('init_from', 'lr_schedule', 'eval_only') if knobs[k] != defaults[k]]:
            raise UserError(f'{other[0]} = {knobs[other[0]]!r} can not be compared: leave it out, and start train.py for it')
        ours = dict({k: knobs[k] for k in train.config}, out_dir=folder.as_posix(), init_from='scratch')
        if (folder / 'config.py').exists() and (folder / 'config.py').read_text(encoding='utf-8') != as_file(ours):
            raise UserError(f'{folder} holds a run with other knobs: remove it, or give another --out_dir')
        for space in train.config, vars(train):
            space.update(ours, init_from='auto')
        torch.compiler.reset()          # it keeps only so many models
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / 'output.txt', 'a', encoding='utf-8') as f, contextlib.redirect_stdout(f):
            try:
                train.main()
            except Diverged as e:
                print(f'diverged: {e}')
                end = [dict(step=train.max_iters, val_loss=math.inf, val_bpb=math.inf)]
    finally:
        mock.patch.stopall()
        unlock(folder / '.lock')
    return knobs, read_log(folder / 'log.jsonl') + end

def bench_compare():
    """Every arm with every seed, in turns, so that a slow hour of the machine is everyone's. Goes on where it was stopped."""
    named, models, out = read_arms(), {}, Path(config['out_dir'] or 'out/compare')
    place, logs = choose_device(train.device)[0], {name: [] for name in named}
    peak = peak_flops(place) or matmul_flops(place, getattr(torch, choose_dtype(train.dtype, place)[0]))
    [(read_arguments(args, config), mock.patch.stopall()) for args in named.values()]       # mistakes are found before anything is trained
    for seed, (name, args) in itertools.product(range(config['seed'], config['seed'] + seeds), named.items()):
        t = time.perf_counter()
        try:
            knobs, log = run_arm(args, out / f'{folder_of(name)}-{seed}', seed)
        except SystemExit:
            print('\nstopped; the same command goes on', flush=True)
            raise
        with torch.device('meta'):
            models[name] = GPT(model_config(knobs))
        for e in log:
            if 'tokens_per_second' in e:
                e['mfu'] = e['tokens_per_second'] * models[name].flops_per_token() / peak
        logs[name].append(log)
        print(f'{sum(map(len, logs.values())):3} of {len(named) * seeds} | {name}, seed {seed} | validation loss '
              f'{ends(log)["val_loss"]:.4f} | {duration(time.perf_counter() - t)}', flush=True)
    print_table(logs)
    mean = lambda rows: {k: sum(e[k] for e in rows) / len(rows) for k in rows[0] if all(type(e.get(k)) in (int, float) for e in rows)}
    train.draw_curves({name: [mean(rows) for key in ('loss', 'val_loss') for rows in zip(*([e for e in log if key in e] for log in found))]
                       for name, found in logs.items()}, out / 'curves.png')
    print(f'picture | {out}/curves.png; the runs, their output and logs are in {out}')
    if what == 'scaling':
        fit_law([(models[name].flops_per_token(0) / 6, ends(log)['tokens'], ends(log)['val_loss']) for name in logs for log in logs[name]
                 if math.isfinite(ends(log)['val_loss'])], out)
    return dict(runs={name: [ends(log)['val_loss'] for log in found] for name, found in logs.items()})

def ends(log):
    """The last evaluation of a run, or what stands for it."""
    return next((e for e in reversed(log) if 'val_loss' in e), dict(step=0, val_loss=math.nan, val_bpb=None))

def print_table(logs):
    """{name: [log of each seed]}: mean and standard deviation at the end, and what the training lines say of noise and speed."""
    print('\n| | validation loss | to the first | bits per byte | steps | tokens | noise of a step | tokens/s | of the peak |')
    print('|' + '---|' * 9)
    first = None
    for name, found in logs.items():
        losses, last = [ends(log)['val_loss'] for log in found], min(map(ends, found), key=lambda e: not math.isfinite(e['val_loss']))
        finite = [x for x in losses if math.isfinite(x)]
        loss = sum(finite) / len(finite) if finite else losses[0]
        first = loss if first is None else first
        halves = [[e for e in log[len(log) // 2:] if math.isfinite(e.get('loss', math.nan))] for log in found]
        lines, jumps = sum(halves, []), [a['loss'] - b['loss'] for half in halves for a, b in itertools.pairwise(half)]
        middle = lambda key: median(e[key] for e in lines if e.get(key)) if any(e.get(key) for e in lines) else math.nan
        diverged = f' ({losses.count(math.inf)} of {len(losses)} diverged)' if math.inf in losses else ''
        print(f'| {name} | {loss:.4f}' + (f' ± {stdev(finite):.4f}' if len(finite) > 1 else '') + diverged + f' | {loss - first:+.4f} | ' +
              (f'{last["val_bpb"] * loss / last["val_loss"]:.3f}' if last['val_bpb'] and finite else '') + f' | {last["step"]:,} | '
              f'{short(last.get("tokens", 0))} | ' + (f'{stdev(jumps) / 2 ** 0.5:.3f}' if len(jumps) > 1 else '') +
              f' | {short(middle("tokens_per_second"))} | {100 * middle("mfu"):.1f}% |')

def fit_law(points, out):
    """
    Fits loss = E + A / N^alpha + B / D^beta (arXiv:2203.15556, equation 2) to (N weights of matmuls, D tokens, loss), by
    least squares of the logarithms from several starts, and draws it.
    """
    N, D, L = torch.tensor(points, dtype=torch.float64).T.log()
    law = lambda w, N, D: torch.logsumexp(torch.stack([w[0].expand_as(N), w[1] - w[2] * N, w[3] - w[4] * D]), 0)
    def fit(start):
        w = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([w], max_iter=2000, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn='strong_wolfe')
        def error():
            optimizer.zero_grad()
            (e := ((law(w, N, D) - L) ** 2).mean()).backward()
            return e
        optimizer.step(error)
        return float(error().detach()) ** 0.5, w.detach()
    error, w = min((fit((e, 4.0, a, 4.0, b)) for e in (-1.0, 0.5) for a in (0.2, 0.6) for b in (0.2, 0.6)), key=lambda found: found[0])
    print(f'law     | loss = {w[0].exp():.2f} + {w[1].exp():.3g} / N^{w[2]:.2f} + {w[3].exp():.3g} / D^{w[4]:.2f}, off by '
          f'{100 * error:.1f}% (N weights of matmuls, D tokens; {len(points)} runs)')
    if not util.find_spec('matplotlib'):
        return print(f'no {out}/law.png: pip install matplotlib')
    from matplotlib.figure import Figure
    ax = (figure := Figure(figsize=(7, 5), layout='constrained')).subplots()
    for i, n in enumerate(N.unique()):
        d = torch.linspace(D.min(), D.max(), 50, dtype=torch.float64)
        ax.plot(D[N == n].exp(), L[N == n].exp(), 'o', color=f'C{i}', label=f'{n.exp():,.0f} weights')
        ax.plot(d.exp(), law(w, n.expand_as(d), d).exp(), '-', lw=1, color=f'C{i}')
    ax.set(xscale='log', xlabel='tokens', ylabel='validation loss', title='loss by tokens and weights, and the fit')
    ax.legend(), ax.grid(alpha=0.3)
    figure.savefig(out / 'law.png', dpi=110)

def bench_curves():
    """Several runs on one picture, and how they ended."""
    folders = [Path(run.strip()) for run in runs.split(',') if run.strip()]
    logs = {f.as_posix() if [x.name for x in folders].count(f.name) > 1 else f.name: read_log(f / 'log.jsonl') for f in folders}
    if not all(logs.values()) or not logs:
        raise UserError(f'--runs={runs}: give folders of runs with commas between them, such as --runs=out/python,out/python-2')
    print_table({name: [log] for name, log in logs.items()})
    path = Path(config['out_dir'] or 'out') / 'curves.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    train.draw_curves(logs, path), print(f'picture | {path}')

def bench_toy():
    """A matrix of 10 x 10 normal numbers times 5, whose mean square is to be 0: the loss after 10 and 100 steps of rate / sqrt(step)."""
    print('toy     | optimizer ' + ''.join(f'| rate {rate:<15g} ' for rate in TOY_RATES))
    for rule in (train.SGD, train.Momentum, train.AdaGrad, train.RMSProp, train.Adam, train.AdamW):
        row = ''
        for rate in TOY_RATES:
            torch.manual_seed(config['seed'])
            w, seen = torch.nn.Parameter(5 * torch.randn(10, 10)), []
            optimizer = rule([w])
            for t in range(100):
                optimizer.param_groups[0]['lr'] = rate / (t + 1) ** 0.5
                optimizer.zero_grad()
                w.pow(2).mean().backward()
                optimizer.step()
                seen.append(float(w.detach().pow(2).mean()))
            row += f'| {seen[9]:8.2g} {seen[99]:11.2g} '
        print(f'toy     | {rule.__name__:9} {row}')

def bench_train():
    train.check_knobs()
    rank, local_rank, world_size = setup_ranks()
    train.check_batch(world_size)
    say = print if rank == 0 else lambda *args: None
    place, type_, _, _ = machine(local_rank, world_size, say)       # train.find_speed decides about compiling
    model, cuda = build(place, type_), place.startswith('cuda')
    optimizer = train.FlatOptimizer(model, (train.beta1, train.beta2), train.adam_eps, train.weight_decay, rule=train.optimizer)
    T, flops, data = model.config.block_size, model.flops_per_token(), RandomTokens(model.config.vocab_size)
    say(f'model   | {model.num_params():,} parameters, vocabulary {data.vocab_size:,}, {flops:.3g} FLOPs per token')
    fast, compiled, micro, _ = train.find_speed(model, optimizer, data, T, place, world_size, train.max_iters, {}, say)
    tokens, grad_accum = train.batch_size * T, train.batch_size // world_size // micro
    say(f'batch   | {train.batch_size} x {T} = {tokens:,} tokens, {world_size} x {grad_accum} micro-batches of {micro}')

    if cuda:
        torch.cuda.reset_peak_memory_stats()        # the search for a micro-batch filled all of it
    make = partial(make_step, fast, optimizer, data.batch(range(micro), T, place), grad_accum)
    seconds = measure(make(world_size), place)
    rate, achieved, published = tokens / seconds, tokens / seconds * flops, peak_flops(place)
    peak = world_size * (published or matmul_flops(place, model.compute_dtype))
    label = 'MFU, of the published dense bf16 peak' if published else 'of the largest matmul rate measured here'
    memory, whose = (torch.cuda.max_memory_allocated(place), 'of the GPU') if cuda else (peak_memory()[0], 'of the process')
    say(f'step    | {1e3 * seconds:.1f} ms (median of {steps}), {rate:,.0f} tokens/s')
    say(f'compute | {achieved / 1e12:.3g} TFLOP/s, {100 * achieved / peak:.1f}% {label} ({peak / 1e12:.3g} TFLOP/s)')
    say(f'memory  | {memory / 1e9:.2f} GB {whose} at most')
    if world_size > 1:          # what the processes lose to each other
        alone, talk, size = measure(make(), place), measure(partial(all_reduce, optimizer.g), place), optimizer.g.nbytes
        say(f'scaling | {100 * alone / seconds:.1f}% of {world_size} processes that do not talk; all-reduce of {size / 1e6:.1f} MB: '
            f'{1e3 * talk:.2f} ms, {talk / seconds:.1%} of the step, {2e-9 * (1 - 1 / world_size) * size / talk:.1f} GB/s on the bus')
    if profile and rank == 0:
        print_profile(make(), place)
    del model, optimizer, fast, make
    minutes = print_runs(place, type_, compiled, world_size, say)
    leave(place, world_size)
    return dict(ms=1e3 * seconds, tokens_per_second=rate, share_of_peak=achieved / peak, minutes=minutes)

# -----------------------------------------------------------------------------
# what a model costs, by arithmetic: nothing is built. c is a GPTConfig

GPT2_SIZES = {'small': (12, 12, 768), 'medium': (24, 16, 1024), 'large': (36, 20, 1280), 'XL': (48, 25, 1600)}     # n_layer n_head n_embd
ADAMW_FLOPS, CLIP_FLOPS = 14, 3     # of a step, per parameter: + - * / and sqrt of train.adamw; square, sum and scaling of a gradient

def padding(c):
    """Rows that the model adds to its vocabulary: padding(GPTConfig(vocab_size=50257)) -> 47"""
    return -c.vocab_size % GPT.pad_to if c.vocab_size > 1024 else 0

def matrices(c):
    """The matrices of a block, (d_out, d_in), as Muon sees them."""
    C, K = c.n_embd, c.n_embd // c.n_head * c.n_kv_head
    return {'attention projections': [(C, C), (K, C), (K, C), (C, C)], 'mlp': [(c.d_ff, C)] * (1 + (c.mlp == 'swiglu')) + [(C, c.d_ff)]}

def parameters(c):
    """Parameters by part, without padding: their sum is GPT(c).num_params(). A tied head is the embedding, and has none."""
    C, L, shapes = c.n_embd, c.n_layer, matrices(c)
    norms = C * (2 * L + (c.norm_position == 'pre')) * (c.norm != 'none')
    biases = L * sum(a for part in shapes.values() for a, _ in part) + norms * (c.norm == 'layer')
    return {'embedding': c.vocab_size * C, 'positions': c.block_size * C * (c.position == 'learned'),
            'norms': norms + 2 * L * C // c.n_head * c.qk_norm, 'biases': biases * c.bias,
            **{name: L * sum(a * b for a, b in part) for name, part in shapes.items()}, 'head': c.vocab_size * C * (not c.tie_weights)}

def forward_flops(c, T):
    """FLOPs of the matmuls of a forward pass over T tokens, by part: 2mkn for (m, k) times (k, n), no discount for the causal mask."""
    size = parameters(c)
    return {'attention projections': 2 * T * size['attention projections'], 'attention scores, values': 4 * c.n_layer * c.n_embd * T * T,
            'mlp': 2 * T * size['mlp'], 'head': 2 * T * size['embedding'], 'padding': 2 * T * c.n_embd * padding(c)}

def training_flops(c, T, recompute=False):
    """Forward and backward: behind each matmul are two of its size, for its two inputs. recompute: the blocks run twice."""
    flops = forward_flops(c, T)
    return (3 + recompute) * sum(flops.values()) - recompute * (flops['head'] + flops['padding'])

def newton_schulz_flops(a, b):
    """Of train.orthogonalize for a matrix (a, b): five times x x^T, its square, and a sum of both times x."""
    return 5 * (4 * a * b * min(a, b) + 2 * min(a, b) ** 3)

def training_days(flops, num_gpus, peak, mfu):
    return flops / (num_gpus * peak * mfu) / 86400

def chinchilla(flops):
    """-> (parameters N, tokens D) that make the most of a budget of 6 N D FLOPs: D = 20 N (arXiv:2203.15556)."""
    return (flops / 120) ** 0.5, 20 * (flops / 120) ** 0.5

def activations(c, B, T, type_, place='cuda', recompute=False):
    """
    Bytes that model.py, not compiled, keeps of B > 1 sequences of T tokens for the backward pass, by part, within 3%. A matmul keeps its
    input and a copy of its weight that is not float32; a norm its input and the normalized one, in float32; attention q, k, v and scores
    or flash's output, which on a CPU is in float32 for bfloat16, or written out with dropout. recompute: all blocks' inputs, all of one.
    """
    N, C, nh, w, cpu, drop = B * T, c.n_embd, c.n_head, getattr(torch, type_).itemsize, place == 'cpu', c.dropout > 0
    K, L, flash = C // nh * c.n_kv_head, 1 if recompute else c.n_layer, c.attention == 'flash' and not (cpu and drop)
    a = 4 if cpu and c.attention == 'flash' and (type_ == 'bfloat16' or drop) else w        # bytes of a number in attention
    # what the matmul wrote is kept where q, or k and v, are views of it
    q_view, v_view = (flash and a == w and as_it_is for as_it_is in (c.position != 'rope' and not c.qk_norm, c.n_kv_head == nh))
    qkv = a * C * (3 - q_view - v_view - (q_view and v_view)) + w * (C + 2 * K) * (q_view or v_view or c.qk_norm and w == 4)
    y = (a * C + 4 * nh) * flash + w * C * (not flash or a != w or c.position == 'rope')    # rope changes the order in memory
    norms = 8 * C * (2 * L + (c.norm_position == 'pre')) * (c.norm != 'none') + L * (4 if w == 4 else 8) * (C + K) * c.qk_norm
    weights = sum(parameters(c)[part] for part in matrices(c)) * L // c.n_layer + C * (c.vocab_size + padding(c))
    return {'norms': N * norms, 'attention': N * L * (w * C + qkv + y),
            'scores': (not flash) * L * T * (N * nh * (4 + a * (a < 4 or drop) + (a if cpu else 1) * drop) + T * (c.attention == 'naive')),
            'mlp': N * L * w * (C + c.d_ff * (4 if c.mlp == 'swiglu' else 2)), 'dropout': 2 * N * L * C * (w if cpu else 1) * drop,
            'inputs of the blocks': N * c.n_layer * C * w * recompute, f'weights in {type_}': w * weights * (w < 4),
            'head and loss': N * (w * C + 4 * c.vocab_size), 'tokens': 16 * N}

def memory(c, B, T, type_, place='cuda', recompute=False, muon=False):
    """Bytes at the peak of a step, by part; compiled code keeps less. Not yet measured on a GPU."""
    N, head, hidden = B * T, (c.vocab_size + padding(c)) * c.n_embd, sum(parameters(c)[part] for part in matrices(c))
    n = sum(parameters(c).values()) + padding(c) * c.n_embd * (1 if c.tie_weights else 2)
    # beside what is kept: two gradients of the logits, that of the head, or two of the scores, when the loss is over
    scores = (8 * N * c.n_head * T - 4 * N * c.vocab_size) * (c.attention == 'naive')
    return {'weights': 4 * n, 'gradients': 4 * n, 'moments': 8 * n - 4 * hidden * muon, **activations(c, B, T, type_, place, recompute),
            'temporary gradients': max(8 * N * c.vocab_size, (4 if type_ == 'float32' else 6) * head, scores)}

def largest_batch(c, T, type_, limit, **how):
    """The most sequences whose step fits into `limit` bytes."""
    return bisect.bisect_right(range(1, 10 ** 7), limit, key=lambda B: sum(memory(c, B, T, type_, **how).values()))

def measure_memory(model, B, T, place):
    """Bytes of a step: on a GPU the peak, elsewhere what can be counted, which is all but temporary tensors."""
    optimizer, batch = train.FlatOptimizer(model, rule=config['optimizer']), RandomTokens(model.config.vocab_size).batch(range(B), T, place)
    if place.startswith('cuda'):
        torch.cuda.reset_peak_memory_stats()
        make_step(model, optimizer, batch, 1)()
        return {'peak': torch.cuda.max_memory_allocated()}
    saved, note = {}, lambda x: saved.update({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}) or x
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = model(*batch)[1]         # holds all of them
    saved.pop(optimizer.p.data_ptr(), loss)
    return {'weights': optimizer.p.nbytes, 'gradients': optimizer.g.nbytes, 'moments': optimizer.m.nbytes + optimizer.v.nbytes,
            'activations': sum(saved.values())}

def bench_resources():
    """What the model of the knobs costs, by part, beside what can be measured here, and what follows from it."""
    train.check_knobs(), train.check_batch(1)
    place, type_, _, _ = machine()
    c, B, T, cuda = model_config(), train.micro_batch_size or train.batch_size, train.block_size, place.startswith('cuda')
    size, flops, how = parameters(c), forward_flops(c, T), dict(T=T, type_=type_, muon=config['optimizer'] == 'muon')
    total, summed = lambda x: sum(x.values()), lambda x: {**x, 'together': sum(x.values())}
    n, forward, training = total(size), total(flops), training_flops(c, T)
    say = lambda name, *cells: print(' | '.join((f'{name:24}', *cells)).rstrip(' |'))
    share = lambda x, whole, width: f'{x:{width},} {100 * x / whole:5.1f}%' if x else ' ' * (width + 7)
    say('\npart' + ' ' * 20, '    parameters  share', 'FLOPs forward, a sequence  share', '       a token')
    for part in (*list(size)[:4], *summed(flops)):
        p, f = (summed(x).get(part, 0) for x in (size, flops))
        if p or f:
            say(part, share(p, n, 14), share(f, forward, 25), f'{f // T:14,}' if f else '')
    say('training', f'{training:,} FLOPs a sequence, 3 times forward; {training_flops(c, T, True):,} with blocks computed twice')
    say('a step of AdamW', f'{(ADAMW_FLOPS + CLIP_FLOPS) * n:,} FLOPs: {ADAMW_FLOPS} a parameter (each + - * / sqrt), and '
        f'{CLIP_FLOPS} to clip')
    say('a step of Muon', f'{c.n_layer * sum(newton_schulz_flops(*s) for part in matrices(c).values() for s in part):,} FLOPs in matmuls: '
        '5 (4 a^2 b + 2 a^3) for each matrix of a block, a <= b\n')

    ways = {way: dict(how, c=replace(c, attention=way[:5]), recompute='twice' in way) for way in ('naive', 'flash', 'flash, blocks twice')}
    columns = [summed(memory(B=B, **x)) for x in ways.values()]
    unit, u = (1e9, 'GB') if columns[0]['together'] >= 1e9 else (1e6, 'MB')
    cache = 2 * c.n_layer * B * T * c.n_embd // c.n_head * c.n_kv_head * getattr(torch, type_).itemsize
    say(f'memory of a GPU in {u}', *(f'{way:>19}' for way in ways), f'{B} x {T:,} tokens, {type_}')
    for part in (*columns[0], 'KV cache'):
        row = [x.get(part, cache) for x in columns]
        if any(row):
            say(part, *(f'{x / unit:19,.2f}' for x in row))
    room = torch.cuda.mem_get_info()[0] / 2 if cuda else 4e9
    b = next((b for b in (B, 1) if total(memory(c, b, T, type_, place)) < room and (cuda or b * forward < 2e12)), 0)
    found, guess = measure_memory(build(place, type_), b, T, place) if b else {}, memory(c, b, place=place, **how)
    guess = dict(peak=total(guess)) if cuda else dict([*guess.items()][:3], activations=total(activations(c, b, T, type_, place)))
    for name, sizes in dict(predicted=guess, measured=found).items():
        say(f'{name} on {place}', f'{b} x {T:,} tokens: ' + ' + '.join(f'{part} {x / unit:,.2f}' for part, x in sizes.items()) +
            f' = {total(sizes) / unit:,.2f} {u}' if b else 'one sequence would take too much memory or time')

    D = tokens or train.max_iters * train.batch_size * T
    spent = training / T * D
    N, best = chinchilla(flop_budget or spent)
    say('\nlargest batch' + ' ' * 11, f'{memory_gb:g} GB hold ' + '; '.join(
        f'{largest_batch(limit=1e9 * memory_gb, **x):,} ({way})' for way, x in ways.items()))
    say('largest model', f'{num_gpus:,} x {memory_gb:g} GB hold {num_gpus * memory_gb / 16:.4g}B parameters with AdamW: 16 bytes each, '
        'no activations')
    say('time', f'{duration(86400 * training_days(spent, num_gpus, 1e12 * peak_tflops, mfu))} for {D:,.4g} tokens, {spent:.3g} FLOPs, '
        f'with {num_gpus:,} x {peak_tflops:g} TFLOP/s at {100 * mfu:g}%')
    say('Chinchilla', f'{flop_budget or spent:.3g} FLOPs do most for {N:.3g} parameters on {best:.3g} tokens: 20 a parameter\n')
    say(f'GPT-2 in {type_}', ' parameters |       FLOPs forward | projections | scores |   mlp |  head | GB naive | GB flash, 1 sequence')
    for name, T in [*((name, 1024) for name in GPT2_SIZES), ('XL', 16384)]:
        c = GPTConfig(block_size=T, **dict(zip(('n_layer', 'n_head', 'n_embd'), GPT2_SIZES[name])), **GPT2)
        *parts, _ = forward_flops(c, T).values()        # as it is, without padding
        say(f'{name}, {T:,} tokens', f'{total(parameters(c)) / 1e6:9,.1f} M', f'{sum(parts):19,}', *(
            f'{100 * x / sum(parts):{width}.1f}%' for x, width in zip(parts, (10, 5, 4, 4))), *(
            f'{total(memory(replace(c, attention=a), 1, T, type_)) / 1e9:8,.1f}' for a in ('naive', 'flash')))
    return dict(parameters=size, forward=flops, training=training, predicted=guess, measured=found)

if __name__ == '__main__':
    launch(main)
