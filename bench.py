"""
How fast things are here and how close to the limit, what a model costs, and experiments with many runs.

    python bench.py                                # a training step of the default model
    python bench.py config/train_gpt2.py --batch_size=32 --micro_batch_size=32
    torchrun --nproc_per_node=4 bench.py
    python bench.py --what=sample --samples=4      # tokens/s of generation, and the share of the memory's bandwidth
    python bench.py --what=ladder                  # from the plain form to the fast one, a row for each step
    python bench.py --what=check                   # does this device compute what it should?
    python bench.py --what=resources config/train_gpt2.py        # parameters, FLOPs, memory, days: what it will cost
    python bench.py --what=formats                 # what fp32, fp16, bf16 and fp8 hold, and what becomes of gradients
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
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib import util
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev

import numpy as np
import tiktoken
import torch
import torch.distributed as dist

import model as architecture
import prepare
import sample
import tokenizer as bpe
import train
from configurator import Knobs, UserError, configure, launch, read_arguments, read_json
from model import GPT, GPT2, GPTConfig, choose_compile, choose_device, choose_dtype, synchronize

# -----------------------------------------------------------------------------
what = 'train'          # a training step, or: sample, ladder, check, resources, formats, toy, tokenizer, find_lr,
                        # diagnose, curves (of runs), compare (arms with seeds, see config/lab_*.py), scaling (a law too)
steps = 20              # measured optimizer steps
warmup_steps = 5        # steps before them
profile = False         # also say where the time of a step goes
samples = 1             # texts that are generated at once
new_tokens = 200        # of each text
rounds = 3              # of samples and tokenizers, in turns; the median counts
memory_gb = 80.0        # resources: memory of a card, in GB of 10^9 bytes
num_gpus = 1            # resources: cards
peak_tflops = 989.5     # resources: of a card, dense (an H100 in bfloat16; its data sheet's 1,979 are for sparse matrices)
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
# what the commands share; c is a GPTConfig

def machine(flops=math.inf):
    """-> device, dtype, and whether to compile for so many FLOPs"""
    train.check_knobs()
    place = choose_device(train.device, train.LOCAL_RANK)
    type_ = choose_dtype(train.dtype, place)
    compiled = choose_compile(train.compile, place, flops)
    architecture.set_up(place)
    print(f'device  | {place} ({architecture.device_name(place)})')
    print(f'dtype   | {type_}; compile {compiled}')
    return place, type_, compiled

VOCABULARIES = dict(gpt2=50257, byte=257, char=100)     # char: about that

def model_config(knobs=config):
    """The GPTConfig that knobs describe, with the vocabulary that their tokenizer has."""
    fields = {name: knobs[name] for name in GPTConfig.__dataclass_fields__}
    fields['vocab_size'] = VOCABULARIES.get(knobs['tokenizer'], knobs['vocab_size'])
    return GPTConfig(**fields)

def build(c, place, type_='float32'):
    torch.manual_seed(train.seed)
    model = GPT(c).to(place)
    model.compute_dtype = getattr(torch, type_)
    return model

def skeleton(c):
    """A model of names and shapes alone."""
    with torch.device('meta'):
        return GPT(c)

def random_batch(c, B, place):
    x = torch.randint(c.vocab_size, (B, c.block_size + 1)).to(place)
    return x[:, :-1], x[:, 1:]

def make_optimizer(model):
    """That of train.py."""
    betas = train.beta1, train.beta2
    return train.Optimizer(model, train.optimizer, betas, train.adam_eps, train.weight_decay)

def open_data():
    """-> the tokens that train.py trains on, and the size of their vocabulary"""
    folder = prepare.find_or_prepare(train.dataset, train.tokenizer, train.vocab_size)
    meta, data, _ = train.open_data(folder)
    return data, meta['vocab_size']

def flat(tensors):
    return torch.cat([x.detach().flatten() for x in tensors])

def seconds_of(function, place='cpu'):
    """Seconds until a device has done all that a function asks of it."""
    synchronize(place)
    began = time.perf_counter()
    function()
    synchronize(place)
    return time.perf_counter() - began

def measure(function, place):
    """Median of the seconds that a function takes, `steps` times after a warm-up."""
    seconds = [seconds_of(function, place) for _ in range(warmup_steps + steps)]
    return median(seconds[warmup_steps:])

def save_picture(name, title, draw, *args, columns=1):
    """draw(axes, *args), as a file in out_dir."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 5), layout='constrained')
    draw(figure.subplots(1, columns), *args)
    figure.suptitle(title)
    folder = train.out_dir or 'out'
    os.makedirs(folder, exist_ok=True)
    figure.savefig(f'{folder}/{name}', dpi=120)
    print(f'picture | {folder}/{name}')

# -----------------------------------------------------------------------------
# speed: a training step, the way to it from the plain form, generation

class PlainAdamW(torch.optim.AdamW):
    """torch's AdamW and clipping, tensor by tensor, with the interface of train.Optimizer."""
    def __init__(self, model, **others):
        super().__init__(model.parameters(), foreach=False, **others)

    def clip(self, max_norm):
        return torch.nn.utils.clip_grad_norm_(self.param_groups[0]['params'], max_norm, foreach=False)

    def step(self, lr):
        self.param_groups[0]['lr'] = lr
        super().step()

    def compile(self):
        pass

