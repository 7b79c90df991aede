"""
Measures how fast this machine is and how close to its limit, says what a model costs, and runs experiments.

    python bench.py                                # a training step of the default model
    python bench.py config/train_gpt2.py --batch_size=32 --micro_batch_size=32
    torchrun --nproc_per_node=4 bench.py
    python bench.py --what=sample --samples=4      # tokens/s of generation, and its share of the memory's bandwidth
    python bench.py --what=ladder                  # from the plain form to the fast one, row by row
    python bench.py --what=check                   # does this device compute what it should?
    python bench.py --what=resources config/train_gpt2.py        # parameters, FLOPs, memory, days: what it will cost
    python bench.py --what=formats                 # what fp32, fp16, bf16 and fp8 can hold
    python bench.py --what=toy                     # the optimizers on a toy problem, at rates from too low to too high
    python bench.py --what=tokenizer --dataset=my_text.txt       # ours beside tokenizers, rustbpe, tiktoken, riptoken
    python bench.py --what=find_lr config/train_tinystories.py   # a short run that suggests a learning rate
    python bench.py --what=diagnose --runs=out/python            # a look into a trained model, layer by layer
    python bench.py --what=curves --runs=out/a,out/b             # several runs in one table and one picture
    python bench.py config/lab.py config/lab_ablations.py        # what does each part buy? see config/lab_*.py

It takes the knobs of train.py, too. Speed is measured on random tokens. MFU is the FLOP/s achieved, divided by the
card's peak in dense bf16. A token counts 6 FLOPs per weight of a matmul and 12 n_layer n_embd T for attention, without
a discount for the causal mask. If the peak is not known, the measured rate of a large matmul stands in for it.
"""
import math
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib import import_module, util
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector

import prepare
import sample
import tokenizer as bpe
import train
from configurator import Knobs, UserError, configure, launch, read_json
from model import (GPT, GPTConfig, choose_compile, choose_device, choose_dtype, device_name, load_model, peak_flops,
                   set_up)

# -----------------------------------------------------------------------------
what = 'train'          # train (a training step), sample, ladder, check, resources, formats, toy, tokenizer, find_lr,
                        # diagnose, curves, compare (arms by seeds, as in config/lab_*.py), scaling (compare, fit a law)
steps = 20              # measured optimizer steps
warmup_steps = 5        # unmeasured steps before them
profile = False         # train: also say where the time of a step goes
samples = 1             # sample: texts generated at once
new_tokens = 100        # sample: tokens in each text
rounds = 3              # sample, tokenizer: measurements; their median counts
memory_gb = 80.0        # resources: memory of a card, in GB of 10^9 bytes
num_gpus = 1            # resources: how many cards
peak_tflops = 989.5     # resources: of a card, dense (an H100 in bfloat16; the 1,979 in its data sheet are sparse)
mfu = 0.4               # resources: the share of the peak that training reaches
tokens = 0.0            # resources: tokens to train on, such as 15e12; 0: those of the run
flop_budget = 0.0       # resources: FLOPs to spend on a model of the best size; 0: those of the run
runs = ''               # curves: folders, separated by commas; diagnose: one folder, or '' for the newest run
arms = ''               # compare: 'name: arguments of train.py' for each arm, one a line or separated by ;
seeds = 3               # compare: runs of each arm, with --seed and the seeds after it
question = ''           # the title of the picture
picture = 'rows'        # compare: rows (one per arm), curves (losses by step), or a knob to draw the loss against
# -----------------------------------------------------------------------------
config = configure(globals(), train, prepare, GPTConfig)        # the knobs of train.py are in train.config, too

HERE = Path(__file__).parent

# -----------------------------------------------------------------------------
# what the commands share. c is always a GPTConfig; device and dtype are names, such as 'cuda:0' and 'bfloat16'

def machine(flops=math.inf, generates=False):
    """Prints and returns what the knobs mean here: device, dtype, and whether a run of that many FLOPs is compiled."""
    train.check_knobs()
    device = choose_device(train.device, train.LOCAL_RANK)
    set_up(device)
    compiled = choose_compile(train.compile, device, flops)
    dtype = choose_dtype(train.dtype, device, packed=generates and not compiled,
                         one_row=generates and compiled and samples == 1)
    print(f'machine | {device} ({device_name(device)}), {dtype}, compile {compiled}')
    return device, dtype, compiled

