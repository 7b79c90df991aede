"""
Trains a GPT, on whatever device is there.

    python train.py                                        # a small model of Python code, 3 minutes on 2 CPU cores
    python train.py config/train_tinystories.py            # an experiment; --key=value overrides any knob
    python train.py --dataset=my_text.txt                  # your own text: a file, a .jsonl, a folder
    python train.py out/python/config.py --init_from=resume
    torchrun --nproc_per_node=4 train.py                   # one process per GPU (or, without GPUs, per CPU share)

It prepares the data if they are not there, prints a line every log_interval steps (with the mfu on a known GPU)

    step 1200 | loss 4.1138 | lr 3.4e-05 | norm 1.06 | 103.9 ms | 9860 tok/s

and writes out/<run>/: checkpoints step_00001200/ that Hugging Face opens, config.py, log.jsonl, curves.png.
"""
import atexit
import ctypes
import functools
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from configurator import UserError, as_file, configure, launch, read_json
from model import GPT, GPTConfig, checkpoints, load_model, load_tensors, newest_whole, save_checkpoint
from prepare import (DATASETS, GPT2_MODELS, Shards, data_folder, data_hash, data_name, gpt2_weights, prepare, read_meta)
from sample import generate, visible
from tokenizer import load_tokenizer

# -----------------------------------------------------------------------------
# data
dataset = 'python'      # a name or path that prepare.py knows, or a data folder
tokenizer = 'bpe'       # bpe, char, byte, word, gpt2, or the path of a tokenizer.json
vocab_size = 4096       # of bpe and word
# the run
out_dir = ''            # where to write; '': out/<dataset>, or -2, -3, ... after it if that is taken
init_from = 'scratch'   # scratch, resume, auto (resume if out_dir holds a checkpoint), gpt2, gpt2-medium, gpt2-large,
                        # gpt2-xl, or the folder of a checkpoint or of a Hugging Face Llama, Qwen3 or GPT-2
max_iters = 1300        # optimizer steps
eval_interval = 400     # steps between evaluations, each followed by a checkpoint
eval_tokens = 32768     # validation tokens per evaluation; 0: all. the last evaluation always reads all
eval_only = False       # evaluate and stop
log_interval = 50       # steps between lines
keep_checkpoints = 2    # newest checkpoints that are kept, beside the best
sample_tokens = 64      # length of the text shown at each evaluation; 0: none
sample_start = ''       # what shown text begins with; '': the data set's own, or a new document
seed = 1                # of the weights, the order of the data and dropout
# the model: see GPTConfig in model.py
n_layer = 2
n_head = 4
n_kv_head = 0           # heads of keys and values; 0: n_head
n_embd = 256
d_ff = 0                # width inside the MLP; 0: 8/3 n_embd (swiglu) or 4 n_embd
block_size = 128        # the longest context, in tokens
dropout = 0.0
bias = False
tie_weights = True
qk_norm = True
norm = 'rms'            # rms, layer, none
norm_position = 'pre'   # pre, post
position = 'rope'       # rope, learned, none
mlp = 'swiglu'          # swiglu, silu, gelu
attention = 'flash'     # flash, naive
rope_theta = 10000.0
norm_eps = 1e-5
# the optimizer
batch_size = 8          # sequences per optimizer step, over all devices
micro_batch_size = 0    # sequences that one device takes at once; 0: its whole share (a CPU: 16,384 tokens at most)
learning_rate = 2e-3    # the highest, after warmup_iters
min_lr = 0.0            # the lowest, from lr_decay_iters on
warmup_iters = 100      # steps from 0 to learning_rate
lr_decay_iters = 0      # step at which the cosine reaches min_lr; 0: max_iters
weight_decay = 0.1      # of matrices; norms and biases have none
beta1 = 0.9
beta2 = 0.99
adam_eps = 1e-8
grad_clip = 1.0         # the largest norm of the gradient; 0: do not clip
# the machine
device = 'auto'         # auto, cpu, cuda, mps
dtype = 'auto'          # auto, float32, bfloat16: of activations and matmuls; weights are float32
compile = 'auto'        # True, False, or auto: where it pays
# wandb
wandb_log = False
wandb_project = 'gpt'
wandb_run_name = ''     # '': the name of the folder
# -----------------------------------------------------------------------------
config = configure(globals())

# dense bf16 FLOP/s of common cards (fp16 of V100 and T4), without sparsity, as published
PEAK_FLOPS = {'B200': 2250e12, 'H200': 989e12, 'H100 PCIe': 756e12, 'H100 NVL': 835e12, 'H100': 989e12, 'H20': 148e12,
              'A100': 312e12, 'A10G': 70e12, 'A40': 149.7e12, 'L40S': 362e12, 'L4': 121e12, 'V100': 125e12, 'T4': 65e12,
              'RTX 5090': 209.5e12, 'RTX 4090': 165.2e12, 'RTX 3090': 71e12}