def make_step(c, place, type_, compiled, make_optimizer):
    """-> a function that does a step of train.py with a new model, and the optimizer"""
    model = build(c, place, type_)
    optimizer = make_optimizer(model)
    if compiled:
        model = torch.compile(model, dynamic=False)
        optimizer.compile()
    batch = random_batch(c, train.divide_batch(c.block_size, place), place)
    return partial(training_step, model, optimizer, batch), optimizer

def training_step(model, optimizer, batch, talk=True):
    """On the same micro-batch every time. talk: with the other processes."""
    grad_accum = train.batch_size // train.WORLD_SIZE // len(batch[0])
    optimizer.zero_grad(set_to_none=False)
    for _ in range(grad_accum):
        loss = model(*batch) / (grad_accum * train.WORLD_SIZE)
        loss.backward()
    if talk and train.WORLD_SIZE > 1:
        dist.all_reduce(optimizer.g)
    optimizer.clip(train.grad_clip)
    optimizer.step(train.learning_rate)

def matmul_flops(place, type_):
    """The rate of a large square matmul on this device, in FLOP/s."""
    n = 8192 if 'cuda' in place else 2048
    x = torch.randn(n, n, device=place, dtype=getattr(torch, type_))
    return 2 * n ** 3 / min(seconds_of(lambda: x @ x, place) for _ in range(5))

def bench_train():
    """Milliseconds, tokens/s, share of the peak and memory of a step; what several processes lose to each other."""
    c = model_config()
    per_step, flops = train.batch_size * c.block_size, skeleton(c).flops_per_token()
    place, type_, compiled = machine(train.max_iters * per_step * flops)
    if train.WORLD_SIZE > 1:
        dist.init_process_group('nccl' if 'cuda' in place else 'gloo')
    step, optimizer = make_step(c, place, type_, compiled, make_optimizer)
    print(f'model   | {skeleton(c).num_params():,} parameters, {flops:.3g} FLOPs per token')

    seconds, published = measure(step, place), architecture.peak_flops(place)
    peak = published or matmul_flops(place, type_)
    achieved = flops * per_step / seconds / train.WORLD_SIZE
    of_what = 'MFU, of the published dense bf16 peak' if published else 'of the rate of a large matmul'
    print(f'step    | {1e3 * seconds:.1f} ms (median of {steps}), {per_step / seconds:,.0f} tokens/s')
    print(f'compute | {achieved / 1e12:.3g} TFLOP/s, {achieved / peak:.1%} {of_what} ({peak / 1e12:.3g} TFLOP/s)')
    if 'cuda' in place:
        print(f'memory  | {torch.cuda.max_memory_allocated(place) / 1e9:.2f} GB at most')
    if train.WORLD_SIZE > 1:
        alone = measure(partial(step, talk=False), place)
        talk = measure(partial(dist.all_reduce, optimizer.g), place)
        print(f'scaling | {alone / seconds:.1%} of {train.WORLD_SIZE} processes that do not talk; '
              f'all-reduce of {optimizer.g.nbytes / 1e6:.1f} MB: {1e3 * talk:.2f} ms')
    if profile:
        with torch.profiler.profile() as found:
            step(talk=False)
        clock = 'self_device_time_total' if 'cuda' in place else 'self_cpu_time_total'
        print(found.key_averages().table(sort_by=clock, row_limit=10, max_name_column_width=40))
    for name in ('train_tinystories', 'train_gpt2'):
        print_run(name, place, type_, compiled)
    if train.WORLD_SIZE > 1:
        dist.destroy_process_group()

