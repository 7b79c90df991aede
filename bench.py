"""
Measures speed and how close it is to the hardware's limits, computes what a model costs, and runs experiments.

    python bench.py                                # a training step of the default model
    python bench.py config/train_gpt2.py --batch_size=32 --micro_batch_size=32
    python bench.py --attention=naive --dtype=float32 --compile=False          # without three optimizations
    torchrun --nproc_per_node=4 bench.py           # a step of four processes (not on Windows)
    python bench.py --what=sample --samples=4      # tokens/s of generation, and its share of the memory bandwidth
    python bench.py --what=check                   # checks a training step here against float32 on the CPU
    python bench.py --what=plan --dataset=my_text.txt --max_minutes=30         # the best size for a text and a time
    python bench.py --what=resources config/train_gpt2.py        # parameters, FLOPs, memory and days of a run
    python bench.py --what=formats                 # range and precision of fp32, fp16, bf16 and fp8
    python bench.py --what=toy                     # optimizers except Muon on a toy problem, rates too low to too high
    python bench.py --what=tokenizer --dataset=my_text.txt       # our tokenizer, compared with tiktoken and others
    python bench.py --what=curves --runs=out/a,out/b             # several runs in one table and one picture
    python bench.py config/lab.py config/lab_ablations.py        # an experiment; see config/lab_*.py

bench.py takes the options of train.py, too. Speed is measured on random tokens, of a vocabulary of --vocab_size (for
a text that is prepared, give its own). MFU is the achieved FLOP/s divided by the GPU's dense bf16 peak (see
GPT.flops_per_token). The measured rate of a large matmul is a limit on every device.
"""
import math
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import mean, median, stdev
from typing import NamedTuple

import numpy as np
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.module_tracker import ModuleTracker

import prepare
import sample
import train
from configurator import Options, UserError, as_file, command, configure, launch
from model import (GPT, GPTConfig, Replayed, choose_compile, choose_device, choose_dtype, device_name, find_folder,
                   load_model, peak_flops, set_up)
from tokenizer import PATTERNS, Tokenizer

# -----------------------------------------------------------------------------
what = 'train'          # (train, sample, check, plan, resources, formats, toy, tokenizer, curves, compare or scaling)
                        # what to do: train times a training step, scaling fits a law to what compare runs
steps = 20              # (>= 1, < 1e9) optimizer steps to measure
warmup_steps = 5        # (>= 0, < 1e9) unmeasured steps before them
samples = 1             # (>= 1, < 1e6) sample: texts generated at once
new_tokens = 256        # (>= 2, < 1e8) sample: tokens per text
rounds = 3              # (>= 1, < 1e6) sample, tokenizer: number of measurements (the median is printed)
memory_gb = 80.0        # (> 0, < 1e9) resources: memory of a GPU in GB (10^9 bytes)
num_gpus = 1            # (>= 1, < 1e9) resources: number of GPUs
peak_tflops = 989.5     # (> 0, < 1e9) resources: dense peak of a GPU (an H100 in bf16, without sparsity)
mfu = 0.4               # (> 0, <= 1) resources: the share of the peak that training reaches
tokens = 0.0            # (>= 0, < 1e30) resources: tokens to train on, such as 15e12 (0: those of the run)
runs = ''               # curves: run folders, separated by commas
variants = ''           # compare: the variants, 'name: train.py arguments', one per line or separated by semicolons
seeds = 3               # (>= 1, < 1e6) compare: runs per variant, with its --seed and the seeds after it
question = ''           # compare, curves: title of the picture
picture = 'rows'        # compare: rows (one per variant), curves (loss by step), or an option to plot the loss against
# -----------------------------------------------------------------------------
if __name__ == '__main__' and train.RANK:
    sys.stdout = None           # Only the first process prints
config = configure(globals(), train, prepare, GPTConfig)        # train.config holds those of train.py, too

# -----------------------------------------------------------------------------
# Helpers. `c` is always a GPTConfig; `device` and `dtype` are names, such as 'cuda:0' and 'bfloat16'