# tokenizers that ignore the knob vocab_size; that of char depends on the text, and is about 100
VOCAB_SIZES = dict(gpt2=50257, byte=257, char=100)

def model_config(knobs=train.config):
    """The GPTConfig that knobs describe, as far as it can be known without the data."""
    vocab_size = VOCAB_SIZES.get(knobs['tokenizer'], knobs['vocab_size'])
    return train.model_config(knobs, vocab_size=vocab_size)

def build(c, device, dtype='float32'):
    """A new model. On the device 'meta' it has only shapes and takes no memory."""
    torch.manual_seed(train.seed)
    with torch.device(device):
        model = GPT(c)
    model.compute_dtype = getattr(torch, dtype)
    return model

def random_batch(c, B, device):
    x = torch.randint(c.vocab_size, (B, c.block_size + 1)).to(device)
    return x[:, :-1], x[:, 1:]

def seconds_of(function, device='cpu'):
    """How long a device takes to do all that a function asks of it."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    began = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - began

def measure(function, device):
    """The median of the seconds that a function takes, over `steps` calls after a warm-up."""
    for _ in range(warmup_steps):
        function()
    return median(seconds_of(function, device) for _ in range(steps))

def print_table(rows):
    """Prints a Markdown table. A row is a list of strings; the first is the header."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    head, *others = rows
    ruler = ['-' * width for width in widths]
    for row in (head, ruler, *others):
        print('|', ' | '.join(map(str.rjust, row, widths)), '|')

