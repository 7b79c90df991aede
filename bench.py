"""
How fast things are here and how close to the limit, what a model costs, and experiments with many runs.

    python bench.py                                # a training step of the default model
    python bench.py config/train_gpt2.py --batch_size=32 --micro_batch_size=32
    torchrun --nproc_per_node=4 bench.py
    python bench.py --what=sample --samples=4      # tokens/s of generation, and the share of the memory's bandwidth
    python bench.py --what=ladder                  # from the plain form to the fast one, a row for each step
    python bench.py --what=check                   # does this device compute what it should?
    python bench.py --what=resources config/train_gpt2.py        # parameters, FLOPs, memory, days: what it will cost
    python bench.py --what=formats                 # what fp32, fp16, bf16 and fp8 hold
    python bench.py --what=toy                     # SGD to AdamW on a toy, at rates from too low to too high
    python bench.py --what=tokenizer --dataset=my_text.txt       # beside rustbpe, tokenizers, tiktoken, riptoken
    python bench.py --what=find_lr config/train_tinystories.py   # a short run that suggests a learning rate
    python bench.py --what=diagnose --runs=out/python            # a look into a trained model, layer by layer
    python bench.py --what=curves --runs=out/a,out/b             # several runs in one table and one picture
    python bench.py config/lab.py config/lab_ablations.py        # what does each part buy? see config/lab_*.py

It takes the knobs of train.py. Speed is measured on random tokens. MFU is achieved over peak dense bf16 FLOP/s,
counting 6 FLOPs per weight of a matmul and 12 n_layer n_embd T for attention per token (no discount for the causal
mask). Where the peak is not known it is the rate of a large matmul here.
"""
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib import util
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector

import prepare
import sample
import tokenizer as bpe
import train
from configurator import Knobs, UserError, configure, launch, read_arguments, read_json
from model import (GPT, GPTConfig, choose_compile, choose_device, choose_dtype, device_name, load_model, peak_flops,
                   set_up)

# -----------------------------------------------------------------------------
what = 'train'          # a training step, or: sample, ladder, check, resources, formats, toy, tokenizer, find_lr,
                        # diagnose, curves (of runs), compare (arms with seeds, as config/lab_*.py), scaling (a law too)
steps = 20              # measured optimizer steps
warmup_steps = 5        # steps before them
profile = False         # also say where the time of a step goes
samples = 1             # texts that are generated at once
new_tokens = 100        # of each text
rounds = 3              # of samples and tokenizers, in turns; the median counts
memory_gb = 80.0        # resources: memory of a card, in GB of 10^9 bytes
num_gpus = 1            # resources: cards
peak_tflops = 989.5     # resources: of a card, dense (an H100 in bfloat16; its data sheet's 1,979 are sparse)
mfu = 0.4               # resources: the share of that which training reaches
tokens = 0.0            # resources: to train on, such as 15e12; 0: those of the run
flop_budget = 0.0       # resources: to spend on a model of the best size; 0: the FLOPs of the run
runs = ''               # curves: folders, with commas between them; diagnose: one, or '' for the newest
arms = ''               # compare: 'name: arguments of train.py', in lines or with ; between them
seeds = 3               # compare: runs of each arm, from --seed on
question = ''           # compare: the title of the picture
picture = 'rows'        # compare: rows (an arm each), curves (losses by step), or a knob to draw the loss against
# -----------------------------------------------------------------------------
config = configure(globals(), train, GPTConfig)
train.config.update({name: config[name] for name in train.config})

HERE = Path(__file__).parent

# -----------------------------------------------------------------------------
# what the commands share; c is a GPTConfig, place a device, type_ the name of a dtype

def machine(flops=math.inf, generates=False):
    """-> device, dtype, and whether to compile for so many FLOPs"""
    train.check_knobs()
    place = choose_device(train.device, train.LOCAL_RANK)
    set_up(place)
    compiled = choose_compile(train.compile, place, flops)
    type_ = choose_dtype(train.dtype, place, packed=generates and not compiled)
    print(f'machine | {place} ({device_name(place)}), {type_}, compile {compiled}')
    return place, type_, compiled

VOCABULARIES = dict(gpt2=50257, byte=257, char=100)     # char: about that

def model_config(knobs=config):
    """The GPTConfig that knobs describe, with the vocabulary that their tokenizer has."""
    return train.model_config(knobs, vocab_size=VOCABULARIES.get(knobs['tokenizer'], knobs['vocab_size']))