def machine(flops=math.inf, texts=0):
    """Prints and returns the device, the dtype, and whether to compile. flops: of the run; texts: generated at once."""
    train.check_options()
    device = choose_device(train.device, train.LOCAL_RANK)
    set_up(device)
    compiled = choose_compile(train.compile, device, flops)
    dtype = choose_dtype(train.dtype, device, texts, compiled)
    print(f'machine | {device} ({device_name(device)}), {dtype}, compile {compiled}')
    return device, dtype, compiled

def model_config(**others):
    """Returns the GPTConfig of the options, without reading the data. others: fields to override."""
    sizes = dict(gpt2=50304, byte=257, char=100)        # ignore --vocab_size; char depends on the text
    return train.model_config(vocab_size=sizes.get(train.tokenizer, train.vocab_size), **others)

def build(c, device, dtype='float32', new=True):
    """Returns a model with new weights, or zeros. On the device 'meta' it has only shapes and takes no memory."""
    torch.manual_seed(train.seed)
    with torch.device(device):
        model = GPT(c, new)
    model.compute_dtype = getattr(torch, dtype)
    return model

def random_batch(c, B, device):
    """Returns random tokens and random targets, (2, B, T)."""
    return torch.randint(c.vocab_size, (2, B, c.block_size)).to(device)

def laps(function, device, n):
    """Returns the seconds that each of n calls takes, including all work that it starts on the device."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    times = [time.perf_counter()]
    for _ in range(n):
        function()
        synchronize()
        times.append(time.perf_counter())
    return np.diff(times)

def print_row(name, *cells):
    print(f'| {name:30} |', *[f'{cell:>11} |' for cell in cells])

# -----------------------------------------------------------------------------
# Speed of training and generation

def build_to_train(c, device, dtype, compiled):
    """Returns a new model and its optimizer, as train.py would use them."""
    model = build(c, device, dtype)
    optimizer = train.Optimizer(model)
    if compiled:
        model = train.compile_both(model, optimizer)
    return model, optimizer

def make_step(c, device, dtype, compiled):
    """Returns a function that runs a training step of a new model on random tokens."""
    model, optimizer = build_to_train(c, device, dtype, compiled)
    micro = train.micro_batch_sizes(c.block_size, device)[0]
    grad_accum = train.batch_size // train.WORLD_SIZE // micro
    return partial(train.training_step, model, optimizer, train.make_scaler(device, dtype),
                   batches=[random_batch(c, micro, device)] * grad_accum, sequences=train.batch_size,
                   lr=train.learning_rate, run_backward=Replayed(train.backward))

def bench_train():
    """Prints a step's time, tokens/s, memory and share of the peak, and how long the run of these options takes."""
    c = model_config()
    model = build(c, 'meta')
    flops = model.flops_per_token()
    total = run_tokens()
    device, dtype, compiled = machine(total * flops)
    train.connect(device)
    print(f'model   | {model.num_params():,} parameters, {c.vocab_size:,} ids, {flops:.3g} FLOPs per token')
    step = make_step(c, device, dtype, compiled)
    seconds = median(laps(step, device, warmup_steps + steps)[warmup_steps:])
    rate = train.batch_size * c.block_size / seconds
    print(f'step    | {1e3 * seconds:.1f} ms (median of {steps}), {rate:,.0f} tokens/s')
    print(f'run     | {total:,} tokens take about {timedelta(seconds=round(total / rate))}')
    if 'cuda' in device:
        print(f'memory  | {torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB at most')
    achieved = flops * rate / train.WORLD_SIZE
    limit, peak = matmul_flops(device, dtype), peak_flops(device)
    print(f'compute | {achieved / 1e12:.3g} TFLOP/s, {achieved / limit:.1%} of a large matmul ({limit / 1e12:.3g})')
    if peak:
        print(f'MFU     | {achieved / peak:.1%} of the published dense bf16 peak ({peak / 1e12:.3g} TFLOP/s)')

def matmul_flops(device, dtype):
    """Returns the FLOP/s of a large square matmul."""
    n = 4096
    x = torch.randn(n, n, device=device, dtype=getattr(torch, dtype))
    return 2 * n ** 3 / min(laps(lambda: x @ x, device, 5))