class Diverged(Exception):
    """The loss or the gradient is no longer finite."""

# -----------------------------------------------------------------------------
# which machine this is; each choice comes with its reason, for the start-up lines

def choose_device(local_rank=0):
    if device == 'auto':
        if torch.backends.mps.is_available() and os.environ.get('WORLD_SIZE', '1') == '1':
            return 'mps', 'Apple GPU'
        if not torch.cuda.is_available():
            return 'cpu', f'no GPU was found; {torch.get_num_threads()} threads'
    elif not device.startswith('cuda'):
        return device, 'as asked'
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count:
        raise UserError(f'this machine has {count} GPUs that torch can use: start as many processes, or try --device=cpu')
    place = device if ':' in device else f'cuda:{local_rank}'
    return place, torch.cuda.get_device_name(place)

def choose_dtype(place):
    if dtype != 'auto':
        if dtype not in ('float32', 'bfloat16'):
            raise UserError(f'dtype = {dtype!r}: give auto, float32 or bfloat16')
        return dtype, 'as asked'
    if place.startswith('cuda'):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return 'bfloat16', 'the GPU has it'
        return 'float32', 'the GPU has no bfloat16'
    if place == 'cpu':      # elsewhere bfloat16 is emulated, slower than float32
        for name, kind in (('_is_amx_tile_supported', 'AMX'), ('_is_avx512_bf16_supported', 'AVX512_BF16')):
            if getattr(torch.cpu, name, lambda: False)():
                return 'bfloat16', f'the CPU has {kind}'
        return 'float32', 'the CPU computes bfloat16 no faster'
    return 'float32', 'bfloat16 is not tried here'

def choose_compile(place):
    if compile is False:
        return False, 'as asked'
    if place.startswith('cuda'):
        try:
            import triton       # noqa: F401
        except ImportError:
            return False, 'Triton is not installed'
        if torch.cuda.get_device_capability(place)[0] < 7:
            return False, 'the GPU is older than Triton supports'
        return True, 'as asked' if compile is True else 'a GPU gains much by it'
    if compile is True and place == 'cpu':
        if not any(map(shutil.which, ('g++', 'clang++', 'cl'))):
            return False, 'no C++ compiler was found'
        return True, 'as asked'
    return False, 'compiling for a CPU takes longer than a short run gains' if place == 'cpu' else 'not on this device'

def connect(place, world_size):
    """Joins the processes, and sets what is set once: TF32 for float32 matmuls on a GPU, malloc on a CPU."""
    if place.startswith('cuda'):
        torch.cuda.set_device(place)
    elif sys.platform == 'linux' and hasattr(libc := ctypes.CDLL(None), 'mallopt'):
        # keep freed memory (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD): the kernel zeroes it anew at every step, a tenth of it
        libc.mallopt(-3, 1 << 30), libc.mallopt(-1, 2 ** 31 - 1)
    if world_size > 1:
        dist.init_process_group('nccl' if place.startswith('cuda') and dist.is_nccl_available() else 'gloo')
    torch.set_float32_matmul_precision('high' if place.startswith('cuda') else 'highest')

def peak_flops(place):
    """Dense bf16 FLOP/s of the card, or 0 where it is not known."""
    name = torch.cuda.get_device_name(place) if place.startswith('cuda') else ''
    return next((f for card, f in PEAK_FLOPS.items() if re.search(rf'\b{card}\b(?! (Laptop|Ti|D)\b)', name)), 0)

# -----------------------------------------------------------------------------
# data: a batch is a pure function of (seed, step)

@functools.lru_cache(maxsize=2)
def epoch_order(seed, epoch, n_tokens, T):
    """
    The start positions of an epoch: every non-overlapping window of T tokens once, in an order, and shifted by an
    offset, that depend on (seed, epoch) alone. Raw words of Philox are the same in every version of numpy.
    """
    n = (n_tokens - T) // T
    words = np.random.Philox(key=[seed, epoch]).random_raw(n + 1)
    return np.argsort(words[1:], kind='stable') * T + int(words[0] % T)