def save_picture(name, lines, fmt, **settings):
    """Draws {label: points of a line} into a file in out_dir. A point is (x, y), (x, y, dy) or (x, y, dy, dx)."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 5), layout='constrained')
    axis = figure.subplots()
    for label, points in lines.items():
        axis.errorbar(*zip(*points), fmt=fmt, capsize=3, label=label)
    axis.set(title=question, **settings)
    if len(lines) > 1:
        axis.legend()
    path = Path(train.out_dir or 'out') / name
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f'picture | {path}')

# -----------------------------------------------------------------------------
# speed: a training step, what makes it fast, generation

def make_step(c, device, dtype, compiled):
    """-> a function that takes a training step of a new model"""
    model = build(c, device, dtype)
    optimizer = train.make_optimizer(model)
    if compiled:
        model = torch.compile(model, dynamic=False)
        optimizer.compile()
    micro = train.divide_batch(c.block_size, device)
    grad_accum = train.batch_size // train.WORLD_SIZE // micro
    batches = [random_batch(c, micro, device)] * grad_accum
    scaler = train.make_scaler(device, dtype)
    return partial(train.training_step, model, optimizer, scaler, batches, grad_accum, train.learning_rate)

def bench_train():
    """Milliseconds, tokens/s, share of the peak and memory of a step, and how long two known runs would take."""
    c = model_config()
    model = build(c, 'meta')
    flops = model.flops_per_token()
    device, dtype, compiled = machine(tokens_of(train.config) * flops)
    train.connect(device, **train.config)
    print(f'model   | {model.num_params():,} parameters, {flops:.3g} FLOPs per token')

    step = make_step(c, device, dtype, compiled)
    seconds = measure(step, device)
    rate = train.batch_size * c.block_size / seconds
    print(f'step    | {1e3 * seconds:.1f} ms (median of {steps}), {rate:,.0f} tokens/s')
    print_compute(flops * rate / train.WORLD_SIZE, device, dtype)
    if 'cuda' in device:
        predicted = memory(c, train.divide_batch(c.block_size, device), dtype).total()
        most = torch.cuda.max_memory_allocated(device)
        print(f'memory  | {most / 1e9:.2f} GB at most; predicted, with AdamW and not compiled, {predicted / 1e9:.2f}')
    if train.WORLD_SIZE > 1:
        gradients = torch.zeros(model.num_params(), device=device)
        talk = measure(partial(dist.all_reduce, gradients), device)
        print(f'scaling | {train.WORLD_SIZE} processes; adding their gradients takes {talk / seconds:.1%} of the step')
    if profile:
        with torch.profiler.profile() as found:
            step()
        clock = 'self_device_time_total' if 'cuda' in device else 'self_cpu_time_total'
        print(found.key_averages().table(sort_by=clock, row_limit=10))
    for name in ('train_tinystories', 'train_gpt2'):
        print_run(name, device, dtype)

def print_compute(achieved, device, dtype):
    """The FLOP/s of a step beside the peak of the device."""
    peak = peak_flops(device)
    title = 'MFU, of the published dense bf16 peak'
    if not peak:
        peak = matmul_flops(device, dtype)
        title = 'of the rate of a large matmul'
    print(f'compute | {achieved / 1e12:.3g} TFLOP/s, {achieved / peak:.1%} {title} ({peak / 1e12:.3g} TFLOP/s)')

def matmul_flops(device, dtype):
    """The FLOP/s of a large square matmul."""
    n = 4096
    x = torch.randn(n, n, device=device, dtype=getattr(torch, dtype))
    seconds = min(seconds_of(lambda: x @ x, device) for _ in range(5))
    return 2 * n ** 3 / seconds

def print_run(name, device, dtype):
    """How long a run of config/ would take here, judged by forward and backward passes over a part of a batch."""
    knobs = Knobs(train.config.defaults)
    knobs.read([f'{HERE}/config/{name}.py'])
    c = model_config(knobs)
    model = build(c, device, dtype)
    total = tokens_of(knobs)
    at_once = 4096 if 'cuda' in device else 1024        # tokens
    if 'cuda' in device:        # on a CPU compiling would take longer than the answer is worth
        compiled = choose_compile(train.compile, device, math.inf)
        model = torch.compile(model, dynamic=False, disable=not compiled)
    x, y = random_batch(c, at_once // c.block_size, device)
    seconds = min(seconds_of(lambda: model(x, y).backward(), device) for _ in range(3))
    hours = seconds * total / x.numel() / train.WORLD_SIZE / 3600
    print(f'here    | {name}, {total / 1e9:.2g}B tokens: about {hours:,.1f} hours')

def bench_ladder():
    """What each step from the plain form to the fast one buys on this machine."""
    device, dtype, compiled = machine()
    rungs = [('float32, written out', 'naive', 'float32', False),
             (dtype, 'naive', dtype, False),
             (f'compile {compiled}', 'naive', dtype, compiled),
             ('flash attention', 'flash', dtype, compiled)]
    rows = [('each with those before it', 'ms', 'tokens/s')]
    for name, attention, *how in rungs:
        c = replace(model_config(), attention=attention)
        seconds = measure(make_step(c, device, *how), device)
        rows.append((name, f'{1e3 * seconds:.1f}', f'{train.batch_size * c.block_size / seconds:,.0f}'))
    print_table(rows)

def bench_sample():
    """Tokens per second of generation, and the share of the memory's bandwidth that reading the weights takes."""
    device, dtype, compiled = machine(generates=True)
    model = build(model_config(), device)
    step = sample.prepare_model(model, device, dtype, compiled, samples)
    generate = partial(sample.generate, model, [[0]] * samples, new_tokens, step=step, temperature=0.8)
    list(generate())            # the first run compiles
    rate = new_tokens / median(seconds_of(lambda: list(generate()), device) for _ in range(rounds))
    print(f'sample  | {samples} x {new_tokens} tokens: {samples * rate:,.1f} tokens/s, {1e3 / rate:.2f} ms a step')

    weights = model.flops_per_token(0) // 6 * getattr(torch, dtype).itemsize
    x = torch.ones(100_000_000, device=device)
    limit = x.nbytes / min(seconds_of(x.sum, device) for _ in range(10))
    print(f'memory  | {weights / 1e6:.0f} MB of weights read at {weights * rate / limit:.0%} of {limit / 1e9:.1f} GB/s')

# -----------------------------------------------------------------------------
# check: a step here beside the same step in the plain form, in float32 on the CPU