def bench_sample():
    """Prints tokens/s in the second half of texts, and the share of the memory bandwidth spent on reading weights."""
    device, dtype, compiled = machine(texts=samples)
    model = build(model_config(), device)
    sample.prepare_model(model, device, dtype, compiled, samples)
    half, seconds = new_tokens // 2, []
    for _ in range(1 + rounds):         # the first compiles and is not counted
        ids = sample.generate(model, [[0]] * samples, new_tokens)
        list(islice(ids, new_tokens - half))        # reads the prompt, and records a CUDA graph
        seconds.extend(laps(partial(list, ids), device, 1))
    rate = half / median(seconds[1:])
    print(f'sample  | {samples} x {half} tokens: {samples * rate:,.1f} tokens/s, {1e3 / rate:.2f} ms per step')
    weights = model.matmul_weights() * getattr(torch, dtype).itemsize
    x = torch.ones(100_000_000, device=device)
    limit = x.nbytes / min(laps(x.sum, device, 10))
    print(f'memory  | {weights / 1e6:.0f} MB of weights read at {weights * rate / limit:.0%} of {limit / 1e9:.1f} GB/s')

# -----------------------------------------------------------------------------
# Check: compare a step on this device with naive attention in float32 on the CPU

def bench_check():
    """Raises UserError unless the loss, gradient and weight update of a step are right on this device."""
    device, dtype, compiled = machine()
    # Subtle: AdamW's first step is sign(gradient), arbitrary for tiny gradients. A large eps avoids this
    config.read(['--n_layer=2', '--block_size=64', '--dropout=0', '--optimizer=adamw', '--adam_eps=1e-3'])
    expected = check_step(model_config(attention='naive'), 'cpu', 'float32', False)
    found = check_step(model_config(), device, dtype, compiled)
    errors = torch.stack([(a.cpu() - b).norm() / b.norm() for a, b in zip(found, expected)])
    allowed = 5e-2
    if dtype == 'float32':
        allowed = 5e-3 if 'cuda' in device else 1e-4        # TF32 on a GPU
    print(f'check   | errors of loss {errors[0]:.0e}, gradient {errors[1]:.0e}, update {errors[2]:.0e}; allowed: '
          f'{allowed:g}')
    if not errors.max() < allowed:
        raise UserError('this device gives wrong results; train with --device=cpu, and please report this')
    print('check   | pass')

def check_step(c, device, dtype, compiled):
    """Returns the loss, clipped gradient and update of a step whose weights are the same on every device."""
    model, optimizer = build_to_train(c, device, dtype, compiled)
    torch.manual_seed(train.seed)
    # A new model's weights differ between GPU and CPU, and the last matrices of its blocks are zero
    before = 0.2 * torch.randn(len(optimizer.p)).to(device)
    optimizer.p.copy_(before)
    unscaled = train.make_scaler(device, 'float32')
    numbers = train.training_step(model, optimizer, unscaled, [random_batch(c, 4, device)], 4, 0.1)
    return numbers['loss'], optimizer.g, optimizer.p - before

# -----------------------------------------------------------------------------
# Number formats, and the optimizers on a toy problem

def bench_formats():
    """Prints the range and precision of number formats."""
    print_row('', 'exponent', 'fraction', 'largest', 'smallest', 'gap above 1')
    for dtype in torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2:
        info = torch.finfo(dtype)
        fraction = round(-math.log2(info.eps))
        print_row(info.dtype, f'{info.bits - 1 - fraction} bits', f'{fraction} bits', f'{info.max:.5g}',
                  f'{info.tiny * info.eps:.2g}', f'{info.eps:.2g}')

def bench_toy():
    """Prints the mean square of 100 numbers after 10 minimizing steps, at rates from too low to too high."""
    rates = 1e-1, 1e0, 1e1, 1e2, 1e3
    print_row('rate', *rates)
    for name, rule in train.RULES.items():
        print_row(name, *[f'{toy_loss(rule, rate):.2g}' for rate in rates])