def print_run(name, place, type_, compiled):
    """How long a run of config/ would take here, by a pass over a part of a batch; no optimizer, no evaluation."""
    knobs = Knobs(config.defaults)
    read_arguments([f'{HERE}/config/{name}.py'], knobs)
    c, at_once = model_config(knobs), 1024
    model = build(c, place, type_)
    if 'cuda' in place:
        at_once, model = 16384, torch.compile(model) if compiled else model
    x, y = random_batch(c, at_once // c.block_size, place)
    seconds = min(seconds_of(lambda: model(x, y).backward(), place) for _ in range(3))
    total = knobs['max_iters'] * knobs['batch_size'] * c.block_size
    hours = seconds * total / x.numel() / train.WORLD_SIZE / 3600
    print(f'here    | {name}, {total / 1e9:.2g}B tokens: about {hours:,.1f} hours')

def bench_ladder():
    """What each step from the plain form to the fast one buys on this machine, one after the other."""
    place, type_, compiled = machine()
    c, times = model_config(), []
    for name, attention, *form in (('float32, written out', 'naive', 'float32', False, PlainAdamW),
                                   (type_, 'naive', type_, False, PlainAdamW),
                                   (f'compile {compiled}', 'naive', type_, compiled, PlainAdamW),
                                   ('flash attention', 'flash', type_, compiled, PlainAdamW),
                                   ('flat optimizer', 'flash', type_, compiled, train.Optimizer)):
        step, _ = make_step(replace(c, attention=attention), place, *form)
        times.append(measure(step, place))
        rate = train.batch_size * c.block_size / times[-1]
        print(f'ladder  | {name:22} | {1e3 * times[-1]:8.1f} ms | {rate:10,.0f} tokens/s | '
              f'{times[0] / times[-1]:.2f} times the first row', flush=True)

def bench_sample():
    """Tokens per second of generation, and the share of what reading the weights and the cache for each allows."""
    place, type_, compiled = machine()
    model = build(model_config(), place, type_).to(getattr(torch, type_)).eval()
    c, step = model.config, sample.compile_step(model, place) if compiled else None
    n = min(new_tokens, c.block_size - 1)
    generate = partial(sample.generate, model, [[0]] * samples, n, step=step, temperature=0.8, top_k=200)
    seconds = [seconds_of(lambda: list(generate()), place) for _ in range(1 + rounds)]
    rate = n / median(seconds[1:])          # the first compiles

    # the keys and values of half of the tokens, on average
    cache = samples * c.n_layer * c.n_kv_head * c.n_embd // c.n_head * n
    read = model.lm_head.weight.itemsize * (model.flops_per_token(0) // 6 + cache)
    x = torch.ones(500_000_000 if 'cuda' in place else 50_000_000, device=place)
    limit = x.nbytes / min(seconds_of(x.sum, place) for _ in range(10))
    print(f'sample  | {samples} x {n} tokens: {samples * rate:,.1f} tokens/s, {1e3 / rate:.2f} ms a token')
    print(f'memory  | {read / 1e6:.0f} MB read per step, {read * rate / limit:.0%} of what {limit / 1e9:.1f} GB/s allow')

# -----------------------------------------------------------------------------
# check: a step beside that of the plain forms in float64 on the CPU, and of torch's AdamW

def bench_check():
    """Whether loss, gradient, its norm and the step of the weights are right on this device. Raises UserError."""
    place, type_, compiled = machine()
    for name, fields in (('llama', {}), ('gpt2', GPT2)):
        c = GPTConfig(**fields | dict(vocab_size=2000, n_layer=2, n_head=4, n_embd=128, block_size=64))
        right = check_step(PlainAdamW, replace(c, attention='naive'), 'cpu', 'float64', False)
        for dtype in sorted({'float32', type_}):
            allowed = 3e-2
            if dtype == 'float32':
                allowed = 5e-3 if 'cuda' in place else 1e-5         # a GPU has TF32
            found = check_step(train.Optimizer, c, place, dtype, compiled and dtype == type_)
            errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, right)]
            print('check   | {}, {}: relative error of the loss {:.0e}, the gradient {:.0e}, its norm {:.0e}, the step '
                  'of the weights {:.0e}; {:g} is allowed'.format(name, dtype, *errors, allowed), flush=True)
            if not all(error < allowed for error in errors):
                raise UserError('this device does not compute what it should: train with --device=cpu, and report this')
    print('check   | pass')

def check_step(optimizer, c, place, dtype, compiled):
    """-> loss, gradient, its norm and step of the weights of a small model, in float64 on the CPU"""
    model, batch = build(c, 'cpu', dtype), random_batch(c, 4, place)
    for w in model.parameters():
        w.data += 0.02 * torch.randn_like(w)        # no layer is the identity
    if dtype == 'float64':
        model.double()
    # an eps of the size of a gradient: without it the first step is its sign, which of a tiny one may be either
    optimizer = optimizer(model.to(place), eps=1e-3, weight_decay=0.0)
    loss = torch.compile(model)(*batch) if compiled else model(*batch)
    (1024 * loss).backward()            # float16 needs large gradients
    for w in model.parameters():
        w.grad /= 1024
    gradient, before = flat(w.grad for w in model.parameters()), flat(model.parameters())
    norm = optimizer.clip(0.5)
    optimizer.step(0.1)
    step = flat(model.parameters()) - before
    return [x.detach().double().cpu() for x in (loss, gradient, norm, step)]

# -----------------------------------------------------------------------------
# formats of numbers, and the optimizers on a toy

FORMATS = dict(fp32=torch.float32, fp16=torch.float16, bf16=torch.bfloat16, E4M3=torch.float8_e4m3fn,
               E5M2=torch.float8_e5m2)

def bench_formats():
    """What the formats of numbers hold, and what casting makes of some, and of the first gradients of the model."""
    model = build(model_config(), 'cpu')
    model(*random_batch(model.config, 8, 'cpu')).backward()
    g = torch.cat([p.grad[p.grad != 0] for p in model.parameters()])    # many are 0: blocks begin as the identity
    print('     | exponent +    |            | smallest |          | the next    | 1e-8, 70,000, 1.001, 0.1 |\n'
          '     | fraction bits | largest    | normal   | above 0  | after 1     | become                   |'
          ' of gradients, of 65,536 times as large ones become 0')
    for name, dtype in FORMATS.items():
        info = torch.finfo(dtype)
        fraction = round(-math.log2(info.eps))
        become = torch.tensor([1e-8, 7e4, 1.001, 0.1]).to(dtype).tolist()
        lost = [(x.to(dtype).float() == 0).float().mean() for x in (g, 65536 * g)]
        print(f'{name} | {info.bits - 1 - fraction} + {fraction:<9} | {info.max:<10.5g} | {info.tiny:<8.2g} | '
              f'{info.tiny * info.eps:<8.2g} | 1 + {info.eps:<7.2g} |'
              + ' {:.0e} {:6.0f} {:5.3f} {:8.6f} | {:.2%}, {:.2%}'.format(*become, *lost))

