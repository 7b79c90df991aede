"""
Trains a GPT, on whatever device is there.

    python train.py                                        # a small model of Python code, 2 minutes on 2 CPU cores
    python train.py config/train_tinystories.py            # an experiment; --key=value overrides any knob
    python train.py --dataset=my_text.txt                  # your own text: a file, a .jsonl, a folder
    python train.py out/python/config.py --init_from=resume
    torchrun --nproc_per_node=4 train.py                   # one process per GPU (or, without GPUs, per CPU share)

It prepares the data if they are not there, prints a line every log_interval steps (with the mfu on a known GPU)

    step 1200 | loss 4.1076 | lr 3.4e-05 | norm 1.05 | 39.6 ms | 26k tok/s

and writes out/<run>/: checkpoints step_00001200/ that Hugging Face opens, config.py, log.jsonl, curves.png.
"""
import atexit
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

from configurator import UserError, as_file, check_ranges, configure, launch
from model import (GPT, GPTConfig, checkpoints, choose_compile, choose_device, choose_dtype, load_model, load_tensors, newest_whole,
                   peak_flops, read_state, save_checkpoint, set_up, synchronize, upcast)
from prepare import (DATASETS, GPT2_MODELS, Shards, bits_per_byte, data_hash, data_name, find_or_prepare, gpt2_weights, read_meta,
                     window_starts)
from sample import generate
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
max_minutes = 0.0       # if above 0, the schedule comes to its end in this time, or at max_iters, whichever is first
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
micro_batch_size = 0    # sequences that one device takes at once; 0: the most that fit (a CPU: 16,384 tokens at most)
muon = True             # for the matrices of the blocks, with the same knobs; the others, and all without it: AdamW
learning_rate = 6e-3    # the highest, after warmup_iters
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
dtype = 'auto'          # auto, float32, bfloat16, float16: of activations and matmuls; weights are float32
compile = 'auto'        # True, False, or auto: where it pays
# wandb
wandb_log = False
wandb_project = 'gpt'
wandb_run_name = ''     # '': the name of the folder
# -----------------------------------------------------------------------------
config = configure(globals())

class Diverged(Exception):
    """The loss or the gradient is no longer finite."""

def find_data():
    """The data folder, prepared if it is missing, with the tokenizer of the model that is trained further."""
    kind = 'gpt2' if init_from in GPT2_MODELS else tokenizer
    if init_from not in ('scratch', 'resume', 'auto', *GPT2_MODELS):
        kind = str(Path(init_from) / 'tokenizer.json')
    return find_or_prepare(dataset, kind, vocab_size)

# -----------------------------------------------------------------------------
# the optimizer

def adamw(p, g, m, v, rate, root, decay, beta1, beta2, eps):
    """
    One step of Adam with decoupled weight decay (arXiv:1711.05101, algorithm 2), in place, in the order of operations of
    torch.optim.AdamW: parameters p, gradients g, moments m and v. At step t from 1: rate = lr / (1 - beta1^t),
    root = sqrt(1 - beta2^t), decay = 1 - lr weight_decay.
    """
    p.mul_(decay)
    m.lerp_(g, 1 - beta1)                                   # m = beta1 m + (1 - beta1) g
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)           # v = beta2 v + (1 - beta2) g^2
    p.sub_(rate * m / (v.sqrt() / root).add_(eps))