def toy_loss(rule, rate):
    """Returns the mean square of 100 numbers p after 10 steps down its gradient, 2 p / 100."""
    p = torch.linspace(-10, 10, 100)
    moments = [torch.zeros(100) for _ in train.moments_of(rule)]
    for t in range(1, 11):
        rule(p, 2 * p / 100, rate / t ** 0.5, 0.0, *moments, beta1=0.9, beta2=0.999, eps=1e-8, correction1=1 - 0.9 ** t,
             correction2=1 - 0.999 ** t)
    return p.square().mean()

# -----------------------------------------------------------------------------
# Costs of a model, by arithmetic

# A weight, or what a layer keeps, counts for the first of these words that occurs in its name.
PARTS = 'bias', 'norm', 'lm_head', 'embed_tokens', 'embed_positions', 'embed_values', 'self_attn', 'mlp'

def part_of(name):
    return next((part for part in PARTS if part in name), 'others')

def parameters(c):
    """Returns parameter counts by part. A tied head has none of its own."""
    found = Counter()
    for name, p in build(c, 'meta').named_parameters():
        found[part_of(name)] += p.numel()
    return found

def forward_flops(c):
    """Returns the matmul FLOPs of a forward pass over a sequence, by part; a backward pass takes twice as many."""
    size, T = parameters(c), c.block_size
    return Counter({'projections of attention': 2 * T * size['self_attn'],
                    'scores and values': 4 * T * T * c.n_head * c.head_dim * c.n_layer,
                    'mlp': 2 * T * size['mlp'],
                    'lm_head': 2 * T * c.n_embd * c.vocab_size})

def memory(c, B, device, dtype):
    """
    Returns the bytes at the peak of a step of B sequences on this device, by part, not compiled: the optimizer's, and
    what the layers keep for the backward pass. They are measured with fake tensors, which have a size but no memory.
    """
    with FakeTensorMode():
        model = build(c, device, dtype, new=False)
        optimizer = train.Optimizer(model)
        found = Counter(weights=optimizer.p.nbytes, gradients=optimizer.g.nbytes,
                        moments=sum(x.nbytes for x in optimizer.tensors.values()))
        counted = {optimizer.p.untyped_storage()}
        layers = ModuleTracker()

        def keep(x):
            storage = x.untyped_storage()
            if storage not in counted:
                counted.add(storage)
                found[f'kept by {part_of(max(layers.parents, key=len))}'] += storage.nbytes()
            return x

        with layers, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model(*random_batch(c, B, device))
    found['gradients of logits'] = 2 * 4 * B * c.block_size * c.vocab_size      # of the loss's output and input
    return found