def window_starts(first, count, n_tokens, T, seed):
    """Start positions of windows number first, first + 1, ... of an endless sequence of epochs."""
    n = (n_tokens - T) // T
    return [int(epoch_order(seed, i // n, n_tokens, T)[i % n]) for i in range(first, first + count)]

def find_data():
    """The data folder, prepared if it is missing. Under torchrun rank 0 prepares and the others wait for it."""
    if any((Path(dataset) / name).exists() for name in ('meta.json', 'train.bin')):
        return Path(dataset)
    kind = tokenizer
    if init_from in GPT2_MODELS:
        kind = 'gpt2'
    elif init_from not in ('scratch', 'resume', 'auto'):
        kind = str(Path(init_from) / 'tokenizer.json')
        if not os.path.exists(kind):
            raise UserError(f'{init_from} has no tokenizer.json; put that of its tokenizer there')
    if os.environ.get('RANK', '0') == '0':
        return prepare(dataset, kind, vocab_size)
    folder = data_folder(dataset, kind, vocab_size)
    if not folder.exists():
        print(f'rank {os.environ["RANK"]} waits until rank 0 has prepared {folder}', flush=True)
    while not (folder / 'meta.json').exists():      # torchrun ends this process if rank 0 fails
        time.sleep(0.5)
    return folder

# -----------------------------------------------------------------------------
# the optimizer

class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (arXiv:1711.05101, algorithm 2), in the order of operations of torch.optim.AdamW."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2), eps = group['lr'], group['betas'], group['eps']
            for p in group['params']:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state['step'], state['m'], state['v'] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state['step'] += 1
                m, v, t = state['m'], state['v'], state['step']
                p.mul_(1 - lr * group['weight_decay'])
                m.lerp_(p.grad, 1 - beta1)                                  # m = beta1 m + (1 - beta1) g
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)     # v = beta2 v + (1 - beta2) g^2
                denom = (v.sqrt() / math.sqrt(1 - beta2 ** t)).add_(eps)
                p.addcdiv_(m, denom, value=-lr / (1 - beta1 ** t))
        return loss

def make_optimizer(model):
    """AdamW with weight decay on matrices only."""
    params = list(model.parameters())
    groups = [dict(params=[p for p in params if p.dim() >= 2], weight_decay=weight_decay),
              dict(params=[p for p in params if p.dim() < 2], weight_decay=0.0)]
    return AdamW(groups, lr=learning_rate, betas=(beta1, beta2), eps=adam_eps)

@torch.no_grad()
def clip_grad_norm(params, max_norm):
    """
    Scales all gradients by one factor so that their joint L2 norm is at most max_norm (0: only measures), and returns
    the norm before, as a tensor on their device.
    """
    grads = [p.grad for p in params if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    if max_norm > 0:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for g in grads:
            g.mul_(factor)
    return norm

def get_lr(it, max_lr, min_lr, warmup, cycle):
    """The learning rate of step it: up from 0 in a line for `warmup` steps, a cosine down to min_lr at `cycle`."""
    if it < warmup:
        return max_lr * it / warmup
    if it >= cycle:
        return min_lr
    return min_lr + 0.5 * (max_lr - min_lr) * (1 + math.cos(math.pi * (it - warmup) / (cycle - warmup)))

# -----------------------------------------------------------------------------
# several processes

def setup_ranks():
    """-> rank, local_rank, world_size, from what torchrun sets."""
    return tuple(int(os.environ.get(k, d)) for k, d in (('RANK', 0), ('LOCAL_RANK', 0), ('WORLD_SIZE', 1)))

@torch.no_grad()
def sum_gradients(params, extra):
    """Adds up, over all processes, the gradients and a small tensor `extra`, in one message; returns extra's sum."""
    grads = [p.grad for p in params]
    flat = torch.cat([g.reshape(-1) for g in grads] + [extra.to(grads[0].dtype)])
    dist.all_reduce(flat)
    parts = flat.split([g.numel() for g in grads] + [extra.numel()])
    for g, part in zip(grads, parts):
        g.copy_(part.view_as(g))
    return parts[-1]

def check_batch(world_size, place='cpu'):
    """-> (micro_batch_size, grad_accum): how the global batch is divided. Raises UserError where it does not divide."""
    if batch_size < 1 or batch_size % world_size:
        near = max(batch_size // world_size, 1) * world_size
        raise UserError(f'batch_size = {batch_size} does not divide among {world_size} processes: the nearest that do '
                        f'are {near} and {near + world_size}')
    share = batch_size // world_size
    fits = [m for m in range(1, share + 1) if share % m == 0]
    small = [m for m in fits if m * block_size <= 16384 or place != 'cpu' or m == 1]     # a CPU gains nothing beyond
    micro = micro_batch_size or small[-1]
    if micro not in fits:
        raise UserError(f'micro_batch_size = {micro} does not divide the {share} sequences of a process: the nearest '
                        f'that do are {sorted(fits, key=lambda m: abs(m - micro))[:2]}')
    return micro, share // micro

# -----------------------------------------------------------------------------
# evaluation

@torch.no_grad()
def evaluate(model, fast, shards, T, micro, max_tokens, place, rank=0, world_size=1):
    """
    Mean loss in nats per token over the first max_tokens (0: all) of a split, the same non-overlapping windows every
    time, and the same for any number of processes. fast: the model, compiled or not, for batches of the usual shape.
    """
    model.eval()
    n = min(len(shards) - 1, max_tokens or len(shards))         # every token but the first is a target
    starts = list(range(0, n - T + 1, T))
    batches = [(starts[i:i + micro], T) for i in range(0, len(starts), micro)]
    rest = n - len(starts) * T
    if rest and (not max_tokens or not starts):                 # the last, shorter window
        batches.append(([len(starts) * T], rest))
    total = torch.zeros(2, dtype=torch.float64)                 # sum of losses, number of targets
    losses = [torch.zeros((), device=place)]
    for starts, length in batches[rank::world_size]:
        x, y = shards.batch(starts, length, place)
        losses.append((fast if x.shape == (micro, T) else model)(x, y)[1] * y.numel())
        total[1] += y.numel()
    total[0] = torch.stack(losses).cpu().double().sum()
    if world_size > 1:
        total = total.to(place if place.startswith('cuda') else 'cpu')
        dist.all_reduce(total)
    model.train()
    return float(total[0] / total[1])

def bits_per_byte(loss, meta):
    """
    Nats per token -> bits per byte of the validation text, in which a word that the vocabulary lacks costs its bytes.
    None where the bytes are not known, which is so without a meta.json.
    """
    val = meta['val']
    if 'bytes' not in val:
        return None
    return (loss * val['tokens'] / math.log(2) + 8 * val['unknown_bytes']) / val['bytes']

def peek(model, tok, place, texts=1, length=0):
    """Some texts from the model, for a person to look at."""
    model.eval()
    start = sample_start or DATASETS.get(dataset, {}).get('start', '')
    ids = tok.encode(start) or [tok.eot or 0]
    new = generate(model, torch.tensor([ids] * texts, device=place), length or sample_tokens, 0.8, stop=tok.eot,
                   vocab_size=tok.vocab_size, generator=torch.Generator(place).manual_seed(seed))
    rows = torch.stack(list(new), 1).tolist()
    model.train()
    return [visible(start + tok.decode([i for i in row if i != tok.eot])) for row in rows]

# -----------------------------------------------------------------------------
# the run on disk

def choose_out_dir():
    """out_dir, or the next free out/<dataset>; for a resume the newest of those. Raises UserError if it is taken."""
    resuming, folder = init_from in ('resume', 'auto'), Path(out_dir)
    if not out_dir:
        name = data_name(dataset)
        runs = [p for p in Path('out').glob('*') if re.fullmatch(re.escape(name) + r'(-\d+)?', p.name) and checkpoints(p)]
        if resuming and runs:
            return max(runs, key=lambda p: p.stat().st_mtime)
        names = (name if i == 1 else f'{name}-{i}' for i in itertools.count(1))
        folder = next(Path('out') / n for n in names if not (Path('out') / n).exists())
    if not resuming and (folder / 'config.py').exists():
        how = 'resume' if checkpoints(folder) else 'auto'
        raise UserError(f'{folder} already holds a run: continue it with --init_from={how}, or give another --out_dir')
    if init_from == 'resume' and not checkpoints(folder):
        raise UserError(f'there is no checkpoint in {folder} to resume; `ls out` shows the runs')
    return folder

def read_log(path):
    """The lines of a log, up to one that was not written to its end."""
    entries = []
    for line in path.read_text(encoding='utf-8').splitlines() if path.exists() else ():
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries

def cut_log(path, step):
    """Drops what was logged after a checkpoint, before training goes on from it."""
    kept = [e for e in read_log(path) if (e['step'] <= step if 'val_loss' in e else e['step'] < step)]
    path.write_text(''.join(json.dumps(e) + '\n' for e in kept), encoding='utf-8')

def draw_curves(run, say):
    """curves.png: losses, learning rate and gradient norm against steps."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return say('no curves.png: pip install matplotlib')
    log = read_log(run / 'log.jsonl')
    figure = Figure(figsize=(13, 3.8), layout='constrained')
    axes = figure.subplots(1, 3)
    for ax, key, title in zip(axes, ('loss', 'lr', 'grad_norm'),
                              (f'{run.name}: loss (nats per token)', 'learning rate', 'gradient norm, before clipping')):
        rows = [e for e in log if key in e]
        ax.plot([e['step'] for e in rows], [e[key] for e in rows], lw=1, label='training')
        ax.set(title=title, xlabel='step', yscale='log' if key == 'grad_norm' else 'linear')
        ax.grid(alpha=0.3)
    rows = [e for e in log if 'val_loss' in e]
    axes[0].plot([e['step'] for e in rows], [e['val_loss'] for e in rows], 'o-', label='validation')
    axes[0].legend()
    figure.savefig(run / 'curves.png', dpi=110)

class Wandb:
    """Weights & Biases if it is asked for. Nothing it does, or fails to do, stops a run."""

    def __init__(self, run, say):
        self.on, self.say = wandb_log, say
        self.attempt(lambda wandb: wandb.init(project=wandb_project, name=wandb_run_name or run.name, config=config, dir=str(run)))

    def attempt(self, action):
        if self.on:
            try:
                import wandb
                action(wandb)
            except Exception as e:      # whatever it is, training is worth more
                self.on = self.say(f'wandb failed and is off for this run: {type(e).__name__}: {e}')

    def log(self, entry):
        self.attempt(lambda wandb: wandb.log({k: v for k, v in entry.items() if k != 'step'}, step=entry['step']))

def save(run, step, model, optimizer, eot, tok_path, state):
    """Writes step_<step>/ and drops old checkpoints, but never the best."""
    folder = run / f'step_{step:08d}'
    if not folder.exists():
        names = {id(p): n for n, p in model.named_parameters()}
        tensors = {f'{k}.{names[id(p)]}': s[k].cpu() for p, s in optimizer.state.items() for k in ('m', 'v')}
        save_checkpoint(folder, model, tok_path, eot, dict(state, step=step, model=asdict(model.config)), tensors)
    best = min(state['val'], key=lambda e: e[1])[0] if state['val'] else step
    for old in checkpoints(run)[:-keep_checkpoints]:
        if int(old.name[5:]) != best:
            shutil.rmtree(old)
    return folder

def restore(folder, model, optimizer):
    """Fills the optimizer from a checkpoint and returns its training.json."""
    state, tensors = read_json(folder / 'training.json'), load_tensors([folder / 'training.safetensors'])
    for name, p in model.named_parameters():
        optimizer.state[p] = dict(step=state['step'], **{k: tensors[f'{k}.{name}'].to(p.device) for k in 'mv'})
    return state

# -----------------------------------------------------------------------------
# what is said at the start and at the end

def duration(seconds):
    """duration(4000) -> '1 h 7 min'"""
    s = round(seconds)
    return f'{s} s' if s < 60 else f'{s // 60} min {s % 60} s' if s < 3600 else \
        f'{s // 3600} h {s % 3600 // 60} min' if s < 86400 else f'{seconds / 86400:.1f} days'

def smaller_config():
    """What to run instead where this would take days: the _cpu variant of the config file, if there is one."""
    for arg in sys.argv[1:]:
        other = Path(arg.replace('.py', '_cpu.py'))
        if arg.endswith('.py') and other.exists():
            return f'python train.py {other}'
    return 'python train.py'

def estimate(model, batch, place):
    """Seconds of forward and backward of one micro-batch, by doing it; leaves no trace."""
    for _ in range(3):      # the first ones compile, and warm up
        synchronize(place)
        t = time.perf_counter()
        model(*batch)[1].backward()
        synchronize(place)
        seconds = time.perf_counter() - t
    model.zero_grad(set_to_none=True)
    return seconds

def synchronize(place):
    if place.startswith('cuda'):
        torch.cuda.synchronize()
    elif place == 'mps':
        torch.mps.synchronize()

def says(loss, bpb):
    """says(1.2345, 0.987) -> 'validation loss 1.2345 | 0.987 bits per byte'"""
    return f'validation loss {loss:.4f}' + ('' if bpb is None else f' | {bpb:.3f} bits per byte')

def print_ending(run, folder, data, loss, bpb, meta, seconds):
    others = ' (gzip -9 needs {gzip_bpb:.2f}, xz -9 {xz_bpb:.2f} for the same text)'
    print(f'\n{says(loss, bpb)} over the whole split' + (others.format(**meta['val']) if bpb else ''))
    print(f'data            {data}')
    print(f'time            {duration(seconds)}')
    print(f'checkpoint      {folder}')
    print(f'sample from it  python sample.py --out_dir={run}')
    print(f'train further   python train.py {run}/config.py --init_from=resume --max_iters={2 * max_iters}')

# -----------------------------------------------------------------------------

def main():
    started = time.perf_counter()
    rank, local_rank, world_size = setup_ranks()
    say = functools.partial(print, flush=True) if rank == 0 else lambda *args: None

    check_knobs()       # what can be wrong is found before any data are prepared
    fields = {k: config[k] for k in GPTConfig.__dataclass_fields__ if k in config and k != 'vocab_size'}
    GPTConfig(**fields)
    place, why_place = choose_device(local_rank)
    micro, grad_accum = check_batch(world_size, place)
    type_, why_type = choose_dtype(place)
    compiled, why_compiled = choose_compile(place)
    run = choose_out_dir()

    # data
    folder = find_data()
    meta = read_meta(folder)
    train_data, val_data = Shards(folder, 'train', meta), Shards(folder, 'val', meta)
    tok_path = folder / 'tokenizer.json'
    tok = load_tokenizer(tok_path) if tok_path.exists() else None
    data = f'{meta["source"]}, hash {data_hash(meta)}, in {folder}'

    # model
    connect(place, world_size)
    resumed = newest_whole(run, say) if init_from in ('resume', 'auto') and checkpoints(run) else None
    if world_size > 1:
        dist.barrier()      # rank 0 writes into the folder only when all have looked
    torch.manual_seed(seed)
    if resumed:
        model = load_model(resumed, dropout=dropout, attention=attention)
        check_resumed(model.config, GPTConfig(vocab_size=meta['vocab_size'], **fields), resumed, data_hash(meta))
    elif init_from in ('scratch', 'auto'):
        model = GPT(GPTConfig(vocab_size=meta['vocab_size'], **fields))
    else:
        source = gpt2_weights(init_from) if init_from in GPT2_MODELS else init_from
        model = load_model(source, dropout=dropout, attention=attention)
        if model.config.vocab_size < meta['vocab_size']:
            raise UserError(f'{init_from} knows {model.config.vocab_size} tokens and {folder} has '
                            f'{meta["vocab_size"]}: prepare the data with its tokenizer')
    T = min(block_size, model.config.block_size)
    if len(train_data) < 2 * T or len(val_data) < 2:
        raise UserError(f'{folder} has {len(train_data):,} training and {len(val_data):,} validation tokens: too few '
                        f'for a context of {T}; give more text or a smaller --block_size')
    try:
        model.to(place)
    except (RuntimeError, AssertionError) as e:
        raise UserError(f'device {place!r} can not be used ({str(e).splitlines()[0]}); try --device=cpu')
    model.compute_dtype = getattr(torch, type_)
    params = list(model.parameters())
    optimizer = make_optimizer(model)
    step, state = 0, dict(val=[], seconds=0.0, data=data_hash(meta))
    if resumed:
        state = restore(resumed, model, optimizer)
        step = state['step']
    model.train()
    fast = torch.compile(model) if compiled else model

    # what is going to happen
    per_step = batch_size * T
    say(f'data      | {data}')
    say(f'device    | {place} ({why_place})' + (f', {world_size} processes' if world_size > 1 else ''))
    say(f'dtype     | {type_} ({why_type}), weights and optimizer float32')
    say(f'attention | {attention}' + (' (fused kernels of torch)' if attention == 'flash' else ' (as asked)'))
    say(f'compile   | {compiled} ({why_compiled})')
    say(f'model     | {model.num_params():,} parameters, vocabulary {model.config.vocab_size:,}, context {T}')
    say(f'batch     | {batch_size} sequences, {per_step:,} tokens per step (processes x micro-batches x sequences: '
        f'{world_size} x {grad_accum} x {micro})')
    say(f'data use  | {max_iters:,} steps, {max_iters * per_step:,} tokens, '
        f'{max_iters * per_step / len(train_data):.2f} epochs of {len(train_data):,} tokens')
    if step >= max_iters and not eval_only and state['val'][-1:] and state['val'][-1][0] == step:
        say(f'{run} is complete: {step} of {max_iters} steps are done; train further with a larger --max_iters')
        leave(world_size)
        return dict(run=run, step=step)
    n = micro if place != 'cpu' else min(micro, max(1, 4096 // T))
    timed = lambda m: estimate(m, train_data.batch([0] * n, T, place), place) * micro / n * grad_accum
    try:
        seconds = timed(fast) * (max_iters - step)
    except torch.OutOfMemoryError:
        raise UserError(f'micro_batch_size = {micro} does not fit into the memory: try --micro_batch_size={max(micro // 2, 1)}, '
                        f'which trains the same')
    except Exception as e:      # compilers fail in many ways
        if not compiled:
            raise
        say(f'compile   | False (it failed: {str(e).splitlines()[0]})')
        fast, seconds = model, timed(model) * (max_iters - step)
    say(f'time      | about {duration(seconds)} here' +
        (f'; smaller: {smaller_config()}' if seconds > 12 * 3600 and not place.startswith('cuda') else ''))

    # files
    writing = rank == 0 and not eval_only
    if writing:
        start_files(run, resumed, step, model, T, folder)
        say((f'resumed {resumed}, ' if resumed else '') + f'writing {run}; stop with Ctrl-C, go on with: '
            f'python train.py {run}/config.py --init_from=resume\n')
    wandb_run = Wandb(run, say) if writing else None

    def log(entry):
        if writing:
            with open(run / 'log.jsonl', 'a', encoding='utf-8') as f:
                f.write(json.dumps(entry) + '\n')
            wandb_run.log(entry)

    def evaluate_and_save(max_tokens):
        """-> (loss, bits per byte, checkpoint)"""
        loss = evaluate(model, fast, val_data, T, micro, max_tokens, place, rank, world_size)
        state['val'] = [e for e in state['val'] if e[0] != step] + [[step, loss]]
        state['seconds'] += time.perf_counter() - clock['saved']
        clock['saved'] = time.perf_counter()
        log(dict(step=step, val_loss=loss, val_bpb=bits_per_byte(loss, meta)))
        check_finite(step, loss, worst)
        saved = save(run, step, model, optimizer, meta['eot'], tok_path, state) if writing else None
        if writing:
            draw_curves(run, say)
        return loss, bits_per_byte(loss, meta), saved

    worst, clock = torch.zeros((), device=place), dict(saved=time.perf_counter())
    if eval_only:
        loss, bpb, _ = evaluate_and_save(0)
        say(says(loss, bpb))
        leave(world_size)
        return dict(run=run, step=step, val_loss=loss, val_bpb=bpb)

    # training
    stop, heard = StopSignal(), 0.0
    flops, peak = model.flops_per_token(T), peak_flops(place) * world_size
    t, t_step = time.perf_counter(), step
    while step < max_iters:
        lr = get_lr(step + 1, learning_rate, min_lr, warmup_iters, lr_decay_iters or max_iters)
        for group in optimizer.param_groups:
            group['lr'] = lr
        starts = window_starts(step * batch_size, batch_size, len(train_data), T, seed)
        starts = starts[rank * micro * grad_accum:][:micro * grad_accum]        # this process's share
        loss = torch.zeros((), device=place)
        for i in range(grad_accum):
            x, y = train_data.batch(starts[i * micro:(i + 1) * micro], T, place)
            if dropout:     # by the number of the micro-batch in the global batch, so that any split of it is the same
                torch.manual_seed(((seed * 1_000_003 + step) * 1_000_003 + rank * grad_accum + i) % 2 ** 63)
            part = fast(x, y)[1] / (grad_accum * world_size)
            part.backward()
            loss += part.detach()
        signum = stop.signal
        if world_size > 1:      # all act on what all heard, one step later, so that no step waits for the answer
            signum = (stop.signal or signal.SIGTERM) if float(heard) > 0 else 0
            loss, heard = sum_gradients(params, torch.stack((loss, torch.full_like(loss, stop.signal))))
        norm = clip_grad_norm(params, grad_clip)
        worst = torch.maximum(worst, norm)      # keeps a norm that is not finite until someone looks
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1

        if step % log_interval == 0 or step == 1 or step == max_iters:
            loss, norm = float(loss), float(norm)       # waits for the device
            now = time.perf_counter()
            ms, rate = 1e3 * (now - t) / (step - t_step), per_step * (step - t_step) / (now - t)
            t, t_step = now, step
            mfu = rate * flops / peak if peak else None
            say(f'step {step} | loss {loss:.4f} | lr {lr:.1e} | norm {norm:.2f} | {ms:.1f} ms | '
                f'{short(rate)} tok/s' + (f' | mfu {100 * mfu:.1f}%' if mfu else ''))
            log(dict(step=step - 1, loss=loss, lr=lr, grad_norm=norm, tokens_per_second=rate, mfu=mfu,
                     seconds=state['seconds'] + now - clock['saved']))
            check_finite(step, loss, worst)
        if step % eval_interval == 0 and step < max_iters:
            loss, bpb, saved = evaluate_and_save(eval_tokens)
            say(f'step {step} | {says(loss, bpb)} | saved {saved}')
            if writing and sample_tokens and tok:
                say('    | ' + peek(model, tok, place)[0].replace('\n', '\n    | '))
            t, t_step = time.perf_counter(), step
        if signum and step < max_iters:
            check_finite(step, loss, worst)
            if writing:
                state['seconds'] += time.perf_counter() - clock['saved']
                saved = save(run, step, model, optimizer, meta['eot'], tok_path, state)
                say(f'\nstopped at step {step}; saved {saved}\n'
                    f'go on with: python train.py {run}/config.py --init_from=resume')
                wandb_run.attempt(lambda wandb: wandb.finish())
            leave(world_size, 128 + signum)
            sys.exit(128 + signum)

    stop.end()
    loss, bpb, saved = evaluate_and_save(0)
    if writing:
        for text in peek(model, tok, place, 4, 3 * sample_tokens) if sample_tokens and tok else ():
            say('-' * 40 + '\n' + text)
        print_ending(run, saved, data, loss, bpb, meta, time.perf_counter() - started)
        wandb_run.attempt(lambda wandb: wandb.finish())
    leave(world_size)
    return dict(run=run, step=step, val_loss=loss, val_bpb=bpb)

def start_files(run, resumed, step, model, T, folder):
    """Makes the folder of a run, with the knobs that start it again, and drops what came after a resumed checkpoint."""
    knobs = dict(config, out_dir=run.as_posix())
    if init_from in ('resume', 'auto'):
        knobs['init_from'] = 'scratch'
    elif init_from != 'scratch':        # what it began with has won over the knobs
        knobs.update({k: v for k, v in asdict(model.config).items() if k in config}, block_size=T, dataset=folder.as_posix())
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / 'config.py').write_text(as_file(knobs), encoding='utf-8')
    except OSError as e:
        raise UserError(f'can not write to {run}: {e.strerror}; give another --out_dir')
    for later in checkpoints(run):
        if int(later.name[5:]) > step:
            shutil.rmtree(later)
    cut_log(run / 'log.jsonl', step)

def check_finite(step, loss, norm):
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise Diverged(f'loss {float(loss)}, gradient norm {float(norm)} at step {step}')

def leave(world_size, status=0):
    """
    The end of one process of several. It skips the end of the interpreter, which now and then one did not survive
    ("terminate called without an active exception", SIGABRT): threads of torch may still want the interpreter then.
    """
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()
        atexit.register(lambda: (sys.stdout.flush(), sys.stderr.flush(), os._exit(status)))

def short(n):
    """short(412345) -> '412k'"""
    return f'{n / 1e6:.2f}M' if n >= 1e6 else f'{n / 1e3:.0f}k' if n >= 1e4 else f'{n:.0f}'

class StopSignal:
    """The first Ctrl-C or SIGTERM asks for a checkpoint and an end after this step; a second Ctrl-C ends at once."""

    def __init__(self):
        self.signal = 0
        self.before = {s: signal.signal(s, self.hear) for s in (signal.SIGINT, signal.SIGTERM)}

    def end(self):
        for s, handler in self.before.items():
            signal.signal(s, handler)

    def hear(self, signum, frame):
        if self.signal and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signum

def check_knobs():
    for name in ('max_iters', 'eval_interval', 'log_interval', 'block_size', 'keep_checkpoints'):
        if config[name] < 1:
            raise UserError(f'{name} = {config[name]}: give 1 or more')
    for name in ('eval_tokens', 'micro_batch_size', 'warmup_iters', 'lr_decay_iters', 'weight_decay', 'grad_clip',
                 'learning_rate', 'min_lr', 'sample_tokens', 'seed'):
        if not config[name] >= 0:
            raise UserError(f'{name} = {config[name]}: give 0 or more')
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise UserError(f'beta1 = {beta1} and beta2 = {beta2} must be from 0 to 1, such as 0.9 and 0.95')
    if compile not in (True, False, 'auto'):
        raise UserError(f'compile = {compile!r}: give True, False or auto')
    known = ('scratch', 'resume', 'auto', *GPT2_MODELS)
    if init_from not in known and not os.path.isdir(init_from):
        raise UserError(f'init_from = {init_from!r}: give one of {", ".join(known)}, or the folder of a model')
    if not os.path.exists(dataset) and dataset not in DATASETS:
        raise UserError(f'there is no data set {dataset!r}: give a path that exists, or one of {", ".join(DATASETS)}')

def check_resumed(found, wanted, folder, data):
    """Raises UserError, naming the knob, if a checkpoint does not fit the knobs or the data it is resumed with."""
    for k, v in asdict(found).items():
        knob = getattr(wanted, k)
        differs = knob > v if k in ('block_size', 'vocab_size') else knob != v
        if differs and k not in ('attention', 'dropout'):
            raise UserError(f'{folder} has {k} = {v}, not {knob}: resume it with its own config.py')
    before = read_json(folder / 'training.json').get('data')
    if before != data:
        raise UserError(f'{folder} was trained on other data ({before}, now {data}): resume it with the data it began '
                        f'with, or start a new run with --init_from={folder}')

if __name__ == '__main__':
    try:
        launch(main)
    except Diverged as e:
        print(f'diverged: {e}: nothing after the last checkpoint was saved; resume with a lower --learning_rate or more '
              f'--warmup_iters', file=sys.stderr)
        sys.exit(3)