def build(c, place, type_='float32'):
    """A new model; on the device 'meta' it has shapes and takes no memory."""
    torch.manual_seed(train.seed)
    with torch.device(place):
        model = GPT(c)
    model.compute_dtype = getattr(torch, type_)
    return model

def random_batch(c, B, place):
    x = torch.randint(c.vocab_size, (B, c.block_size + 1)).to(place)
    return x[:, :-1], x[:, 1:]

def seconds_of(function, place='cpu'):
    """Seconds until a device has done all that a function asks of it."""
    synchronize = torch.get_device_module(place).synchronize
    synchronize()
    began = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - began

def measure(function, place):
    """Median of the seconds that a function takes, `steps` times after a warm-up."""
    for _ in range(warmup_steps):
        function()
    return median(seconds_of(function, place) for _ in range(steps))

def print_table(*rows):
    """Rows of texts as a table in Markdown; the first is the head."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    ruler = ['-' * width for width in widths]
    for row in (rows[0], ruler, *rows[1:]):
        print('|', ' | '.join(map(str.rjust, row, widths)), '|')

def save_picture(name, title, lines, fmt, **settings):
    """Draws lines, {label: [(x, y), with errors of y and of x if there are any, ...]}, into a file in out_dir."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 5), layout='constrained')
    axis = figure.subplots()
    for label, points in lines.items():
        axis.errorbar(*zip(*points), fmt=fmt, capsize=3, label=label)
    axis.set(title=title, **settings)
    if len(lines) > 1:
        axis.legend()
    path = Path(train.out_dir or 'out') / name
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f'picture | {path}')

# -----------------------------------------------------------------------------
# speed: a training step, the way to it from the plain form, generation

def training_step(model, optimizer, batches, lr):
    """A step of train.py on some micro-batches. -> the loss"""
    optimizer.zero_grad(set_to_none=False)
    total = 0.0
    for x, y in batches:
        loss = model(x, y) / (len(batches) * train.WORLD_SIZE)
        loss.backward()
        total += loss.detach()
    if train.WORLD_SIZE > 1:
        dist.all_reduce(optimizer.g)
    optimizer.clip(train.grad_clip)
    optimizer.step(lr)
    return total

def make_step(c, place, type_, compiled):
    """-> a function that does a training step with a new model, and the optimizer"""
    model = build(c, place, type_)
    optimizer = train.make_optimizer(model)
    if compiled:
        model = torch.compile(model, dynamic=False)
        optimizer.compile()
    micro = train.divide_batch(c.block_size, place)
    grad_accum = train.batch_size // train.WORLD_SIZE // micro
    batches = [random_batch(c, micro, place)] * grad_accum
    return partial(training_step, model, optimizer, batches, train.learning_rate), optimizer

def bench_train():
    """Milliseconds, tokens/s, share of the peak and memory of a step, and how long known runs would take."""
    c = model_config()
    model = build(c, 'meta')
    flops, tokens_per_step = model.flops_per_token(), train.batch_size * c.block_size
    place, type_, compiled = machine(train.max_iters * tokens_per_step * flops)
    train.connect(place, **train.config)
    print(f'model   | {model.num_params():,} parameters, {flops:.3g} FLOPs per token')

    step, optimizer = make_step(c, place, type_, compiled)
    seconds = measure(step, place)
    rate = tokens_per_step / seconds
    print(f'step    | {1e3 * seconds:.1f} ms (median of {steps}), {rate:,.0f} tokens/s')
    print_compute(flops * rate / train.WORLD_SIZE, place, type_)
    if 'cuda' in place:
        predicted = memory(c, train.divide_batch(c.block_size, place), type_).total()
        print(f'memory  | {torch.cuda.max_memory_allocated(place) / 1e9:.2f} GB at most; predicted, with AdamW and not '
              f'compiled, {predicted / 1e9:.2f}')
    if train.WORLD_SIZE > 1:
        talk = measure(partial(dist.all_reduce, optimizer.g), place)
        print(f'scaling | {train.WORLD_SIZE} processes; adding their gradients takes {talk / seconds:.1%} of the step')
    if profile:
        with torch.profiler.profile() as found:
            step()
        clock = 'self_device_time_total' if 'cuda' in place else 'self_cpu_time_total'
        print(found.key_averages().table(sort_by=clock, row_limit=10))
    for name in ('train_tinystories', 'train_gpt2'):
        print_run(name, place, type_)
    if train.WORLD_SIZE > 1:
        dist.destroy_process_group()