def bench_resources():
    """Prints what the configured model costs, by part, and the batch size and time that follow."""
    device, dtype, _ = machine()
    c = model_config()
    B = train.micro_batch_sizes(c.block_size, device)[0]
    print_parts('parameters', parameters(c))
    print_parts('FLOPs of a forward pass, per sequence', forward_flops(c))
    print_parts(f'bytes in a step, {dtype}, {B} x {c.block_size} tokens', memory(c, B, device, dtype))
    one, two = [memory(c, n, device, dtype).total() for n in (1, 2)]
    fits = max((1e9 * memory_gb - one) // (two - one) + 1, 0)
    print(f'\nlargest batch | {memory_gb:g} GB hold {fits:,.0f} sequences')
    D = tokens or run_tokens()
    spent = build(c, 'meta').flops_per_token() * D
    days = spent / (num_gpus * 1e12 * peak_tflops * mfu) / 86400
    print(f'time          | {days:,.4g} days for {D:,.0f} tokens, {spent:.3g} FLOPs, with {num_gpus} x {peak_tflops:g} '
          f'TFLOP/s at {mfu:.0%}')

def run_tokens():
    return train.max_iters * train.batch_size * config['block_size']

def print_parts(title, counts):
    """Prints counts by part, with their shares and total."""
    print(f'\n{title}')
    for part, count in counts.items():
        print_row(part, f'{count:19,}', f'{count / counts.total():.1%}')
    print_row('total', f'{counts.total():19,}')

# -----------------------------------------------------------------------------
# A plan: which size, batch and length of a run suit a text, a machine and a time. A larger model learns more from each
# token, but sees fewer of them in the same time. The runs behind the numbers here are in config/lab_plan.py.

WIDTHS = 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048

class Size(NamedTuple):
    """A model, and the run that suits it."""
    loss: float             # expected, in a unit that depends on the text
    limit: str              # what ends the run, and what would help
    steps: int
    tokens: int
    arguments: list         # of train.py
    cells: list             # of the table

def choose_size(width, text, seconds, device, dtype, dropout=0.0):
    """Returns the Size of a width, whose run takes these seconds, or less if more passes over the text would hurt."""
    shape = [f'--n_layer={width // 64 + 1}', f'--n_head={width // (32 if width < 512 else 64)}', f'--n_embd={width}',
             f'--dropout={dropout}']
    config.read(shape)
    c = train.model_config(vocab_size=text.vocab_size)
    model = build(c, 'meta')
    N = model.matmul_weights()
    # A large model soon knows a text by heart.
    most = min(3.5 * (len(text) / N) ** (1 / 3), 3) * len(text)         # tokens
    batch_size = max(train.micro_batch_size, 1)
    while True:
        batch = batch_size * c.block_size
        in_time = seconds / time_step(c, batch_size, device, dtype, False)      # steps
        # A batch has about as many tokens as the run has steps. If time limits the run, larger ones are faster.
        if 2 * in_time <= batch or most / batch <= 2 * min(batch, in_time):
            break
        batch_size *= 2
    if dropout:
        most *= 4           # but passes are worth two thirds
    # Compiling takes half a minute, which does not count. It changes nothing if the text limits the run.
    compiled = choose_compile(train.compile, device, math.inf if seconds > 60 else 0)
    if compiled and in_time * batch < most:
        in_time = seconds / time_step(c, batch_size, device, dtype, True)
    D = min(in_time * batch, most)
    limit = 'time: more time would help, with a larger model'
    if D == most:
        limit = 'text: more text would help; more passes over this one would end higher'
    worth = min(D, (D * len(text)) ** 0.5) * (0.65 if dropout else 1)       # in tokens of a text that is never repeated
    loss = (0.045 / N ** 0.85 + 1 / worth) ** 0.115
    steps = math.ceil(D / batch)
    max_iters = math.ceil(min(1.5 * in_time, most / batch))         # in case this machine was busy
    arguments = [*shape, f'--batch_size={batch_size}', f'--max_iters={max_iters}',
                 f'--eval_interval={math.ceil(steps / max(seconds / 600, 4))}', f'--compile={compiled}']
    cells = [f'{c.n_layer} x {width}', f'{model.num_params():,}', dropout, f'{batch_size:,}',
             f'{1e3 * seconds / in_time:.1f}', f'{steps:,}', f'{D / len(text):.1f}']
    size = Size(loss, limit, steps, D, arguments, cells)
    if D == most and not dropout:
        return min(size, choose_size(width, text, seconds, device, dtype, 0.2))
    return size

def time_step(c, batch_size, device, dtype, compiled):
    """Returns the median of the seconds that a training step takes."""
    config.read([f'--batch_size={batch_size}'])
    torch.compiler.reset()          # otherwise it would compile once for all sizes, which is slower
    return median(laps(make_step(c, device, dtype, compiled), device, 10)[3:])

def bench_plan():
    """Prints what models of growing width should reach in --max_minutes, and a command for the lowest loss."""
    if not train.max_minutes:
        raise UserError('a plan needs a time; add --max_minutes=30')
    fixed = 'vocab_size' in config.source or train.tokenizer != 'bpe' or prepare.is_prepared(train.dataset)
    while True:
        text = train.open_data(None)[2]
        if fixed or train.vocab_size <= 512 or len(text) >= 200 * train.vocab_size:
            break
        config.read([f'--vocab_size={train.vocab_size // 2}'])          # Tokens would be too rare
    given = [argument for name, argument in config.source.items() if name in train.config]
    device, dtype, _ = machine()

    # How hard is this text? The smallest model finds out in a quarter of a minute, or more if this machine is busy.
    config.read(['--out_dir=out/plan', '--sample_tokens=0'])
    size = choose_size(WIDTHS[0], text, 15, device, dtype)
    proxy = Variant('proxy', ' '.join([*size.arguments, f'--max_iters={size.steps}', '--max_minutes=0']))
    proxy.run()
    bits = mean(proxy.values('full_val_bpb')) / size.loss

    print_row('layers x width', 'parameters', 'dropout', 'batch', 'ms', 'steps', 'passes', 'bits/byte')
    sizes = []
    for width in WIDTHS:
        try:
            size = choose_size(width, text, 60 * train.max_minutes, device, dtype)
        except torch.OutOfMemoryError:
            limit = 'memory: a larger model does not fit'
            break
        print_row(*size.cells, f'{bits * size.loss:.3f}')
        sizes.append(size)
        best = min(sizes)
        limit = best.limit
        if best not in sizes[-2:]:
            break
    print(f'limit   | {limit}')
    if best.tokens > 2e7:
        print('unsure  | the runs behind this plan had at most 17,000,000 tokens; try half and twice the size, too')
    print('command |', command('train.py', *dict.fromkeys(given), *best.arguments))

# -----------------------------------------------------------------------------
# Tokenizers, compared with installed packages

def bench_tokenizer():
    """Times training, encoding and decoding on the same documents. All encode with our vocabulary and pattern."""
    import tiktoken
    pattern = PATTERNS['gpt2']
    files = prepare.find_splits(train.dataset)['train']
    parts = prepare.read_texts(files, prepare.separator_of(train.dataset), 'reading')
    documents = [*prepare.whole_documents(parts)]
    batches = [*prepare.join_parts(('train', document) for document in documents)]
    docs = [document[:-1].decode() for document in documents]
    text = '\n\n'.join(docs)
    n = 32_000          # size of the vocabulary
    train_ours = partial(prepare.make_tokenizer, 'bpe', n, batches)
    contest(f'train {n:,}', text,
            ours=train_ours,
            tokenizers=lambda: import_module('tokenizers').ByteLevelBPETokenizer().train_from_iterator(
                docs, n, show_progress=False),
            rustbpe=lambda: import_module('rustbpe').Tokenizer().train_from_iterator(iter(docs), n, pattern=pattern),
            gigabpe=lambda: import_module('gigabpe').train_bpe(         # reads the files itself, so they must be text
                [*map(str, files)], n, pretokenizer='bytelevel'))
    tok = train_ours()
    tik = tiktoken.Encoding('', pat_str=pattern, mergeable_ranks=tok.id_of, special_tokens={})
    ids = tok.encode_to_numpy(text)
    contest('encode', text,
            ours=lambda: Tokenizer(tok.vocab, tok.merges).encode_to_numpy(text),        # makes a Tokenizer, too
            ours_again=lambda: tok.encode_to_numpy(text),       # knows all pieces now
            tiktoken=lambda: tik.encode_to_numpy(text))
    with tempfile.TemporaryDirectory() as folder:
        tok.save(f'{folder}/tokenizer.json')
        contest('encode to lists', text,
                ours=lambda: list(map(tok.encode_ordinary, docs)),
                tiktoken=lambda: list(map(tik.encode_ordinary, docs)),
                riptoken=lambda: list(map(import_module('riptoken').CoreBPE(tok.id_of, {}, pattern).encode_ordinary,
                                          docs)),
                splintr=lambda: list(map(import_module('splintr').from_json(f'{folder}/tokenizer.json').encode, docs)))
    contest('decode', text,
            ours=lambda: tok.decode_bytes(ids), tiktoken=lambda: tik.decode_bytes(ids.tolist()))

def contest(title, text, **contestants):
    """Times the functions of installed packages, interleaved, and prints the medians."""
    found = defaultdict(list)           # {name: seconds}
    for _ in range(rounds):
        for name, function in contestants.items():
            if 'ours' in name or find_spec(name):
                found[name].extend(laps(function, 'cpu', 1))
    size = len(text.encode()) / 1e6
    for name, seconds in found.items():
        print_row(f'{title}: {name}', f'{median(seconds):.2f} s', f'{size / median(seconds):.1f} MB/s',
                  f'{median(seconds) / median(found["ours"]):.2f} x our time')

# -----------------------------------------------------------------------------
# Experiments: every variant is a train.py command, run with every seed

class Variant:
    """Holds runs of train.py with the same arguments and several seeds. Raises UserError."""
    def __init__(self, name, arguments=''):
        self.name, self.arguments = name.strip(), arguments.split()
        self.logs = []          # log entries of each run
        self.options = Options(dict(train.config))
        self.options.read(self.arguments)

    def run(self, i=0):
        """Starts or resumes the run of seed number i in a separate process, unless it has ended."""
        short = re.sub('[^A-Za-z0-9.]+', '_', self.name)
        # Other options, texts or config files make other runs. A config file may change more than options.
        parts = [as_file(self.options), *[prepare.identify(self.options[name]) for name in ('dataset', 'val_dataset')]]
        parts += [Path(argument).read_bytes() for argument in self.arguments if not argument.startswith('-')]
        mark = prepare.short_hash(repr(parts))[:6]
        seed = self.options['seed'] + i
        self.folder = folder = Path(f'{self.options["out_dir"] or "out"}/{short}-{mark}-{seed}')
        if not train.points(train.read_log(folder), 'full_val_loss'):
            changed = [f'--{name}={value}' for name, value in train.config.items() if name in config.source]
            line = [sys.executable, train.__file__, *changed, *self.arguments, f'--seed={seed}', f'--out_dir={folder}',
                    f'--init_from=auto:{self.options["init_from"]}']
            done = subprocess.run(line, capture_output=True, errors='replace')          # text in any encoding
            if done.returncode not in (0, 3):           # 3: diverged
                raise UserError(f'{folder}: train.py ended with status {done.returncode}: {done.stderr[-500:]}')
        self.logs.append(train.read_log(folder))

    def values(self, key):
        """Returns all values of a key in the logs, or [inf] if there are none."""
        found = [entry[key] for log in self.logs for entry in log if entry.get(key) is not None]
        return found or [math.inf]

    def loss(self):
        """Returns the mean of the final losses."""
        return mean(self.values('full_val_loss'))

    def spread(self):
        losses = self.values('full_val_loss')
        return stdev(losses) if len(losses) > 1 else 0.0

def read_variants():
    """Returns the variants in --variants. Raises UserError."""
    lines = [line for line in re.split('[\n;]', variants) if line.strip()]
    if not lines or not all(':' in line for line in lines):
        raise UserError('no variants to compare, or one without a name; add config/lab_ablations.py, or '
                        '--variants="a: --n_embd=64; b: --n_embd=128"')
    if picture not in ('rows', 'curves') and type(train.config.get(picture)) not in (int, float):
        raise UserError(f'picture = {picture!r} must be rows, curves or an option of train.py that is a number')
    return [Variant(*line.split(':', 1)) for line in lines]

def bench_compare():
    """Runs every variant with every seed, interleaved, so that a slow hour slows all alike. Returns the variants."""
    found = read_variants()
    for i in range(seeds):
        for variant in found:
            variant.run(i)
            print(f'{variant.name}, seed {i + 1} of {seeds} | mean loss {variant.loss():.4f}')
    print_results(found)
    save_picture(found, picture)
    return found

def bench_scaling():
    """Runs bench_compare, then prints the scaling law that fits the losses."""
    print_law(bench_compare())

def bench_curves():
    """Shows several runs in one table and one picture."""
    found = [Variant(run) for run in runs.split(',')]
    for variant in found:
        variant.logs = [train.read_log(Path(variant.name))]
        if not variant.logs[0]:
            raise UserError(f'no run found in {variant.name!r}; use run folders, such as --runs=out/a,out/b')
    print_results(found)
    save_picture(found, 'curves')

def print_results(found):
    """Prints the results. The means leave out runs that diverged or have not ended yet."""
    print_row('', 'validation loss', 'vs first', 'bits/byte', 'steps', 'tokens/s', 'ended')
    for v in found:
        ended = sum(map(math.isfinite, v.values('full_val_loss')))
        spread = f' ± {v.spread():.4f}' if v.spread() else ''
        print_row(v.name, f'{v.loss():.4f}{spread}', f'{v.loss() - found[0].loss():+.4f}',
                  f'{mean(v.values("full_val_bpb")):.3f}', f'{max(v.values("step")):,}',
                  f'{median(v.values("tokens_per_second")):,.0f}', f'{ended} of {len(v.logs)}')

def save_picture(found, kind):
    """
    Draws a row per variant, best on top; or each one's training losses for its first seed; or its final loss against
    an option, where variants whose names are equal up to the last comma share a line. The bars are standard deviations.
    """
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 5), layout='constrained')
    figure.suptitle(question)
    axis = figure.subplots()
    # A variant that diverged is drawn as high as the others begin or end.
    top = max(loss for v in found for loss in (v.values('loss')[0], v.loss()) if loss < math.inf)
    lines = defaultdict(list)           # {label: points}
    if kind == 'rows':
        axis.set(xlabel='validation loss')
        for v in sorted(found, key=Variant.loss, reverse=True):
            axis.errorbar(min(v.loss(), top), f'{v.name}  {v.loss():.3f}', xerr=v.spread(), fmt='oC0')
    elif kind == 'curves':
        axis.set(xlabel='step', ylabel='training loss', ylim=(0, 1.1 * top))
        for variant in found:
            lines[variant.name] = train.points(variant.logs[0], 'loss') or [(1, top)]       # diverged at once
    else:
        axis.set(xlabel=kind, ylabel='validation loss', xscale='log')
        for variant in found:
            label = variant.name.rpartition(', ')[0]
            lines[label].append((variant.options[kind], min(variant.loss(), top), variant.spread()))
    for name, points in lines.items():
        axis.errorbar(*zip(*sorted(points)), fmt='-' if kind == 'curves' else 'o-', label=name)
    if len(lines) > 1:
        axis.legend()
    path = Path(train.out_dir or 'out', 'curves.png')
    path.parent.mkdir(parents=True, exist_ok=True)
    train.save_figure(figure, path)
    print(f'picture | {path}')