TOY_RATES = 1e-1, 1e0, 1e1, 1e2, 1e3

def bench_toy():
    """10 x 10 normal numbers times 5, whose mean square is to be 0: after 10 and 100 steps of rate / sqrt(step)."""
    print('rate      ' + ''.join(f'| {rate:<19g} ' for rate in TOY_RATES))
    for name, rule in train.RULES.items():
        losses = [toy_loss(rule, rate, n) for rate in TOY_RATES for n in (10, 100)]
        print(f'{name:9} | ' + ' | '.join(f'{loss:8.2g}' for loss in losses))

def toy_loss(rule, rate, n):
    torch.manual_seed(train.seed)
    p, (m, v) = 5 * torch.randn(10, 10), torch.zeros(2, 10, 10)
    for t in range(1, n + 1):
        bias1, bias2 = 1 - 0.9 ** t, 1 - 0.999 ** t
        rule(p, 2 * p / 100, m, v, rate / t ** 0.5, 0.0, bias1, bias2, 0.9, 0.999, 1e-8)
    return p.square().mean()

# -----------------------------------------------------------------------------
# what a model costs, by arithmetic

PARTS = {'bias': 'biases', 'norm': 'norms', 'embed_tokens': 'embedding', 'embed_positions': 'positions',
         'self_attn': 'attention projections', 'mlp': 'mlp', 'lm_head': 'head'}

def parameters(c):
    """Parameters by part, without the padding of the vocabulary; a tied head is the embedding, and has none."""
    found = Counter()
    for name, p in skeleton(c).named_parameters():
        part = next(part for word, part in PARTS.items() if word in name)
        found[part] += c.vocab_size * c.n_embd if part in ('embedding', 'head') else p.numel()
    return found

def forward_flops(c):
    """
    FLOPs of the matmuls of a forward pass of a sequence, by part: 2mkn for (m, k) times (k, n), and no discount for
    the mask. A backward pass takes two of the size of each, for its two inputs.
    """
    size, T = parameters(c), c.block_size
    return Counter({'attention projections': 2 * T * size['attention projections'],
                    'attention scores, values': 4 * T * T * c.n_embd * c.n_layer,
                    'mlp': 2 * T * size['mlp'],
                    'head': 2 * T * c.n_embd * c.vocab_size})

ADAMW_FLOPS = 14 + 3    # a step, per parameter: + - * / and sqrt of train.adamw; square, sum and scaling to clip

def muon_flops(c):
    """Of train.orthogonalize for the matrices of the blocks: 5 times x x^T, its square, and a sum of both times x."""
    shapes = [sorted(p.shape) for p in skeleton(c).model.layers.parameters() if p.dim() == 2]
    return sum(5 * (4 * a * a * b + 2 * a ** 3) for a, b in shapes)

def memory(c, B, type_):
    """
    Bytes at the peak of a step of B sequences with AdamW, by part; not compiled, without dropout. For the backward pass
    a matmul keeps its input, and a copy of its weight if that is not float32; a norm its input and the normalized one,
    in float32; attention q, k, v, its output, and scores where they are written out.
    """
    size, w = parameters(c), getattr(torch, type_).itemsize
    n, N, L, C = size.total(), B * c.block_size, c.n_layer, c.n_embd
    normed = C + 2 * L * C if c.norm != 'none' else 0
    if c.qk_norm:
        normed += L * (C + C // c.n_head * c.n_kv_head)
    found = Counter({'weights': 4 * n, 'gradients': 4 * n, 'moments': 8 * n,
                     'norms': N * 8 * normed,
                     'attention': N * L * w * 5 * C,
                     'mlp': N * L * w * (C + c.d_ff * (4 if c.mlp == 'swiglu' else 2)),
                     'head and loss': N * (w * C + 4 * c.vocab_size),
                     'gradients of logits': N * 8 * c.vocab_size})
    if c.attention == 'naive':
        found['scores'] = N * L * c.n_head * c.block_size * (4 if w == 4 else 6)
    if w < 4:
        found['cast weights'] = w * (size['attention projections'] + size['mlp'] + C * c.vocab_size)
    return found

def measure_memory(c, B):
    """Bytes of weights, gradients, moments, and all that autograd keeps of a forward pass in float32 on the CPU."""
    model, saved = build(c, 'cpu'), []
    optimizer = train.Optimizer(model, 'adamw')
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.untyped_storage()), print):
        model(*random_batch(c, B, 'cpu'))
    size_of = {storage.data_ptr(): storage.nbytes() for storage in saved}
    return sum(size_of.values()) + optimizer.v.nbytes       # weights, gradients and m share one, which is there