def print_compute(achieved, place, type_):
    """FLOP/s beside the peak of the device."""
    peak = peak_flops(place)
    of_what = 'MFU, of the published dense bf16 peak'
    if not peak:
        peak = matmul_flops(place, type_)
        of_what = 'of the rate of a large matmul'
    print(f'compute | {achieved / 1e12:.3g} TFLOP/s, {achieved / peak:.1%} {of_what} ({peak / 1e12:.3g} TFLOP/s)')

def matmul_flops(place, type_):
    """The rate of a large square matmul on this device, in FLOP/s."""
    n = 4096
    x = torch.randn(n, n, device=place, dtype=getattr(torch, type_))
    seconds = min(seconds_of(lambda: x @ x, place) for _ in range(5))
    return 2 * n ** 3 / seconds

def print_run(name, place, type_):
    """How long a run of config/ would take here, by a pass over a part of a batch; no optimizer, no evaluation."""
    knobs = Knobs(config.defaults)
    read_arguments([f'{HERE}/config/{name}.py'], knobs)
    c = model_config(knobs)
    model = build(c, place, type_)
    at_once = 4096 if 'cuda' in place else 1024            # tokens
    x, y = random_batch(c, at_once // c.block_size, place)
    total = knobs['max_iters'] * knobs['batch_size'] * c.block_size
    # on a CPU that takes longer than the answer is worth
    if 'cuda' in place and choose_compile(train.compile, place, total * model.flops_per_token()):
        model = torch.compile(model, dynamic=False)
    seconds = min(seconds_of(lambda: model(x, y).backward(), place) for _ in range(3))
    hours = seconds * total / x.numel() / train.WORLD_SIZE / 3600
    print(f'here    | {name}, {total / 1e9:.2g}B tokens: about {hours:,.1f} hours')

def bench_ladder():
    """What each step from the plain form to the fast one buys on this machine."""
    place, type_, compiled = machine()
    rows = [('each with those before it', 'ms', 'tokens/s')]
    for name, attention, kind, fast in (('float32, written out', 'naive', 'float32', False),
                                        (type_, 'naive', type_, False),
                                        (f'compile {compiled}', 'naive', type_, compiled),
                                        ('flash attention', 'flash', type_, compiled)):
        c = replace(model_config(), attention=attention)
        step, _ = make_step(c, place, kind, fast)
        seconds = measure(step, place)
        rows.append((name, f'{1e3 * seconds:.1f}', f'{train.batch_size * c.block_size / seconds:,.0f}'))
    print_table(*rows)

def bench_sample():
    """Tokens per second of generation, and the share of what reading the weights for each of them allows."""
    place, type_, compiled = machine(generates=True)
    model = build(model_config(), place)
    step = sample.prepare_model(model, place, type_, compiled, samples)
    generate = partial(sample.generate, model, [[0]] * samples, new_tokens, step=step, temperature=0.8)
    list(generate())            # compiles
    rate = new_tokens / median(seconds_of(lambda: list(generate()), place) for _ in range(rounds))
    print(f'sample  | {samples} x {new_tokens} tokens: {samples * rate:,.1f} tokens/s, {1e3 / rate:.2f} ms a step')

    weights = model.flops_per_token(0) // 6 * getattr(torch, type_).itemsize
    x = torch.ones(100_000_000, device=place)
    limit = x.nbytes / min(seconds_of(x.sum, place) for _ in range(10))
    print(f'memory  | {weights / 1e6:.0f} MB of weights read at {weights * rate / limit:.0%} of {limit / 1e9:.1f} GB/s')

# -----------------------------------------------------------------------------
# check: a step beside that of the plain form in float32 on the CPU

def bench_check():
    """Whether loss, gradient and the step of the weights are right on this device. Raises UserError."""
    place, type_, compiled = machine()
    c = replace(model_config(), n_layer=2, block_size=64, dropout=0.0)
    expected = check_step(replace(c, attention='naive'), 'cpu', 'float32', False)
    found = check_step(c, place, type_, compiled)
    errors = torch.stack([(a - b).norm() / b.norm() for a, b in zip(found, expected)])
    allowed = 5e-2
    if type_ == 'float32':
        allowed = 5e-3 if 'cuda' in place else 1e-5         # a GPU has TF32
    print('check   | errors of loss {:.0e}, gradient {:.0e}, step {:.0e}; {:g} is allowed'.format(*errors, allowed))
    if not errors.max() < allowed:
        raise UserError('this device does not compute what it should: train with --device=cpu, and report this')
    print('check   | pass')

def check_step(c, place, type_, compiled):
    """-> loss, gradient and step of the weights of a new model"""
    model, batch = build(c, 'cpu', type_), random_batch(c, 4, place)
    for w in model.parameters():
        w.data += 0.02 * torch.randn_like(w)        # new blocks add nothing: their last matrices are zero
    # AdamW's first step is the sign of the gradient, which for a tiny one may be either: a large eps avoids that
    optimizer = train.Optimizer(model.to(place), eps=1e-3, weight_decay=0.0)
    loss = torch.compile(model, disable=not compiled)(*batch)
    loss.backward()
    gradient, before = optimizer.g.clone(), optimizer.p.clone()
    optimizer.clip(train.grad_clip)
    optimizer.step(0.1)
    return [x.detach().cpu() for x in (loss, gradient, optimizer.p - before)]

# -----------------------------------------------------------------------------
# formats of numbers, and the optimizers on a toy

FORMATS = dict(fp32=torch.float32, fp16=torch.float16, bf16=torch.bfloat16, E4M3=torch.float8_e4m3fn,
               E5M2=torch.float8_e5m2)

def bench_formats():
    """What the formats of numbers hold."""
    rows = [('', 'exponent', 'fraction', 'largest', 'smallest', 'from 1 to the next')]
    for name, dtype in FORMATS.items():
        info = torch.finfo(dtype)
        fraction = round(-math.log2(info.eps))
        rows.append((name, f'{info.bits - 1 - fraction} bits', f'{fraction} bits', f'{info.max:.5g}',
                     f'{info.tiny * info.eps:.2g}', f'{info.eps:.2g}'))
    print_table(*rows)

TOY_RATES = 1e-1, 1e0, 1e1, 1e2, 1e3

def bench_toy():
    """The mean square of 10 x 10 numbers that are to become 0, after 10 steps at rates from too low to too high."""
    rows = [('rate', *[f'{rate:g}' for rate in TOY_RATES])]
    for name, rule in train.RULES.items():
        rows.append((name, *[f'{toy_loss(rule, rate):.2g}' for rate in TOY_RATES]))
    print_table(*rows)

def toy_loss(rule, rate):
    torch.manual_seed(train.seed)
    p = 5 * torch.randn(10, 10)
    m, v = torch.zeros(2, 10, 10)
    for t in range(1, 11):
        g = 2 * p / 100
        bias1, bias2 = 1 - 0.9 ** t, 1 - 0.999 ** t
        rule(p, g, rate / t ** 0.5, 0.0, m, v, 0.9, 0.999, 1e-8, bias1, bias2)
    return p.square().mean()

# -----------------------------------------------------------------------------
# what a model costs, by arithmetic

PARTS = 'bias', 'norm', 'embed_tokens', 'embed_positions', 'self_attn', 'mlp', 'lm_head'

def parameters(c):
    """Parameters by part, without the padding of the vocabulary; a tied head is the embedding, and has none."""
    found = Counter()
    for name, p in build(c, 'meta').named_parameters():
        part = next(part for part in PARTS if part in name)     # the first that fits: a bias of self_attn is a bias
        if part in ('embed_tokens', 'lm_head'):
            found[part] += c.vocab_size * c.n_embd              # without padding
        else:
            found[part] += p.numel()
    return found

def forward_flops(c):
    """
    FLOPs of the matmuls of a forward pass of a sequence, by part: 2mkn for (m, k) times (k, n), and no discount for
    the mask. A backward pass takes two of the size of each, for its two inputs.
    """
    size, T = parameters(c), c.block_size
    return Counter({'projections of attention': 2 * T * size['self_attn'],
                    'scores and values': 4 * T * T * c.n_head * c.head_dim * c.n_layer,
                    'mlp': 2 * T * size['mlp'],
                    'lm_head': 2 * T * c.n_embd * c.vocab_size})

def memory(c, B, type_):
    """
    Bytes at the peak of a step of B sequences with AdamW, by part; not compiled, without dropout. For the backward pass
    a matmul keeps its input, and a copy of its weight if that is not float32; a norm its input and the normalized one,
    in float32; attention q, k, v, its output, and scores where they are written out.
    """
    size, w = parameters(c), getattr(torch, type_).itemsize
    n, L, C, tokens = size.total(), c.n_layer, c.n_embd, B * c.block_size
    normed = 0                      # numbers of a token that are normalized
    if c.norm != 'none':
        normed += C + 2 * L * C
    if c.qk_norm:
        normed += L * (c.n_head + c.n_kv_head) * c.head_dim
    hidden = 4 if c.mlp == 'swiglu' else 2

    found = Counter({'weights': 4 * n, 'gradients': 4 * n, 'moments': 8 * n,
                     'norms': tokens * 8 * normed,
                     'attention': tokens * L * w * (C + 4 * c.n_head * c.head_dim),
                     'mlp': tokens * L * w * (C + hidden * c.d_ff),
                     'lm_head and loss': tokens * (w * C + 4 * c.vocab_size),
                     'gradients of logits': tokens * 8 * c.vocab_size})
    if c.attention == 'naive':
        found['scores'] = tokens * L * c.n_head * c.block_size * (4 if w == 4 else 6)
    if w < 4:
        found['cast weights'] = w * (size['self_attn'] + size['mlp'] + C * c.vocab_size)
    return found

def bench_resources():
    """What the model of the knobs costs, by part, and what follows from it."""
    _, type_, _ = machine()
    c, B = model_config(), train.micro_batch_size or train.batch_size
    flops = forward_flops(c)
    print_parts('parameters', parameters(c))
    print_parts('FLOPs forward, a sequence', flops)
    print_parts(f'bytes of a step with AdamW, {type_}, {B} x {c.block_size} tokens', memory(c, B, type_))

    fixed = memory(c, 0, type_).total()
    each = memory(c, 1, type_).total() - fixed
    fits = max(int(1e9 * memory_gb - fixed) // each, 0)
    print(f'largest batch | {memory_gb:g} GB hold {fits:,} sequences')
    D = tokens or train.max_iters * train.batch_size * c.block_size
    spent = 3 * flops.total() / c.block_size * D            # a backward pass costs two forward passes
    days = spent / (num_gpus * 1e12 * peak_tflops * mfu) / 86400
    print(f'time          | {days:,.4g} days for {D:,.4g} tokens, {spent:.3g} FLOPs, with {num_gpus} x {peak_tflops:g} '
          f'TFLOP/s at {mfu:.0%}')
    budget = flop_budget or spent
    N = (budget / 120) ** 0.5                               # 6 N D FLOPs, where D = 20 N (arXiv:2203.15556)
    print(f'Chinchilla    | {budget:.3g} FLOPs do most for {N:.3g} parameters on {20 * N:.3g} tokens')

def print_parts(title, counts):
    """Counts by part, their shares and their sum."""
    total = counts.total()
    rows = [(part, f'{count:,}', f'{count / total:.1%}') for part, count in counts.items()]
    print_table((title, '', ''), *rows, ('together', f'{total:,}', ''))
    print()

# -----------------------------------------------------------------------------
# tokenizers, beside the packages that are installed

PATTERN = bpe.PATTERNS['gpt2']

def bench_tokenizer():
    """Training, encoding and decoding of the same documents. The others encode with our vocabulary and pattern."""
    import tiktoken
    settings, files, _ = prepare.find_source(train.dataset)
    docs = [raw.decode() for raw in prepare.documents(files, settings['separator'])]
    text, special = '\n\n'.join(docs), [bpe.END_OF_TEXT]
    with TemporaryDirectory() as folder:
        path = Path(folder, 'documents.txt')            # ours trains on files
        path.write_bytes(bpe.END_OF_TEXT.join(docs).encode())
        for n in (10_000, 32_000):
            contest(f'train {n:,}', text,
                    ours=lambda: bpe.train_bpe(path, n, special),
                    tokenizers=lambda: train_tokenizers(docs, n),
                    rustbpe=lambda: train_rustbpe(docs, n))
        tok = bpe.Tokenizer(*bpe.train_bpe(path, n, special), special)

    ranks = {token: id for id, token in tok.vocab.items() if id != tok.eot}
    tik = tiktoken.Encoding('', pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    ids = tok.encode_to_numpy(text)
    contest('encode new words', text,
            ours=lambda: encode_anew(tok, text), tiktoken=lambda: tik.encode_to_numpy(text))
    contest('encode known words', text,
            ours=lambda: tok.encode_to_numpy(text), tiktoken=lambda: tik.encode_to_numpy(text))
    contest('encode to lists', text,
            ours=lambda: encode_all(tok, docs),
            tiktoken=lambda: encode_all(tik, docs),
            riptoken=lambda: encode_riptoken(ranks, docs))
    contest('decode', text,
            ours=lambda: tok.decode_bytes(ids), tiktoken=lambda: tik.decode_bytes(ids.tolist()))

def contest(title, text, **contestants):
    """Times the functions of those packages that are installed, in turns, and prints the medians."""
    names = [name for name in contestants if name == 'ours' or util.find_spec(name)]
    laps = [[seconds_of(contestants[name]) for name in names] for _ in range(rounds)]
    typical = np.median(laps, 0)
    size = len(text.encode()) / 1e6
    rows = [(title, 'seconds', 'MB/s', 'times ours')]
    for name, seconds in zip(names, typical):
        rows.append((name, f'{seconds:.2f}', f'{size / seconds:.1f}', f'{seconds / typical[0]:.2f}'))
    print_table(*rows)

def train_tokenizers(docs, n):
    import tokenizers
    tokenizers.ByteLevelBPETokenizer().train_from_iterator(docs, n, show_progress=False)

def train_rustbpe(docs, n):
    import rustbpe
    rustbpe.Tokenizer().train_from_iterator(iter(docs), n, pattern=PATTERN)

def encode_riptoken(ranks, docs):
    import riptoken
    encode_all(riptoken.CoreBPE(ranks, {}, PATTERN), docs)

def encode_anew(tok, text):
    tok.forget()
    tok.encode_to_numpy(text)

def encode_all(encoder, docs):
    return [encoder.encode_ordinary(doc) for doc in docs]

# -----------------------------------------------------------------------------
# a range test, and a look into a model

FIND_STEPS = 200

def bench_find_lr():
    """
    A range test (arXiv:1506.01186): a short run whose learning rate rises, from a thousandth of the knob's to a hundred
    times the knob's, until the loss does too.
    """
    place, type_, _ = machine()
    if type_ == 'float16':          # it would need a scaler
        type_ = 'float32'
    _, meta, data, _ = train.open_data(train.tokenizer)
    model = build(train.model_config(vocab_size=meta['vocab_size']), place, type_)
    optimizer, T = train.make_optimizer(model), model.config.block_size
    micro = train.divide_batch(T, place)
    losses = {}                     # {rate: loss}
    for step in range(FIND_STEPS):
        lr = train.learning_rate * 10 ** (-3 + 5 * step / FIND_STEPS)
        batches = train.micro_batches(data, step * train.batch_size, step, T, micro, place)
        loss = float(training_step(model, optimizer, list(batches), lr))
        if losses and not loss < min(losses.values()) + 1:      # nan is not, either
            break
        losses[lr] = loss
    best = min(losses, key=losses.get) / 3
    print(f'suggest | --learning_rate={best:.1e}, a third of the rate at which the loss was lowest')
    save_picture('find_lr.png', 'How high may the learning rate be?', {'': losses.items()}, '-', xscale='log',
                 xlabel='learning rate', ylabel='training loss')

def bench_diagnose():
    """A step of training from a checkpoint, and what one learns to read in a network, layer by layer."""
    folder = sample.find_checkpoint(runs)
    read_arguments([f'{folder.parent}/config.py'], train.config)
    vars(train).update(train.config)
    model = load_model(folder, attention='naive')
    optimizer = train.make_optimizer(model)
    train.restore(folder, optimizer, read_json(folder / 'training.json'))
    optimizer.muon_every = 1        # so that the matrices of all layers move, and can be compared
    _, _, data, _ = train.open_data(train.tokenizer)
    T = model.config.block_size
    layers = diagnose(model, optimizer, data.batch(range(0, 4096, T), T), train.learning_rate)
    rows = [(f'{i}', *[f'{x:.2g}' for x in layer.values()]) for i, layer in enumerate(layers)]
    print_table(('layer', *layers[0]), *rows)

def diagnose(model, optimizer, batch, lr):
    """
    Of a step on a batch, for each layer: rms of its output and of its gradients (clipped); how far the step went, as a
    share of the weights; the share of units of the MLP that stay below a hundredth of their rms for every token; the
    entropy of its attention, which has to be naive.
    """
    layers = model.model.layers
    weights = [parameters_to_vector(layer.parameters()).detach() for layer in layers]
    seen, entropies, softmax = {}, [], F.softmax
    F.softmax = partial(note_softmax, entropies, softmax)
    hook = torch.nn.modules.module.register_module_forward_hook(partial(note_module, seen))
    training_step(model, optimizer, [batch], lr)
    hook.remove()
    F.softmax = softmax

    found = []
    for layer, before, entropy in zip(layers, weights, entropies):
        _, output = seen[layer]
        units, _ = seen[layer.mlp.down_proj]
        dead = units.abs().amax((0, 1)) < 0.01 * rms(units)
        gradients = parameters_to_vector(w.grad for w in layer.parameters())
        update = parameters_to_vector(layer.parameters()).detach() - before
        found.append({'activations': rms(output), 'gradients': rms(gradients),
                      'update / weights': rms(update) / rms(before), 'dead units': dead.float().mean(),
                      'entropy': entropy})
    return found

def rms(x):
    return x.square().mean().sqrt()

def note_module(seen, module, inputs, output):
    seen[module] = inputs[0].detach(), output.detach()

def note_softmax(entropies, softmax, scores, dim):
    """Notes the mean entropy as a share of the largest: 1 if all tokens are looked at alike."""
    probs = softmax(scores, dim)
    largest = torch.arange(1, scores.size(-1) + 1).log().mean()
    entropies.append(torch.special.entr(probs.detach()).sum(-1).mean() / largest)
    return probs

# -----------------------------------------------------------------------------
# experiments: every arm is a command, trained with every seed

class Arm:
    """Runs with the same arguments for train.py, which differ in their seed. Raises UserError."""
    def __init__(self, name, arguments=()):
        self.name, self.arguments, self.logs = name, arguments, []
        self.knobs = Knobs(train.config)
        read_arguments(arguments, self.knobs)

    def run(self, seed):
        """Trains in a process of its own, unless that has been done."""
        short = re.sub('[^A-Za-z0-9.]+', '_', self.name)
        folder = Path(train.out_dir or 'out') / f'{short}-{seed}'
        given = [f'--{name}={x}' for name, x in train.config.items() if x != train.config.defaults[name]]
        own = [f'--seed={seed}', f'--out_dir={folder}', '--init_from=auto']
        ended = any('full_val_loss' in entry for entry in train.read_log(folder))
        if not ended:
            command = [sys.executable, HERE / 'train.py', *given, *self.arguments, *own]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode not in (0, 3):           # 3: diverged
                raise UserError(f'{folder}: train.py ended with status {done.returncode}: {done.stderr[-500:]}')
        self.logs.append(train.read_log(folder))

    def values(self, key):
        """What the entries of the logs say of one thing."""
        return [entry[key] for log in self.logs for entry in log if entry.get(key) is not None]

    def loss(self):
        """The mean at the end; inf where every run diverged."""
        return mean(self.values('full_val_loss') or [math.inf])

    def spread(self):
        losses = self.values('full_val_loss')
        return stdev(losses) if len(losses) > 1 else 0.0

    def height(self):
        """Where a picture shows the loss: at most at the first one, so that a diverged arm fits."""
        return min([self.loss(), *self.values('loss')[:1]])

def read_arms():
    """Raises UserError."""
    found = []
    for line in filter(str.strip, re.split('[\n;]', arms)):
        name, _, arguments = line.strip().partition(':')
        found.append(Arm(name, arguments.split()))
    if not found:
        raise UserError('there are no arms: give config/lab_ablations.py, or --arms="a: --n_embd=64; b: --n_embd=128"')
    return found

def bench_compare():
    """Every arm with every seed, in turns, so that a slow hour of the machine is everyone's. -> the arms"""
    found = read_arms()
    if picture not in ('rows', 'curves', *train.config):
        raise UserError(f'picture = {picture!r}: give rows, curves, or a knob of train.py')
    for i in range(seeds):
        for arm in found:
            arm.run(train.seed + i)
            print(f'{arm.name}, seed {i + 1} of {seeds} | loss {arm.loss():.4f}', flush=True)
    print_results(found)
    if picture == 'rows':
        save_rows(question, found)
    elif picture == 'curves':
        save_curves(question, found)
    else:
        save_picture('curves.png', question, groups_of(found), 'o-', xscale='log', xlabel=picture,
                     ylabel='validation loss')
    return found

def bench_scaling():
    """The same, and a law that the losses follow."""
    print_law(bench_compare())

def bench_curves():
    """Several runs in one table and one picture."""
    found = [Arm(run) for run in runs.split(',')]
    for arm in found:
        arm.logs = [train.read_log(Path(arm.name))]
        if not arm.values('loss'):
            raise UserError(f'there is no run in {arm.name!r}: give folders of runs, as --runs=out/a,out/b')
    print_results(found)
    save_curves('How did the loss fall?', found)

def print_results(found):
    """How the runs ended: those that did not, since they diverged or go on, are not in the means."""
    rows = [('', 'validation loss', 'to the first', 'bits per byte', 'steps', 'tokens/s', 'ended')]
    for arm in found:
        bpb = mean(arm.values('full_val_bpb') or [math.nan])
        speed = median(arm.values('tokens_per_second') or [math.nan])
        last = max(arm.values('step') or [0])
        ended = len(arm.values('full_val_loss'))
        rows.append((arm.name, f'{arm.loss():.4f} ± {arm.spread():.4f}', f'{arm.loss() - found[0].loss():+.4f}',
                     f'{bpb:.3f}', f'{last:,}', f'{speed:,.0f}', f'{ended} of {len(arm.logs)}'))
    print_table(*rows)

def save_rows(title, found):
    """A row for each arm, the best at the top: mean and spread."""
    ordered = sorted(found, key=Arm.loss, reverse=True)
    points = [(arm.height(), row, 0, arm.spread()) for row, arm in enumerate(ordered)]
    labels = [f'{arm.name}  {arm.loss():.3f}' for arm in ordered]
    save_picture('curves.png', title, {'': points}, 'o', xlabel='validation loss', yticks=range(len(found)),
                 yticklabels=labels)

def groups_of(found):
    """{what stands before the comma in the names of arms: points of a line}: the loss at the end against a knob."""
    groups = {}
    for arm in sorted(found, key=lambda arm: arm.knobs[picture]):
        group, _, _ = arm.name.rpartition(', ')
        groups.setdefault(group, []).append((arm.knobs[picture], arm.height(), arm.spread()))
    return groups

def save_curves(title, found):
    """The training losses of each arm's first seed."""
    lines = {arm.name: train.points(arm.logs[0], 'loss') for arm in found}
    top = 1.1 * found[0].values('loss')[0]
    save_picture('curves.png', title, lines, '-', xlabel='step', ylabel='training loss', ylim=(0, top))

def print_law(found):
    """Raises UserError for too few arms."""
    points = []
    for arm in found:
        c = model_config(arm.knobs)
        N = build(c, 'meta').flops_per_token(0) / 6
        D = arm.knobs['max_iters'] * arm.knobs['batch_size'] * c.block_size
        if arm.values('full_val_loss'):
            points.append((N, D, arm.loss()))
    if len(points) < 6:
        raise UserError(f'{len(points)} arms ended with a loss: a law of five numbers takes 6: config/lab_scaling.py')
    E, A, alpha, B, beta, error = fit_law(*np.array(points).T)
    print(f'law     | loss = {E:.2f} + {A:.3g} / N^{alpha:.2f} + {B:.3g} / D^{beta:.2f}, off by {error:.1%} '
          f'(N weights of matmuls, D tokens; {len(points)} arms)')

def fit_law(N, D, loss):
    """
    loss = E + A / N^alpha + B / D^beta (arXiv:2203.15556, equation 2): the exponents by trying, the rest by least
    squares of relative errors. -> E, A, alpha, B, beta, the error
    """
    laws = []
    for alpha, beta in product(np.arange(0.02, 1.5, 0.02), repeat=2):
        terms = np.stack([N ** 0, N ** -alpha, D ** -beta], 1) / loss[:, None]
        E, A, B = np.linalg.lstsq(terms, np.ones(len(loss)))[0]
        error = np.square(terms @ (E, A, B) - 1).mean() ** 0.5
        if min(E, A, B) >= 0:
            laws.append((E, A, alpha, B, beta, error))
    return min(laws, key=lambda law: law[-1])

def main():
    if train.RANK:
        sys.stdout = open(os.devnull, 'w')
    commands = [name.removeprefix('bench_') for name in globals() if name.startswith('bench_')]
    if what not in commands:
        raise UserError(f'--what={what} is not known: give one of {", ".join(commands)}')
    globals()[f'bench_{what}']()

if __name__ == '__main__':
    launch(main)