def print_law(found):
    """
    Fits loss = (A / N^alpha + B / D)^beta (arXiv:2001.08361, equation 1.5) to the variants that ended with a loss.
    Tries all pairs of exponents; A and B minimize the squared relative errors of loss^(1 / beta). Raises UserError with
    < 6 variants.
    """
    rows = [(load_model(find_folder(v.folder)).matmul_weights(), v.values('tokens')[-1], v.loss())
            for v in found if v.loss() < math.inf]
    if len(rows) < 6:
        raise UserError(f'the fit needs 6 variants that ended with a loss, not {len(rows)}; add more to --variants')
    N, D, losses = np.array(rows).T
    laws = []
    for alpha in np.arange(0.1, 2, 0.01):
        for beta in np.arange(0.02, 0.5, 0.002):
            terms = np.stack([N ** -alpha, 1 / D]) / losses ** (1 / beta)
            factors = np.linalg.lstsq(terms.T, N ** 0)[0]
            if factors.min() > 0:
                error = np.square((factors @ terms) ** beta - 1).mean() ** 0.5
                laws.append((error, alpha, beta, *factors))
    error, alpha, beta, A, B = min(laws)
    print(f'law     | loss = ({A:.3g} / N^{alpha:.2f} + {B:.3g} / D)^{beta:.3f}, off by {error:.1%} (N matmul weights, '
          f'D tokens; {len(rows)} variants)')

def main():
    if train.WORLD_SIZE > 1 and what != 'train':
        raise UserError(f'several processes can only time a training step; use python bench.py --what={what}')
    globals()[f'bench_{what}']()

if __name__ == '__main__':
    launch(main)