def bench_check():
    """Whether loss, gradient and the step of the weights are right on this device. Raises UserError."""
    device, dtype, compiled = machine()
    c = replace(model_config(), n_layer=2, block_size=64, dropout=0.0)
    expected = check_step(replace(c, attention='naive'), 'cpu', 'float32', False)
    found = check_step(c, device, dtype, compiled)
    errors = torch.stack([(a - b).norm() / b.norm() for a, b in zip(found, expected)])
    allowed = 5e-2
    if dtype == 'float32':
        allowed = 5e-3 if 'cuda' in device else 1e-5        # a GPU uses TF32
    loss, gradient, step = errors
    print(f'check   | errors of loss {loss:.0e}, gradient {gradient:.0e}, step {step:.0e}; {allowed:g} is allowed')
    if not errors.max() < allowed:
        raise UserError('this device does not compute what it should: train with --device=cpu, and report this')
    print('check   | pass')

UNSCALED = train.make_scaler('cpu', 'float32')

def check_step(c, device, dtype, compiled):
    """-> loss, clipped gradient and step of the weights of a new model"""
    model = build(c, 'cpu', dtype)
    batch = random_batch(c, 4, device)
    for w in model.parameters():
        w.data += 0.02 * torch.randn_like(w)        # a new block adds nothing: its last matrices are zero
    # subtle: AdamW's first step is the sign of the gradient, arbitrary where that is tiny; a large eps avoids this
    names = [name for name, _ in model.named_parameters()]
    optimizer = train.Optimizer(model.to(device), [train.Group(names, 'adamw', eps=1e-3)])
    before = optimizer.p.clone()
    fast = torch.compile(model, disable=not compiled)
    loss, _ = train.training_step(fast, optimizer, UNSCALED, [batch], 1, 0.1)
    return [x.cpu() for x in (loss, optimizer.g, optimizer.p - before)]

# -----------------------------------------------------------------------------
# formats of numbers; the optimizers on a toy

FORMATS = dict(fp32=torch.float32, fp16=torch.float16, bf16=torch.bfloat16, E4M3=torch.float8_e4m3fn,
               E5M2=torch.float8_e5m2)

def bench_formats():
    """What the formats of numbers can hold."""
    rows = [('', 'exponent', 'fraction', 'largest', 'smallest', 'from 1 to the next')]
    for name, dtype in FORMATS.items():
        info = torch.finfo(dtype)
        fraction = round(-math.log2(info.eps))
        rows.append((name, f'{info.bits - 1 - fraction} bits', f'{fraction} bits', f'{info.max:.5g}',
                     f'{info.tiny * info.eps:.2g}', f'{info.eps:.2g}'))
    print_table(rows)

TOY_RATES = 1e-1, 1e0, 1e1, 1e2, 1e3

def bench_toy():
    """The mean square of 10 x 10 numbers that should become 0, after 10 steps, at rates from too low to too high."""
    rows = [('rate', *[f'{rate:g}' for rate in TOY_RATES])]
    for name, rule in train.RULES.items():
        rows.append((name, *[f'{toy_loss(rule, rate):.2g}' for rate in TOY_RATES]))
    print_table(rows)

def toy_loss(rule, rate):
    torch.manual_seed(train.seed)
    p = 5 * torch.randn(10, 10)
    m, v = torch.zeros(2, 10, 10)
    for t in range(1, 11):
        g = 2 * p / 100
        rule(p, g, rate / t ** 0.5, 0.0, m, v, 0.9, 0.999, 1e-8, 1 - 0.9 ** t, 1 - 0.999 ** t)
    return p.square().mean()

# -----------------------------------------------------------------------------
# what a model costs, by arithmetic

PARTS = 'bias', 'norm', 'embed_tokens', 'embed_positions', 'embed_values', 'self_attn', 'mlp', 'lm_head'

def parameters(c):
    """Parameters by part, without the padding of the vocabulary. A tied head has none of its own."""
    found = Counter()
    for name, p in build(c, 'meta').named_parameters():
        part = next(part for part in PARTS if part in name)     # the first that fits: a bias in self_attn is a bias
        if part in ('embed_tokens', 'lm_head'):
            found[part] += c.vocab_size * c.n_embd
        else:
            found[part] += p.numel()
    return found