def print_parts(*columns):
    for part in columns[0] | columns[1]:
        cells = [f'{column[part]:22,} {column[part] / column.total():6.1%}' for column in columns]
        print(f'{part:24} |', ' | '.join(cells))
    print(f'together                 | {columns[0].total():22,}        | {columns[1].total():22,}\n')

def bench_resources():
    """What the model of the knobs costs, by part, and what follows from it."""
    _, type_, _ = machine()
    c, B = model_config(), train.micro_batch_size or train.batch_size
    size, flops = parameters(c), forward_flops(c)
    naive, flash = [memory(replace(c, attention=kind), B, type_) for kind in ('naive', 'flash')]
    print('part                     |             parameters        | FLOPs forward, a sequence')
    print_parts(size, flops)
    print(f'bytes in {type_:15} |        naive attention        | flash attention, {B} x {c.block_size} tokens')
    print_parts(naive, flash)

    guess = memory(c, 2, 'float32')
    del guess['gradients of logits']
    if guess.total() < 4e9:
        print(f'2 sequences in float32   | {guess.total():,} bytes are kept; measured here: {measure_memory(c, 2):,}')
    each = (flash.total() - memory(c, 0, type_).total()) / B
    fits = max(B + int((1e9 * memory_gb - flash.total()) // each), 0)
    D = tokens or train.max_iters * train.batch_size * c.block_size
    spent = 3 * flops.total() / c.block_size * D
    days = spent / (num_gpus * 1e12 * peak_tflops * mfu) / 86400
    N = ((flop_budget or spent) / 120) ** 0.5
    print(f'training, a sequence     | {3 * flops.total():,} FLOPs: forward, and twice that backward\n'
          f'a step of AdamW          | {ADAMW_FLOPS * size.total():,} FLOPs\n'
          f'a step of Muon           | {muon_flops(c):,} FLOPs in matmuls\n'
          f'largest batch            | {memory_gb:g} GB hold {fits:,} sequences with flash attention\n'
          f'largest model            | {num_gpus} x {memory_gb:g} GB hold {num_gpus * memory_gb / 16:.4g}B parameters '
          f'with AdamW: 16 bytes each\n'
          f'time                     | {days:,.4g} days for {D:,.4g} tokens, {spent:.3g} FLOPs, with {num_gpus} x '
          f'{peak_tflops:g} TFLOP/s at {mfu:.0%}\n'
          f'Chinchilla               | {flop_budget or spent:.3g} FLOPs do most for {N:.3g} parameters on {20 * N:.3g} '
          f'tokens (arXiv:2203.15556)\n')
    print('GPT-2                    |    parameters |       FLOPs forward | GB of a step of one sequence')
    for L, C in ((12, 768), (24, 1024), (36, 1280), (48, 1600)):
        c = GPTConfig(**GPT2 | dict(n_layer=L, n_head=C // 64, n_embd=C))
        print(f'{L} x {C:<19} | {parameters(c).total():13,} | {forward_flops(c).total():19,} | '
              f'{memory(c, 1, type_).total() / 1e9:.1f}')

# -----------------------------------------------------------------------------
# tokenizers, beside the packages that are installed

def contest(title, size, **contestants):
    """Runs the functions of those that are installed in turns on `size` bytes, and prints the medians."""
    seconds = {name: [] for name in contestants if name == 'ours' or util.find_spec(name)}
    for _, name in product(range(rounds), seconds):
        seconds[name].append(seconds_of(contestants[name]))
    for name, found in seconds.items():
        print(f'{title:20} | {name:10} | {median(found):7.2f} s | {size / 1e6 / median(found):6.1f} MB/s | '
              f'{median(found) / median(seconds["ours"]):.2f} times ours', flush=True)

def train_rustbpe(docs, n):
    import rustbpe
    rustbpe.Tokenizer().train_from_iterator(iter(docs), n, pattern=bpe.PATTERNS['gpt2'])

def train_tokenizers(docs, n):
    import tokenizers
    tokenizers.ByteLevelBPETokenizer().train_from_iterator(docs, n, show_progress=False)

def encode_anew(tok, text):
    tok.forget()
    tok.encode_to_numpy(text)

def encode_riptoken(docs, ranks):
    import riptoken
    encoder = riptoken.CoreBPE(ranks, {}, bpe.PATTERNS['gpt2'])
    return list(map(encoder.encode_ordinary, docs))

def bench_tokenizer():
    """Training, encoding and decoding; the others encode with our vocabulary and pattern."""
    settings, files, _ = prepare.find_source(train.dataset)
    prepare.fetch(files, prepare.DATASETS.get(train.dataset, {}))
    docs = [raw.decode() for raw in prepare.documents(files, settings['separator'])]
    text, end, cores = '\n\n'.join(docs), bpe.END_OF_TEXT, bpe.default_workers()
    size = len(text.encode())
    print(f'{size / 1e6:.1f} MB in {len(docs):,} documents, {cores} cores, median of {rounds} rounds in turns')

    path = Path(tempfile.mkdtemp()) / 'text.txt'
    path.write_text(end.join(docs), encoding='utf-8', newline='')
    for n in (10_000, 32_000):
        ours = partial(bpe.train_bpe, path, n, [end])
        contest(f'train {n:,}', size, ours=ours,
                tokenizers=partial(train_tokenizers, docs, n),
                rustbpe=partial(train_rustbpe, docs, n))

    tok = bpe.Tokenizer(*ours(), [end])
    ranks = {token: id for id, token in tok.vocab.items() if id != tok.eot}
    tik = tiktoken.Encoding('same', pat_str=bpe.PATTERNS['gpt2'], mergeable_ranks=ranks, special_tokens={})
    ids, blocks = tok.encode_to_numpy(text), [text[i:i + bpe.BLOCK] for i in range(0, size, bpe.BLOCK)]
    assert np.array_equal(ids, tik.encode_to_numpy(text)), 'tiktoken gives other ids'
    for title, ours in (('encode new words', encode_anew), ('encode known words', bpe.Tokenizer.encode_to_numpy)):
        contest(title, size, ours=partial(ours, tok, text), tiktoken=partial(tik.encode_to_numpy, text))
    contest('encode to lists', size,
            ours=lambda: list(map(tok.encode_ordinary, docs)),
            tiktoken=lambda: list(map(tik.encode_ordinary, docs)),
            riptoken=lambda: encode_riptoken(docs, ranks))
    contest('encode on all cores', size,
            ours=lambda: list(bpe.parallel_map(tok.encode_to_numpy, blocks, cores)),
            tiktoken=lambda: tik.encode_ordinary_batch(docs, num_threads=cores))
    contest('decode', size,
            ours=lambda: tok.decode_bytes(ids),
            tiktoken=lambda: tik.decode_bytes(ids.tolist()))

# -----------------------------------------------------------------------------
# a range test, and a look into a model

FIND_STEPS = 200

def bench_find_lr():
    """
    A range test (arXiv:1506.01186): a short run whose learning rate rises, from a thousandth of the knob's to a hundred
    times that, until the loss does too.
    """
    place, type_, _ = machine()
    data, vocab = open_data()
    model = build(train.model_config(vocab_size=vocab), place, type_)
    optimizer, T = make_optimizer(model), model.config.block_size
    micro = train.divide_batch(T, place)
    rates, losses = [], []
    for step in range(FIND_STEPS):
        rates.append(train.learning_rate * 1e-3 * 1e5 ** (step / FIND_STEPS))
        losses.append(0.0)
        optimizer.zero_grad(set_to_none=False)
        for x, y in train.micro_batches(data, step * train.batch_size, step, T, micro, place):
            loss = model(x, y) * micro / train.batch_size
            loss.backward()
            losses[-1] += loss.item()
        if not losses[-1] < min(losses) + 1:
            break
        optimizer.clip(train.grad_clip)
        optimizer.step(rates[-1])
    best = suggest_lr(rates, losses)
    print(f'suggest | --learning_rate={best:.1e}, a third of the rate at which the loss was lowest')
    save_picture('find_lr.png', 'How high may the learning rate be?', draw_rates, rates, losses, best)

def suggest_lr(rates, losses):
    """A third of the rate at which the loss, as a mean of a tenth of the steps, was lowest."""
    n = math.ceil(len(losses) / 10)
    smooth = [mean(losses[i:i + n]) for i in range(len(losses) - n + 1)]
    return rates[smooth.index(min(smooth)) + n // 2] / 3

def draw_rates(axis, rates, losses, best):
    axis.plot(rates, losses)
    axis.axvline(best, color='C3', label=f'suggested: {best:.1e}')
    axis.set(xscale='log', xlabel='learning rate', ylabel='training loss')
    axis.legend()

SEEN = 'activations', 'gradients', 'weights'

def bench_diagnose():
    """A step of training from a checkpoint, and what one learns to read in a network, layer by layer."""
    folder = sample.find_checkpoint(runs)
    read_arguments([f'{folder.parent}/config.py'], train.config)
    vars(train).update(train.config)
    model = architecture.load_model(folder, attention='flash')
    optimizer, T, (data, _) = make_optimizer(model), model.config.block_size, open_data()
    scaler = torch.amp.GradScaler('cpu', enabled=False)
    train.restore(folder, optimizer, scaler, read_json(folder / 'training.json'))

    found = diagnose(model, optimizer, data.batch(range(0, 4096, T), T), train.learning_rate)
    print('layer | rms of activations, gradients, weights | update / weights | dead units | entropy of attention')
    for i, layer in enumerate(found):
        rms = [layer[part].square().mean().sqrt() for part in SEEN]
        print('{:5} | {:.1e}, {:.1e}, {:.1e} | {update:.1e} | {dead:.1%} | {entropy:.2f}'.format(i, *rms, **layer))
    save_picture('diagnose.png', 'How large are the numbers in this network?', draw_sizes, found, columns=3)

def diagnose(model, optimizer, batch, lr):
    """
    Of a step on a batch, for each layer: activations (its output), gradients and weights, as tensors; update, how far
    the step went, as a share of the weights; dead, the share of units of the MLP that stay below a hundredth of their
    rms for every token; entropy of its attention.
    """
    layers, seen, entropies, attend = model.model.layers, {}, [], architecture.fused_attention
    hook = torch.nn.modules.module.register_module_forward_hook(partial(note_module, seen))
    architecture.fused_attention = partial(note_attention, entropies, attend)
    optimizer.zero_grad(set_to_none=False)
    model(*batch).backward()
    architecture.fused_attention = attend
    hook.remove()

    gradients = [flat(p.grad for p in layer.parameters()) for layer in layers]
    before = [flat(layer.parameters()) for layer in layers]
    optimizer.step(lr)
    found = []
    for layer, g, w, entropy in zip(layers, gradients, before, entropies):
        units, _ = seen[layer.mlp.down_proj]
        dead = units.abs().amax((0, 1)) < 0.01 * units.square().mean().sqrt()
        moved = flat(layer.parameters()) - w
        found.append(dict(activations=seen[layer][1], gradients=g, weights=w, update=moved.norm() / w.norm(),
                          dead=dead.float().mean(), entropy=entropy))
    return found

def note_module(seen, module, inputs, output):
    seen[module] = inputs[0].detach(), output.detach()

def note_attention(entropies, attend, q, k, v, dropout):
    """Stands for fused_attention, and notes the mean entropy as a share of the largest: 1 if all are looked at alike."""
    T = q.size(-2)
    mask = architecture.causal_mask(torch.arange(T), T)
    probs = architecture.scaled_dot_product_attention(q, k, torch.eye(T), mask).detach()
    most = torch.arange(1, T + 1).log()
    entropies.append((torch.special.entr(probs).sum(-1) / most)[..., 1:].mean())
    return attend(q, k, v, dropout)

def draw_sizes(axes, found):
    for axis, part in zip(axes, SEEN):
        for i, layer in enumerate(found):
            sizes = layer[part].abs().clamp(min=1e-12).log10()
            axis.hist(sizes.flatten(), 100, density=True, histtype='step', label=f'layer {i}')
        axis.set_xlabel(f'log10 of |{part}|')
    axes[0].legend()

# -----------------------------------------------------------------------------
# experiments: every arm is a command, trained with every seed

def read_arms():
    """{name of an arm: its arguments for train.py}. Raises UserError."""
    found = {}
    for line in filter(str.strip, re.split('[\n;]', arms)):
        name, _, arguments = line.strip().partition(':')
        found[name] = arguments.split()
    if not found:
        raise UserError('there are no arms: give config/lab_ablations.py, or --arms="small: --n_embd=64; big: --n_embd=128"')
    return found

def knobs_of(arguments):
    """The knobs of train.py with these arguments. Raises UserError."""
    knobs = Knobs(train.config)
    read_arguments(arguments, knobs)
    return knobs

def run_arm(arguments, folder, seed):
    """Trains with these arguments in a process of its own, unless that has been done. -> the log. Raises UserError."""
    if end_losses([train.read_log(folder)]):
        return train.read_log(folder)
    given = [f'--{name}={x}' for name, x in train.config.items() if x != train.config.defaults[name]]
    own = [f'--seed={seed}', f'--out_dir={folder}', '--init_from=auto']
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / 'output.txt', 'a', encoding='utf-8') as output:
        command = [sys.executable, HERE / 'train.py', *given, *arguments, *own]
        status = subprocess.run(command, stdout=output, stderr=output).returncode
    if status == 130:               # Ctrl-C
        raise KeyboardInterrupt
    if status not in (0, 3):        # 3: diverged
        last = (folder / 'output.txt').read_text(encoding='utf-8').strip().splitlines()[-1]
        raise UserError(f'{last} (train.py ended with status {status}; all it said is in {folder}/output.txt)')
    return train.read_log(folder)

def bench_compare():
    """Every arm with every seed, in turns, so that a slow hour of the machine is everyone's."""
    named, out = read_arms(), Path(train.out_dir or 'out')
    knobs = {name: knobs_of(arguments) for name, arguments in named.items()}    # finds mistakes before training
    logs = {name: [] for name in named}
    for seed, name in product(range(train.seed, train.seed + seeds), named):
        short = re.sub('[^A-Za-z0-9.]+', '_', name)
        logs[name].append(run_arm(named[name], out / f'{short}-{seed}', seed))
        loss, _ = summary(logs[name][-1:])
        print(f'{sum(map(len, logs.values()))} of {len(named) * seeds} | {name}, seed {seed} | loss {loss:.4f}', flush=True)
    print_table(logs)
    draw = dict(rows=draw_rows, curves=draw_curves).get(picture, draw_sweep)
    save_picture('curves.png', question, draw, logs, knobs)
    if what == 'scaling':
        print_law(logs, knobs)

bench_scaling = bench_compare

def end_losses(logs):
    """Of the runs that came to their end."""
    return [entry['full_val_loss'] for log in logs for entry in log if 'full_val_loss' in entry]

def summary(logs):
    """-> mean and standard deviation of the losses at the end"""
    losses = end_losses(logs) or [math.inf]
    return mean(losses), stdev(losses) if len(losses) > 1 else 0.0

def print_table(logs):
    """{name: [log of each seed]}: how the runs ended."""
    print('\n| | validation loss | to the first | bits per byte | steps | tokens/s | diverged |')
    print('|' + '---|' * 7)
    first, _ = summary(next(iter(logs.values())))
    for name, found in logs.items():
        loss, sd = summary(found)
        entries = sum(found, []) or [dict(step=0)]
        bpb = [entry['full_val_bpb'] for entry in entries if entry.get('full_val_bpb')] or [math.nan]
        speed = median(entry.get('tokens_per_second', 0) for entry in entries)
        print(f'| {name} | {loss:.4f} ± {sd:.4f} | {loss - first:+.4f} | {mean(bpb):.3f} | {entries[-1]["step"]:,} | '
              f'{speed:,.0f} | {len(found) - len(end_losses(found))} of {len(found)} |')

def first_loss(logs):
    """Where training begins: what lies above that needs no room in a picture."""
    return median(log[0]['loss'] for found in logs.values() for log in found if log)

def limits(logs):
    losses = [summary(found)[0] for found in logs.values()]
    return 0.98 * min(losses), min(1.02 * max(losses), first_loss(logs))

def draw_rows(axis, logs, knobs):
    """A row for each arm, the best at the top: mean and spread."""
    rows = sorted(((*summary(found), name) for name, found in logs.items()), reverse=True)
    for loss, sd, name in rows:
        axis.errorbar(loss, f'{name}  {loss:.3f}', xerr=sd, fmt='o', color='C0', capsize=3)
    axis.axvline(summary(next(iter(logs.values())))[0], color='0.7', linestyle='--', zorder=0)
    axis.set(xlabel='validation loss', xlim=limits(logs))

def draw_curves(axis, logs, knobs):
    """The training losses of each run's first seed."""
    for name, (log, *_) in logs.items():
        entries = [entry for entry in log if 'loss' in entry]
        axis.plot([entry['step'] for entry in entries], [entry['loss'] for entry in entries], label=name)
    axis.set(xlabel='step', ylabel='training loss', ylim=(0, 1.1 * first_loss(logs)))
    axis.legend()

def draw_sweep(axis, logs, knobs):
    """The loss at the end against a knob, a line for each group of arms, which have its name before a comma."""
    groups = {}
    for name in sorted(logs, key=lambda name: knobs[name][picture]):
        point = knobs[name][picture], *summary(logs[name])
        groups.setdefault(name.rpartition(', ')[0], []).append(point)
    for group, points in groups.items():
        axis.errorbar(*zip(*points), fmt='o-', capsize=3, label=group)
    axis.set(xscale='log', xlabel=picture, ylabel='validation loss', ylim=limits(logs))
    if len(groups) > 1:
        axis.legend()

def print_law(logs, knobs):
    """Raises UserError for too few runs."""
    points = []
    for name, x in knobs.items():
        N = skeleton(model_config(x)).flops_per_token(0) / 6
        D = x['max_iters'] * x['batch_size'] * x['block_size']
        points += [(N, D, loss) for loss in end_losses(logs[name])]
    if len(points) < 6:
        raise UserError(f'{len(points)} runs ended with a loss: a law of five numbers takes 6, as config/lab_scaling.py has')
    E, A, alpha, B, beta, error = fit_law(*np.array(points).T)
    print(f'law     | loss = {E:.2f} + {A:.3g} / N^{alpha:.2f} + {B:.3g} / D^{beta:.2f}, off by {error:.1%} '
          f'(N weights of matmuls, D tokens; {len(points)} runs)')

def fit_law(N, D, loss):
    """
    loss = E + A / N^alpha + B / D^beta (arXiv:2203.15556, equation 2): the exponents by trying, the rest by least
    squares of relative errors. -> E, A, alpha, B, beta, the error
    """
    found = []
    for alpha, beta in product(np.arange(0.02, 1.5, 0.02), repeat=2):
        terms = np.stack([N ** 0, N ** -alpha, D ** -beta], 1) / loss[:, None]
        E, A, B = np.linalg.lstsq(terms, np.ones(len(loss)))[0]
        error = np.square(terms @ (E, A, B) - 1).mean() ** 0.5
        if min(E, A, B) >= 0:
            found.append((E, A, alpha, B, beta, error))
    return min(found, key=lambda fit: fit[-1])

def bench_curves():
    """Several runs in one table and one picture."""
    logs = {run: [train.read_log(Path(run))] for run in runs.split(',')}
    if [[]] in logs.values():
        raise UserError(f'--runs={runs}: give folders of runs with commas between them, as --runs=out/python,out/python-2')
    print_table(logs)
    save_picture('curves.png', 'How did the loss fall?', draw_curves, logs, {})

def main():
    if train.RANK:
        sys.stdout = open(os.devnull, 'w')
    commands = {name[6:]: f for name, f in globals().items() if name.startswith('bench_')}
    if what not in commands:
        raise UserError(f'--what={what} is not known: give one of {", ".join(commands)}')
    try:
        commands[what]()
    except torch.OutOfMemoryError:
        raise UserError('the memory of the device is too small: give a smaller --micro_batch_size or model')

if __name__ == '__main__':
    launch(main)