class AdamW(torch.optim.Optimizer):
    """AdamW in its plain form: bit for bit torch.optim.AdamW(foreach=False). Training runs the faster one below."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            beta1, beta2 = group['betas']
            for p in group['params']:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state['t'], state['m'], state['v'] = 0, torch.zeros_like(p), torch.zeros_like(p)
                t = state['t'] = state['t'] + 1
                adamw(p, p.grad, state['m'], state['v'], group['lr'] / (1 - beta1 ** t), (1 - beta2 ** t) ** 0.5,
                      1 - group['lr'] * group['weight_decay'], beta1, beta2, group['eps'])
        return loss

def orthogonalize(x):
    """
    x (n, a, b) -> n matrices with the same singular vectors, whose singular values are near 1 (0.7 to 1.2): five steps of
    the Newton-Schulz iteration of Muon (kellerjordan.github.io/posts/muon).
    """
    if x.size(1) > x.size(2):
        return orthogonalize(x.mT).mT
    x = x / (upcast(x).norm(dim=(1, 2), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(5):
        s = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x

class FlatAdamW:
    """
    AdamW with clipping for all parameters of a model at once. Weights p, gradients g and moments m, v are one tensor
    each, of which those of the model become views: two passes over memory clip, update and set the gradients to zero,
    and one message sums them over processes. Matrices have weight decay. With muon those of the blocks, which come last
    and have no v, take Muon's step.

    A gradient that is not finite changes nothing from that step on (alive is 0), and nobody waits to know it. With
    float16 it halves loss_scale instead, by which the loss is multiplied and which doubles every 2,000 steps
    (arXiv:1710.03740, section 3.2). The `extra` last numbers of g are the caller's: they are summed with it.
    """

    def __init__(self, model, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, extra=0, muon=False):
        hidden = lambda name, p: muon and p.dim() >= 2 and name.startswith('h.')
        params = sorted(model.named_parameters(), key=lambda item: (hidden(*item), item[1].dim() < 2))
        self.shapes, place = {name: p.shape for name, p in params}, params[0][1].device
        sizes = [-(-p.numel() // 64) * 64 for _, p in params]       # each begins where vectors of the hardware may
        self.starts, n = [0, *itertools.accumulate(sizes)], -(-sum(sizes) // 4096) * 4096
        matrices, rest = (sum(s for s, item in zip(sizes, params) if not hidden(*item) and item[1].dim() >= d) for d in (2, 0))
        self.p, self.g, self.m, self.v = (torch.zeros(size, device=place) for size in (n, n + extra, n, rest))
        self.extra, self.betas, self.eps, self.weight_decays = self.g[n:], betas, eps, (weight_decay, 0.0)
        self.parts = [[x[s] for x in (self.p, self.g, self.m, self.v)] for s in (slice(matrices), slice(matrices, rest))]
        self.hidden, self.dtype = {}, model.compute_dtype       # {shape: [(p, g, m), ...]} of the matrices that Muon updates
        for (name, param), *views in zip(params, *(self.views(x).values() for x in (self.p, self.g, self.m))):
            views[0].copy_(param.data)
            param.data, param.grad = views[:2]
            if hidden(name, param):     # queries, keys and values are matrices of their own
                a, C = param.shape
                for part in zip(*(x.split((C, (a - C) // 2, (a - C) // 2) if 'c_attn' in name else a) for x in views)):
                    self.hidden.setdefault(part[0].shape, []).append(part)
        self.lr, self.t, self.loss_scale, self.alive = (torch.tensor(x, device=place) for x in (0.0, 0.0, 0.0, True))
        self.scaled = model.compute_dtype == torch.float16
        self.compile(False), self.reset()

    def reset(self):
        """Forgets all steps."""
        [x.zero_() for x in (self.g, self.m, self.v, self.t)]
        self.alive.fill_(True), self.loss_scale.fill_(65536.0 if self.scaled else 1.0)

    def compile(self, on=True):
        self.update, self.muon = [torch.compile(f, dynamic=False) for f in (self.update_where, self.update_hidden)] if on else \
            [self.update_in_pieces, self.update_hidden]

    def views(self, flat):
        """{name: its part, in its shape} of p, g, m or v."""
        return {name: flat[i:i + shape.numel()].view(shape) for (name, shape), i in zip(self.shapes.items(), self.starts) if i < len(flat)}

    @torch.no_grad()
    def step(self, lr, max_norm=0.0):
        """Clips to the norm max_norm (0: does not), updates, zeroes the gradients. -> the norm before, on the device."""
        # subtle: the norm of 30 million float32 in one go is wrong by 0.2% on a CPU, in rows by 1e-6, and twice as fast
        norm = torch.linalg.vector_norm(self.g[:len(self.p)].view(4096, -1), dim=1).norm() / self.loss_scale
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) / self.loss_scale if max_norm else 1 / self.loss_scale
        ok = norm.isfinite() & self.alive
        self.t += ok
        if self.scaled:
            self.loss_scale.mul_(torch.where(ok, 1 + (self.t % 2000 == 0).float(), 0.5))
            self.alive.logical_and_(self.loss_scale > 1e-3)
        else:
            self.alive.copy_(ok)
        bias1, bias2 = (-torch.expm1(self.t * math.log(max(beta, 1e-30))) for beta in self.betas)     # 1 - beta^t
        lr = self.lr.fill_(lr)
        if self.hidden:
            self.muon(ok, factor, lr)
        self.update(ok, factor, lr / bias1, bias2.sqrt(), [1 - lr * x for x in self.weight_decays])
        return norm

    def update_hidden(self, ok, factor, lr):
        """
        Muon: momentum as Nesterov has it, its direction orthogonalized, and as large as AdamW's step usually is
        (arXiv:2502.16982, equation 4), so that both share a learning rate and a weight decay.
        """
        for (a, b), parts in self.hidden.items():
            p, g, m = (torch.stack(x) for x in zip(*parts))
            m = m.lerp(g * factor, 0.05)
            o = orthogonalize((g * factor).lerp(m, 0.95).to(self.dtype))
            p = p * (1 - lr * self.weight_decays[0]) - lr * 0.2 * max(a, b) ** 0.5 * o
            for new_p, new_m, (p, g, m) in zip(p, m, parts):
                p.copy_(torch.where(ok, new_p, p)), m.copy_(torch.where(ok, new_m, m)), g.zero_()

    def update_where(self, ok, factor, rate, root, decays):
        """The whole update as one expression, which a compiler makes one pass over memory."""
        for (p, g, m, v), decay in zip(self.parts, decays):
            new = [x.clone() for x in (p, m, v)]
            adamw(new[0], g * factor, *new[1:], rate, root, decay, *self.betas, self.eps)
            for x, y in zip((p, m, v), new):
                x.copy_(torch.where(ok, y, x))
            g.zero_()

    def update_in_pieces(self, ok, factor, rate, root, decays):
        """The same without a compiler, in pieces that fit the cache of a CPU."""
        factor, rate, root, *decays = map(float, (factor, rate, root, *decays))
        for part, decay in zip(self.parts, decays) if ok else ():
            for p, g, m, v in zip(*(x.split(1 << 16 if x.device.type == 'cpu' else 1 << 24) for x in part)):
                adamw(p, g.mul_(factor), m, v, rate, root, decay, *self.betas, self.eps)
        self.g.zero_()

@torch.no_grad()
def clip_grad_norm(params, max_norm):
    """
    Scales all gradients by one factor so that their joint L2 norm is at most max_norm (0: only measures), and returns
    the norm before, as a tensor on their device.
    """
    grads = [p.grad for p in params if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    for g in grads if max_norm > 0 else ():
        g.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
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

def connect(place, world_size):
    """Joins the processes, and sets what is set once for a device."""
    set_up(place)
    if world_size > 1:
        dist.init_process_group('nccl' if place.startswith('cuda') and dist.is_nccl_available() else 'gloo')

def check_batch(world_size):
    """Raises UserError where the global batch does not divide among processes and micro-batches."""
    if batch_size < 1 or batch_size % world_size:
        near = max(batch_size // world_size, 1) * world_size
        raise UserError(f'batch_size = {batch_size} does not divide among {world_size} processes: the nearest that do '
                        f'are {near} and {near + world_size}')
    share = batch_size // world_size
    if micro_batch_size and share % micro_batch_size:
        near = sorted((m for m in range(1, share + 1) if share % m == 0), key=lambda m: abs(m - micro_batch_size))[:2]
        raise UserError(f'micro_batch_size = {micro_batch_size} does not divide the {share} sequences of a process: the '
                        f'nearest that do are {near}')

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

def peek(model, tok, place, texts=1, length=0):
    """Some texts from the model, for a person to look at."""
    model.eval()
    start = sample_start or DATASETS.get(dataset, {}).get('start', '')
    new = generate(model, [tok.encode(start) or [tok.eot or 0]] * texts, length or sample_tokens, 0.8, stop=tok.eot, vocab_size=tok.vocab_size, seed=seed)
    rows = torch.stack(list(new), 1).tolist()
    model.train()
    return [start + tok.decode([i for i in row if i != tok.eot]) for row in rows]

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
        raise UserError(f'{folder} already holds a run: continue it with --init_from={"resume" if checkpoints(folder) else "auto"}, '
                        f'or give another --out_dir')
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

def save(run, step, model, optimizer, eot, tok_path, state):
    """Writes step_<step>/ and drops old checkpoints, but never the best."""
    folder = run / f'step_{step:08d}'
    if not folder.exists():
        tensors = {f'{k}.{name}': x.cpu().clone() for k in 'mv' for name, x in optimizer.views(getattr(optimizer, k)).items()}
        save_checkpoint(folder, model, tok_path, eot, dict(state, step=step, model=asdict(model.config), updates=int(optimizer.t),
                                                           loss_scale=float(optimizer.loss_scale)), tensors)
    best = min(state['val'], key=lambda e: e[1])[0] if state['val'] else step
    for old in checkpoints(run)[:-keep_checkpoints]:
        if int(old.name[5:]) != best:
            shutil.rmtree(old)
    return folder

def restore(folder, optimizer, state):
    """Fills the optimizer from a checkpoint."""
    views = {f'{k}.{name}': x for k in 'mv' for name, x in optimizer.views(getattr(optimizer, k)).items()}
    for name, x in load_tensors([folder / 'training.safetensors'], views).items():
        views[name].copy_(x)
    optimizer.t.fill_(state['updates'])
    if optimizer.scaled and state['loss_scale'] != 1:       # it was float16 before, too
        optimizer.loss_scale.fill_(state['loss_scale'])

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
    """Seconds of forward and backward of one micro-batch, by doing it."""
    for _ in range(3):      # the first ones compile, and warm up
        synchronize(place)
        t = time.perf_counter()
        model(*batch)[1].backward()
    synchronize(place)
    return time.perf_counter() - t

def find_speed(model, optimizer, data, T, place, world_size, steps, auto, say):
    """
    Decides, by trying, what 'auto' and 0 mean here: whether to compile, and the largest micro-batch that fits.
    -> (the model, compiled or not; whether it is; micro_batch_size; seconds that `steps` steps will take)
    """
    share, micro = batch_size // world_size, micro_batch_size or auto.get('micro_batch_size')
    fits = [m for m in range(share, 0, -1) if share % m == 0 and (place != 'cpu' or m * T <= 16384 or m == 1)]
    fits = [micro] if micro and share % micro == 0 else fits        # beyond 16,384 tokens a CPU gains nothing

    def timed(fast):        # -> micro-batch, seconds of all steps
        for m in fits:
            n = min(m, max(1, 4096 // T)) if place == 'cpu' and fast is model else m        # a part says enough
            try:
                seconds = estimate(fast, data.batch([0] * n, T, place), place) * share / n
                optimizer.step(0.0), synchronize(place)     # leaves the weights as they are
                t = time.perf_counter()
                optimizer.step(0.0), synchronize(place)
                return m, (seconds + time.perf_counter() - t) * steps
            except torch.OutOfMemoryError:
                if m == fits[-1]:
                    smaller = next((x for x in range(m // 2, 0, -1) if share % x == 0), None)
                    raise UserError(f'micro_batch_size = {m} does not fit into the memory: try ' + (
                        f'--micro_batch_size={smaller}, which trains the same' if smaller else 'a smaller --block_size or model'))
            torch.cuda.empty_cache(), torch.compiler.reset()        # out of the except, which holds what did not fit

    def agree(m, seconds):      # the same for all processes
        found = torch.tensor([m, -min(seconds, 60 * max_minutes or math.inf), steps, -steps], device=place)
        if world_size > 1:
            dist.all_reduce(found, dist.ReduceOp.MIN)
        if found[2] != -found[3]:
            raise UserError('the processes found different checkpoints: share the folder of the run among all nodes')
        return int(found[0]), -float(found[1])
    found, fast = agree(*timed(model)) if place == 'cpu' else (1, 0.0), model
    compiled, why = choose_compile(auto.get('compile', compile) if compile == 'auto' and steps else compile, place, found[1])
    if compiled:
        say(f'compile   | {compiled} ({why}){", half a minute the first time" if place == "cpu" else ""}')
        fast = torch.compile(model, dynamic=False)
        try:
            optimizer.compile()
            found = timed(fast)
        except UserError:
            raise
        except Exception as e:      # compilers fail in many ways
            compiled, why, fast, _ = False, f'it failed: {str(e).splitlines()[0]}', model, optimizer.compile(False)
    if not compiled:
        say(f'compile   | {compiled} ({why})')
        found = found if place == 'cpu' else timed(model)
    optimizer.reset()
    return fast, compiled, *agree(*found)

def schedule(step, seconds, began):
    """Where a run is in its schedule: at its next step, or after warm-up where the clock is, whichever is further."""
    gone = (seconds - began) / max(60 * max_minutes - began, 1) if max_minutes and step >= warmup_iters else 0
    return max(step + 1, gone * (lr_decay_iters or max_iters))

def is_complete(step, seconds):
    return step >= max_iters or 0 < 60 * max_minutes <= seconds

def read_later(numbers, place):
    """-> a function that gives a few numbers of the device, and waits for nothing if they have long been computed."""
    copy, event = numbers.clone().to('cpu', non_blocking=True), torch.cuda.Event() if place.startswith('cuda') else None
    if event:
        event.record()
    return lambda: (event and event.synchronize(), copy.tolist())[1]

def says(loss, bpb):
    return f'validation loss {loss:.4f}' + ('' if bpb is None else f' | {bpb:.3f} bits per byte')

def print_ending(run, folder, step, data, loss, bpb, meta, seconds):
    others = ' (gzip -9 needs {gzip_bpb:.2f}, xz -9 {xz_bpb:.2f} for the same text)'
    print(f'\n{says(loss, bpb)} over the whole split' + (others.format(**meta['val']) if bpb else ''))
    print(f'data            {data}\ntime            {duration(seconds)}\ncheckpoint      {folder}\n'
          f'sample from it  python sample.py --out_dir={run}')
    print(f'train further   python train.py {run}/config.py --init_from=resume ' +
          (f'--max_iters={2 * max_iters}' if step >= max_iters else f'--max_minutes={2 * max_minutes:g}'))

# -----------------------------------------------------------------------------

def main():
    started = time.perf_counter()
    rank, local_rank, world_size = setup_ranks()
    say = functools.partial(print, flush=True) if rank == 0 else lambda *args: None

    check_knobs()       # what can be wrong is found before any data are prepared
    fields = {k: config[k] for k in GPTConfig.__dataclass_fields__ if k in config and k != 'vocab_size'}
    GPTConfig(**fields)
    place, why_place = choose_device(device, local_rank)
    type_, why_type = choose_dtype(dtype, place)
    check_batch(world_size)
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
    clock = dict(saved=time.perf_counter())
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
    state = read_state(resumed) if resumed else \
        dict(step=0, val=[], seconds=0.0, began=0.0, data=data_hash(meta), muon=muon, auto={})
    step = state['step']
    # what 'auto' and 0 meant before a resume is kept, so that the sums are the same, unless the kind of machine is not
    auto = state['auto'] if state['auto'].get('device') == place.split(':')[0] else {}
    if dtype == 'auto' and auto:
        type_, why_type = auto['dtype'], 'as before'
    model.compute_dtype = getattr(torch, type_)
    optimizer = FlatAdamW(model, (beta1, beta2), adam_eps, weight_decay, extra=3, muon=muon)
    model.train()

    # what is going to happen
    per_step = batch_size * T
    say(f'data      | {data}')
    say(f'device    | {place} ({why_place})' + (f', {world_size} processes' if world_size > 1 else ''))
    say(f'dtype     | {type_} ({why_type}), weights and optimizer float32')
    say(f'attention | {attention}' + (' (fused kernels of torch)' if attention == 'flash' else ' (as asked)'))
    say(f'model     | {model.num_params():,} parameters, vocabulary {model.config.vocab_size:,}, context {T}')
    say(f'data use  | {max_iters:,} steps, {max_iters * per_step:,} tokens, '
        f'{max_iters * per_step / len(train_data):.2f} epochs of {len(train_data):,} tokens')
    if is_complete(step, state['seconds']) and not eval_only and state['val'][-1:] and state['val'][-1][0] == step:
        say(f'{run} is complete at step {step}; train further with a larger --max_iters or --max_minutes')
        leave(world_size)
        return dict(run=run, step=step)
    fast, compiled, micro, seconds = find_speed(model, optimizer, train_data, T, place, world_size, 0 if eval_only else max_iters - step, auto, say)
    if resumed:
        restore(resumed, optimizer, state)
    grad_accum = batch_size // world_size // micro
    state['auto'] = dict(device=place.split(':')[0], dtype=type_, compile=compiled, micro_batch_size=micro)
    say(f'batch     | {batch_size} sequences, {per_step:,} tokens per step (processes x micro-batches x sequences: '
        f'{world_size} x {grad_accum} x {micro})')
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
            wandb_run.attempt(lambda wandb: wandb.log({k: v for k, v in entry.items() if k != 'step'}, step=entry['step']))

    def evaluate_and_save(max_tokens):
        """-> (loss, bits per byte, checkpoint)"""
        loss = evaluate(model, fast if place != 'cpu' else model, val_data, T, micro, max_tokens, place, rank, world_size)
        state['val'] = [e for e in state['val'] if e[0] != step] + [[step, loss]]
        state['seconds'] += time.perf_counter() - clock['saved']
        clock['saved'] = time.perf_counter()
        log(dict(step=step, val_loss=loss, val_bpb=bits_per_byte(loss, meta)))
        check_finite(step, loss, optimizer)
        saved = save(run, step, model, optimizer, meta['eot'], tok_path, state) if writing else None
        if writing:
            draw_curves(run, say)
        return loss, bits_per_byte(loss, meta), saved

    # training
    stop, heard, seconds = StopSignal(), None, state['seconds']
    flops, peak = model.flops_per_token(T), peak_flops(place) * world_size
    t, t_step = time.perf_counter(), step
    while not (eval_only or is_complete(step, seconds)):
        lr = get_lr(schedule(step, seconds, state['began'] or seconds), learning_rate, min_lr, warmup_iters, lr_decay_iters or max_iters)
        starts = window_starts(step * batch_size, batch_size, len(train_data), T, seed)
        starts = starts[rank * micro * grad_accum:][:micro * grad_accum]        # this process's share
        loss = torch.zeros((), device=place)
        for i in range(grad_accum):
            x, y = train_data.batch(starts[i * micro:(i + 1) * micro], T, place)
            if dropout:     # by the number of the micro-batch in the global batch, so that any split of it is the same
                torch.manual_seed(((seed * 1_000_003 + step) * 1_000_003 + rank * grad_accum + i) % 2 ** 63)
            part = fast(x, y)[1] / (grad_accum * world_size)
            (part * optimizer.loss_scale if type_ == 'float16' else part).backward()
            loss += part.detach()
        signum, seconds = stop.signal, state['seconds'] + time.perf_counter() - clock['saved']
        if world_size > 1:
            # with the gradients go the loss, and what all must agree on, which is read one step later: no step waits for it
            optimizer.extra[0] = loss
            optimizer.extra[1].fill_(signum / world_size), optimizer.extra[2].fill_(seconds / world_size)
            dist.all_reduce(optimizer.g)
            loss = optimizer.extra[0].clone()
            (signum, seconds), heard = heard() if heard else (0, state['seconds']), read_later(optimizer.extra[1:], place)
            signum = signum and (stop.signal or signal.SIGTERM)
        state['began'] = state['began'] or seconds      # on the clock of max_minutes
        norm = optimizer.step(lr, grad_clip)
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
            check_finite(step, loss, optimizer)
        if step % eval_interval == 0 and step < max_iters:
            loss, bpb, saved = evaluate_and_save(eval_tokens)
            say(f'step {step} | {says(loss, bpb)} | saved {saved}')
            if writing and sample_tokens and tok:
                say('    | ' + peek(model, tok, place)[0].replace('\n', '\n    | '))
            t, t_step = time.perf_counter(), step
        if signum and step < max_iters:
            check_finite(step, loss, optimizer)
            if writing:
                state['seconds'] += time.perf_counter() - clock['saved']
                saved = save(run, step, model, optimizer, meta['eot'], tok_path, state)
                say(f'\nstopped at step {step}; saved {saved}\n'
                    f'go on with: python train.py {run}/config.py --init_from=resume')
                wandb_run.attempt(lambda wandb: wandb.finish())
            leave(world_size, 128 + signum)
            sys.exit(128 + signum)

    loss, bpb, saved = evaluate_and_save(0)
    stop.end()
    if eval_only:
        say(says(loss, bpb))
    if writing:
        for text in peek(model, tok, place, 4, 3 * sample_tokens) if sample_tokens and tok else ():
            say('-' * 40 + '\n' + text)
        print_ending(run, saved, step, data, loss, bpb, meta, time.perf_counter() - started)
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

def check_finite(step, loss, optimizer):
    if not (math.isfinite(loss) and optimizer.alive):
        raise Diverged(f'loss {float(loss)} at step {step}' + ('' if optimizer.alive else ', gradient not finite'))

def leave(world_size, status=0):
    """The end of one process of several, without that of the interpreter, which threads of torch may still want (SIGABRT)."""
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
        self.before = {s: signal.signal(s, self.hear) for s in (signal.SIGINT, signal.SIGTERM) if not eval_only}

    def end(self):
        for s, handler in self.before.items():
            signal.signal(s, handler)

    def hear(self, signum, frame):
        if self.signal and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signum

def check_knobs():
    check_ranges(config, (1, 10 ** 18, 'max_iters eval_interval log_interval keep_checkpoints'), (1, 10 ** 6, 'batch_size'),
                 (0, 10 ** 18, 'eval_tokens micro_batch_size warmup_iters lr_decay_iters seed'), (0, 10 ** 6, 'sample_tokens max_minutes'),
                 (0, 1e38, 'weight_decay grad_clip learning_rate min_lr adam_eps'))
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
    before = read_state(folder)
    for name, now in dict(data=data, muon=muon).items():
        if before.get(name) != now:
            raise UserError(f'{folder} was trained with {name} = {before.get(name)}, not {now}: resume it as it began, or '
                            f'start a new run with --init_from={folder}')

if __name__ == '__main__':
    try:
        launch(main)
    except Diverged as e:
        print(f'diverged: {e}: nothing after the last checkpoint was saved; resume with a lower --learning_rate or more '
              f'--warmup_iters', file=sys.stderr)
        sys.exit(3)