def forward_flops(c):
    """
    FLOPs of the matmuls in a forward pass over a sequence, by part: 2mkn for (m, k) times (k, n), without a discount
    for the mask. A backward pass takes twice as many: one matmul of the same size for each of the two inputs.
    """
    size, T = parameters(c), c.block_size
    return Counter({'projections of attention': 2 * T * size['self_attn'],
                    'scores and values': 4 * T * T * c.n_head * c.head_dim * c.n_layer,
                    'mlp': 2 * T * size['mlp'],
                    'lm_head': 2 * T * c.n_embd * c.vocab_size})

def memory(c, B, dtype):
    """
    Bytes at the peak of a step of B sequences with AdamW, by part; not compiled, without dropout. For the backward pass
    a matmul keeps its input, and its weight if that was cast; a norm keeps its input, and its output before the weight,
    both in float32; attention keeps q, k, v, its output, and the scores if they are written out.
    """
    size, w = parameters(c), getattr(torch, dtype).itemsize
    n, L, C, tokens = size.total(), c.n_layer, c.n_embd, B * c.block_size
    normed = 0                      # numbers per token that go through a norm
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
    if c.value_embeds:
        found['values'] = tokens * w * ((L + 1) // 2) * c.n_kv_head * (c.head_dim + 2)
    if w < 4:
        found['cast weights'] = w * (size['self_attn'] + size['mlp'] + C * c.vocab_size)
    return found

def bench_resources():
    """What the model of the knobs costs, by part, and what follows from that."""
    _, dtype, _ = machine()
    c = model_config()
    B = train.micro_batch_size or train.batch_size
    flops = forward_flops(c)
    print_parts('parameters', parameters(c))
    print_parts('FLOPs forward, a sequence', flops)
    print_parts(f'bytes of a step with AdamW, {dtype}, {B} x {c.block_size} tokens', memory(c, B, dtype))

    fixed = memory(c, 0, dtype).total()
    each = memory(c, 1, dtype).total() - fixed
    fits = max(int(1e9 * memory_gb - fixed) // each, 0)
    print(f'largest batch | {memory_gb:g} GB hold {fits:,} sequences')
    D = tokens or tokens_of(train.config)
    spent = 3 * flops.total() / c.block_size * D            # a backward pass costs two forward passes
    days = spent / (num_gpus * 1e12 * peak_tflops * mfu) / 86400
    print(f'time          | {days:,.4g} days for {D:,.4g} tokens, {spent:.3g} FLOPs, with {num_gpus} x {peak_tflops:g} '
          f'TFLOP/s at {mfu:.0%}')
    budget = flop_budget or spent
    N = (budget / 120) ** 0.5                               # 6 N D FLOPs, where D = 20 N (arXiv:2203.15556)
    print(f'Chinchilla    | {budget:.3g} FLOPs do most for {N:.3g} parameters on {20 * N:.3g} tokens')

def tokens_of(knobs):
    """How many tokens a run trains on."""
    return knobs['max_iters'] * knobs['batch_size'] * knobs['block_size']

def print_parts(title, counts):
    """Prints counts by part, with their shares and their sum."""
    total = counts.total()
    rows = [(title, '', '')]
    rows += [(part, f'{count:,}', f'{count / total:.1%}') for part, count in counts.items()]
    print_table([*rows, ('together', f'{total:,}', '')])
    print()

# -----------------------------------------------------------------------------
# tokenizers, beside the packages that are installed

PATTERN = bpe.PATTERNS['gpt2']

def bench_tokenizer():
    """Times training, encoding and decoding of the same documents. All encode with our vocabulary and pattern."""
    try:
        import tiktoken
    except ImportError:
        raise UserError('tiktoken, beside which ours is measured, is not installed: pip install tiktoken')
    settings, files, _ = prepare.find_source(train.dataset)
    docs = [raw.decode() for raw in prepare.documents(files, settings['separator'])]
    text, special = '\n\n'.join(docs), [bpe.END_OF_TEXT]
    with TemporaryDirectory() as folder:
        path = Path(folder, 'documents.txt')            # ours trains on files
        path.write_bytes(bpe.END_OF_TEXT.join(docs).encode())
        for n in (10_000, 32_000):
            contest(f'train {n:,}', text,
                    ours=lambda: bpe.train_bpe(path, n, special),
                    tokenizers=lambda: import_module('tokenizers').ByteLevelBPETokenizer().train_from_iterator(
                        docs, n, show_progress=False),
                    rustbpe=lambda: import_module('rustbpe').Tokenizer().train_from_iterator(
                        iter(docs), n, pattern=PATTERN))
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
            riptoken=lambda: encode_all(import_module('riptoken').CoreBPE(ranks, {}, PATTERN), docs))
    contest('decode', text,
            ours=lambda: tok.decode_bytes(ids), tiktoken=lambda: tik.decode_bytes(ids.tolist()))

def contest(title, text, **contestants):
    """Times the functions of the packages that are installed, taking turns, and prints the medians."""
    names = [name for name in contestants if name == 'ours' or util.find_spec(name)]
    laps = [[seconds_of(contestants[name]) for name in names] for _ in range(rounds)]
    typical = np.median(laps, 0)
    size = len(text.encode()) / 1e6
    rows = [(title, 'seconds', 'MB/s', 'times ours')]
    for name, seconds in zip(names, typical):
        rows.append((name, f'{seconds:.2f}', f'{size / seconds:.1f}', f'{seconds / typical[0]:.2f}'))
    print_table(rows)

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
    A range test (arXiv:1506.01186): a short run whose learning rate rises from a thousandth of the knob to a hundred
    times the knob, or until the loss has risen by 1.
    """
    device, dtype, _ = machine()
    _, meta, _, data, _ = train.open_data(None)
    model = build(train.model_config(vocab_size=meta['vocab_size']), device, dtype)
    optimizer = train.make_optimizer(model)
    T = model.config.block_size
    micro = train.divide_batch(T, device)
    grad_accum = train.batch_size // micro
    scaler = train.make_scaler(device, dtype)
    losses = {}                     # {rate: loss}
    for step in range(FIND_STEPS):
        lr = train.learning_rate * 10 ** (-3 + 5 * step / FIND_STEPS)
        batches = train.micro_batches(data, step * train.batch_size, step, T, micro, device)
        loss, _ = train.training_step(model, optimizer, scaler, batches, grad_accum, lr)
        if losses and not loss < min(losses.values()) + 1:      # nan ends it, too
            break
        losses[lr] = float(loss)
    best = min(losses, key=losses.get) / 3
    print(f'suggest | --learning_rate={best:.1e}, a third of the rate at which the loss was lowest')
    save_picture('find_lr.png', {'': losses.items()}, '-', xscale='log', xlabel='learning rate', ylabel='training loss')

def bench_diagnose():
    """Takes one more training step from a checkpoint, and prints what it shows about each layer."""
    folder = sample.find_checkpoint(runs)
    train.config.read([f'{folder.parent}/config.py'])
    model = load_model(folder, attention='naive')
    optimizer = train.make_optimizer(model)
    train.restore(folder, optimizer, read_json(folder / 'training.json'))
    optimizer.muon_every = 1        # all matrices move, so that layers can be compared
    _, _, _, data, _ = train.open_data(None)
    T = model.config.block_size
    layers = diagnose(model, optimizer, data.batch(range(0, 4096, T), T), train.learning_rate)
    rows = [(f'{i}', *[f'{x:.2g}' for x in layer.values()]) for i, layer in enumerate(layers)]
    print_table([('layer', *layers[0]), *rows])

def diagnose(model, optimizer, batch, lr):
    """
    What a step on a batch shows about each layer: the rms of its output and of its (clipped) gradients; how far the
    step went, as a share of the weights; the share of dead units, which for every token stay below a hundredth of the
    rms of all units of the MLP; the entropy of its attention, which must be written out ('naive').
    """
    layers = model.model.layers
    weights = [parameters_to_vector(layer.parameters()).detach() for layer in layers]
    seen = {}
    hook = torch.nn.modules.module.register_module_forward_hook(partial(note_module, seen))
    # subtle: only written-out attention calls F.softmax, once in each layer, from the first to the last
    with patch.object(F, 'softmax', wraps=F.softmax) as softmax:
        train.training_step(model, optimizer, UNSCALED, [batch], 1, lr)
    hook.remove()

    found = []
    for layer, before, call in zip(layers, weights, softmax.call_args_list, strict=True):
        _, output = seen[layer]
        units, _ = seen[layer.mlp.down_proj]
        dead = units.abs().amax((0, 1)) < 0.01 * rms(units)
        gradients = parameters_to_vector(w.grad for w in layer.parameters())
        update = parameters_to_vector(layer.parameters()).detach() - before
        found.append({'activations': rms(output), 'gradients': rms(gradients),
                      'update / weights': rms(update) / rms(before), 'dead units': dead.float().mean(),
                      'entropy': spread_of_attention(call.args[0])})
    return found

def rms(x):
    return x.square().mean().sqrt()

def note_module(seen, module, inputs, output):
    seen[module] = inputs[0].detach(), output.detach()

def spread_of_attention(scores):
    """The mean entropy of attention, as a share of the largest possible: 1 if it is spread evenly."""
    largest = torch.arange(1, scores.size(-1) + 1).log().mean()
    return torch.special.entr(scores.detach().softmax(-1)).sum(-1).mean() / largest

# -----------------------------------------------------------------------------
# experiments: every arm is a command of train.py, run with every seed

class Arm:
    """Runs of train.py with the same arguments and several seeds. Raises UserError."""
    def __init__(self, name, arguments=()):
        self.name, self.arguments = name, arguments
        self.logs = []          # the entries of each run
        self.knobs = Knobs(train.config)
        self.knobs.read(arguments)

    def run(self, seed):
        """Trains in a process of its own, or resumes the run in the folder, unless that has ended."""
        short = re.sub('[^A-Za-z0-9.]+', '_', self.name)
        folder = Path(train.out_dir or 'out', f'{short}-{seed}')
        if not train.points(train.read_log(folder), 'full_val_loss'):
            shared = [f'--{name}={x}' for name, x in train.config.items() if x != train.config.defaults[name]]
            command = [sys.executable, HERE / 'train.py', *shared, *self.arguments, f'--seed={seed}',
                       f'--out_dir={folder}', '--init_from=auto']
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode not in (0, 3):           # 3: diverged
                raise UserError(f'{folder}: train.py ended with status {done.returncode}: {done.stderr[-500:]}')
        self.logs.append(train.read_log(folder))

    def values(self, key):
        """All values of a key in the logs."""
        return [entry[key] for log in self.logs for entry in log if entry.get(key) is not None]

    def loss(self):
        """The mean of the final losses; inf if no run got there."""
        return mean(self.values('full_val_loss') or [math.inf])

    def spread(self):
        losses = self.values('full_val_loss')
        return stdev(losses) if len(losses) > 1 else 0.0

    def height(self):
        """Where a picture shows the loss: no higher than it began, so that a diverged arm fits in."""
        return min([self.loss(), *self.values('loss')[:1]])

def read_arms():
    """The arms that the knob `arms` describes. Raises UserError."""
    found = []
    for line in filter(str.strip, re.split('[\n;]', arms)):
        name, _, arguments = line.strip().partition(':')
        found.append(Arm(name, arguments.split()))
    if not found:
        raise UserError('there are no arms: give config/lab_ablations.py, or --arms="a: --n_embd=64; b: --n_embd=128"')
    return found

def bench_compare():
    """Runs every arm with every seed, in turns, so that a slow hour of the machine slows all arms. -> the arms"""
    found = read_arms()
    if picture not in ('rows', 'curves', *train.config):
        raise UserError(f'picture = {picture!r}: give rows, curves, or a knob of train.py')
    for i in range(seeds):
        for arm in found:
            arm.run(train.seed + i)
            print(f'{arm.name}, seed {i + 1} of {seeds} | loss {arm.loss():.4f}', flush=True)
    print_results(found)
    if picture == 'rows':
        save_rows(found)
    elif picture == 'curves':
        save_curves(found)
    else:
        save_knob(found)
    return found

def bench_scaling():
    """Does what bench_compare does, and prints the law that the losses follow."""
    print_law(bench_compare())

def bench_curves():
    """Shows several runs in one table and one picture."""
    found = [Arm(run) for run in runs.split(',')]
    for arm in found:
        arm.logs = [train.read_log(Path(arm.name))]
        if not arm.values('loss'):
            raise UserError(f'there is no run in {arm.name!r}: give folders of runs, as --runs=out/a,out/b')
    print_results(found)
    save_curves(found)

def print_results(found):
    """Prints how the runs ended. Runs that diverged, or have not ended yet, are not in the means."""
    rows = [('', 'validation loss', 'vs the first', 'bits per byte', 'steps', 'tokens/s', 'ended')]
    for arm in found:
        bpb = mean(arm.values('full_val_bpb') or [math.nan])
        speed = median(arm.values('tokens_per_second') or [math.nan])
        last = max(arm.values('step') or [0])
        ended = len(arm.values('full_val_loss'))
        rows.append((arm.name, f'{arm.loss():.4f} ± {arm.spread():.4f}', f'{arm.loss() - found[0].loss():+.4f}',
                     f'{bpb:.3f}', f'{last:,}', f'{speed:,.0f}', f'{ended} of {len(arm.logs)}'))
    print_table(rows)

def save_rows(found):
    """Draws a row for each arm, the best at the top: mean and spread."""
    ordered = sorted(found, key=Arm.loss, reverse=True)
    points = [(arm.height(), row, 0, arm.spread()) for row, arm in enumerate(ordered)]
    labels = [f'{arm.name}  {arm.loss():.3f}' for arm in ordered]
    save_picture('curves.png', {'': points}, 'o', xlabel='validation loss', yticks=range(len(found)),
                 yticklabels=labels)

def save_knob(found):
    """Draws the final loss against a knob. Arms with the same name up to its last comma share a line."""
    lines = {}
    for arm in sorted(found, key=lambda arm: arm.knobs[picture]):
        label, _, _ = arm.name.rpartition(', ')
        point = arm.knobs[picture], arm.height(), arm.spread()
        lines.setdefault(label, []).append(point)
    save_picture('curves.png', lines, 'o-', xscale='log', xlabel=picture, ylabel='validation loss')

def save_curves(found):
    """Draws the training losses of the first seed of each arm."""
    lines = {arm.name: train.points(arm.logs[0], 'loss') for arm in found}
    top = 1.1 * found[0].values('loss')[0]
    save_picture('curves.png', lines, '-', xlabel='step', ylabel='training loss', ylim=(0, top))

def print_law(found):
    """Fits a law to the arms that ended with a loss. Raises UserError if they are too few."""
    points = []
    for arm in found:
        if arm.values('full_val_loss'):
            N = build(model_config(arm.knobs), 'meta').flops_per_token(0) / 6
            points.append((N, tokens_of(arm.knobs), arm.loss()))
    if len(points) < 6:
        raise UserError(f'{len(points)} arms ended with a loss, but a law of five numbers needs 6: give more --arms')
    error, E, A, alpha, B, beta = fit_law(*np.array(points).T)
    print(f'law     | loss = {E:.2f} + {A:.3g} / N^{alpha:.2f} + {B:.3g} / D^{beta:.2f}, off by {error:.1%} '
          f'(N weights of matmuls, D tokens; {len(points)} arms)')

def fit_law(N, D, loss):
    """
    loss = E + A / N^alpha + B / D^beta (arXiv:2203.15556, equation 2). All pairs of exponents are tried; E, A and B
    minimize the squares of the relative errors. -> the error, E, A, alpha, B, beta
    """
    laws = []
    for alpha, beta in product(np.arange(0.02, 1.5, 0.02), repeat=2):
        terms = np.stack([N ** 0, N ** -alpha, D ** -beta], 1) / loss[:, None]
        E, A, B = np.linalg.lstsq(terms, np.ones(len(loss)))[0]
        error = np.square(terms @ (E, A, B) - 1).mean() ** 0.5
        if min(E, A, B) >= 0:
            laws.append((error, E, A, alpha, B, beta))
    return min(laws)

def main():
    if train.RANK:
        sys.stdout = None           # the others print nothing
    command = globals().get(f'bench_{what}')
    if not command:
        raise UserError(f'there is no --what={what}: python bench.py --help lists what there is')
    command()

if __name__ == '__main__':
    launch(main)
