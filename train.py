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
import functools
import itertools
import json
import math
import os
import re
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from configurator import (Diverged, StopSignal, UserError, Wandb, all_reduce, as_file, check_alike, check_ranges, configure,
                          connect, cut_log, disk_is_full, duration, launch, leave, lock, read_later, read_log, say, setup_ranks, short,
                          smaller_config, write_whole)
from model import (GPT, GPTConfig, checkpoints, choose_compile, choose_device, choose_dtype, load_model, newest_whole, peak_flops,
                   read_state, remove_checkpoint, restore, save_checkpoint, set_up, synchronize, upcast)
from prepare import (DATASETS, GPT2_MODELS, Shards, bits_per_byte, check_data, data_hash, data_name, find_or_prepare, gpt2_weights,
                     read_meta, window_starts)
from sample import LOG_BINS, SEEN, diagnose, first_not_finite, peek
from tokenizer import load_tokenizer

# -----------------------------------------------------------------------------
# data
dataset = 'python'      # a name or path that prepare.py knows, or a data folder
tokenizer = 'bpe'       # bpe, char, byte, word, gpt2, or the path of a tokenizer.json
vocab_size = 4096       # of bpe and word
# the run
out_dir = ''            # where to write; '': out/<dataset>, or -2, -3, ... after it if that is taken
init_from = 'scratch'   # scratch, resume, auto (resume if out_dir holds a checkpoint), gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a
                        # folder: a checkpoint, or a Llama, Qwen3 or GPT-2 of Hugging Face
max_iters = 1300        # optimizer steps
max_minutes = 0.0       # if above 0, the schedule comes to its end in this time, or at max_iters, whichever is first
eval_interval = 400     # steps between evaluations, each followed by a checkpoint
eval_tokens = 32768     # validation tokens per evaluation; 0: all. the last evaluation always reads all
eval_only = False       # evaluate and stop
log_interval = 50       # steps between lines
diagnostics = False     # with each evaluation: histograms of activations, gradients and weights, updates, dead units, entropy
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
optimizer = 'muon'      # muon (for the matrices of the blocks; the others: adamw), adamw, adam, rmsprop, adagrad, momentum, sgd
lr_schedule = 'cosine'  # cosine, or find: from learning_rate / 100,000 up to it, to see how high it may be
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
timeout = 600           # seconds after which a process that the others wait for is taken for dead
# wandb
wandb_log = False
wandb_project = 'gpt'
wandb_run_name = ''     # '': the name of the folder
# -----------------------------------------------------------------------------
config = configure(globals())

STARTS = 'scratch', 'resume', 'auto'        # of init_from: whose tokenizer is the knob's

# -----------------------------------------------------------------------------
# the optimizers: one step for parameters p with gradients g and moments m and v, in place, as torch.optim computes it. decay
# is the weight decay; at step t from 1, bias1 = 1 - beta1^t and bias2 = 1 - beta2^t

def sgd(p, g, m, v, lr, decay, bias1, bias2, beta1, beta2, eps):
    """Down the gradient, of the loss plus decay / 2 |p|^2."""
    p.sub_(lr * (g + decay * p))

def momentum(p, g, m, v, lr, decay, bias1, bias2, beta1, beta2, eps):
    """Down a sum of gradients that fades with beta1 (Polyak, 1964)."""
    m.mul_(beta1).add_(g + decay * p)
    p.sub_(lr * m)

def adagrad(p, g, m, v, lr, decay, bias1, bias2, beta1, beta2, eps):
    """A rate for each weight: the more it has been moved, the lower (Duchi, Hazan and Singer, 2011)."""
    g = g + decay * p
    v.addcmul_(g, g)
    p.sub_(lr * g / (v.sqrt() + eps))

def rmsprop(p, g, m, v, lr, decay, bias1, bias2, beta1, beta2, eps):
    """AdaGrad with a mean of squares that fades with beta2, so that the rate does not die (Hinton's lecture 6e, 2012)."""
    g = g + decay * p
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    p.sub_(lr * g / (v.sqrt() + eps))

def adam(p, g, m, v, lr, decay, bias1, bias2, beta1, beta2, eps):
    """RMSProp with momentum, both unbiased from the first step on (arXiv:1412.6980, algorithm 1)."""
    adamw(p, g + decay * p, m, v, lr, 0.0, bias1, bias2, beta1, beta2, eps)

def adamw(p, g, m, v, lr, decay, bias1, bias2, beta1, beta2, eps):
    """Adam, whose weight decay is not part of the gradient (arXiv:1711.05101, algorithm 2)."""
    p.mul_(1 - lr * decay)
    m.lerp_(g, 1 - beta1)                                   # m = beta1 m + (1 - beta1) g
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)           # v = beta2 v + (1 - beta2) g^2
    p.sub_(lr / bias1 * m / (v.sqrt() / bias2 ** 0.5).add_(eps))

RULES = {rule.__name__: rule for rule in (sgd, momentum, adagrad, rmsprop, adam, adamw)}

class PlainOptimizer(torch.optim.Optimizer):
    """One of the rules, tensor by tensor. Training runs the faster form below."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            for p in (p for p in group['params'] if p.grad is not None):
                state = self.state[p] = self.state[p] or dict(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state['t'] += 1
                self.rule(p, p.grad, state['m'], state['v'], group['lr'], group['weight_decay'],
                          *(1 - beta ** state['t'] for beta in group['betas']), *group['betas'], group['eps'])
        return loss

SGD, Momentum, AdaGrad, RMSProp, Adam, AdamW = (type(rule, (PlainOptimizer,), dict(rule=staticmethod(RULES[rule]))) for rule in RULES)

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

class FlatOptimizer:
    """
    One of the rules with clipping for all parameters of a model at once. Weights p, gradients g and moments m, v are one
    tensor each, of which those of the model become views: two passes over memory clip, update and set the gradients to
    zero, and one message sums them over processes. Matrices have weight decay. With 'muon' those of the blocks, which come
    last and have no v, take Muon's step, and the others AdamW's.

    A gradient that is not finite changes nothing from that step on (alive is 0; steps counts up to it, and it stays in g),
    and nobody waits to know it. With float16 it halves loss_scale instead, by which the loss is multiplied and which doubles
    every 2,000 steps (arXiv:1710.03740, section 3.2). The `extra` last numbers of g are the caller's: they are summed with it.
    """

    def __init__(self, model, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, extra=0, rule='adamw'):
        hidden = lambda name, p: rule == 'muon' and p.dim() >= 2 and name.startswith('h.')
        params = sorted(model.named_parameters(), key=lambda item: (hidden(*item), item[1].dim() < 2))
        self.shapes, place = {name: p.shape for name, p in params}, params[0][1].device
        sizes = [-(-p.numel() // 64) * 64 for _, p in params]       # each begins where vectors of the hardware may
        self.starts, n = [0, *itertools.accumulate(sizes)], -(-sum(sizes) // 4096) * 4096
        matrices, rest = (sum(s for s, item in zip(sizes, params) if not hidden(*item) and item[1].dim() >= d) for d in (2, 0))
        self.p, self.g, self.m, self.v = (torch.zeros(size, device=place) for size in (n, n + extra, n, rest))
        self.extra, self.rule = self.g[n:], RULES['adamw' if rule == 'muon' else rule]
        self.betas, self.eps, self.weight_decays = betas, eps, (weight_decay, 0.0)
        self.parts = [[x[s] for x in (self.p, self.g, self.m, self.v)] for s in (slice(matrices), slice(matrices, rest))]
        self.hidden, self.dtype = {}, model.compute_dtype       # {shape: [(p, g, m), ...]} of the matrices that Muon updates
        for (name, param), *views in zip(params, *(self.views(x).values() for x in (self.p, self.g, self.m))):
            views[0].copy_(param.data)
            param.data, param.grad = views[:2]
            if hidden(name, param):     # queries, keys and values are matrices of their own
                a, C = param.shape
                for part in zip(*(x.split((C, (a - C) // 2, (a - C) // 2) if 'c_attn' in name else a) for x in views)):
                    self.hidden.setdefault(part[0].shape, []).append(part)
        self.lr, self.t, self.steps, self.loss_scale, self.alive = (torch.tensor(x, device=place) for x in (0.0, 0.0, 0.0, 0.0, True))
        self.scaled = model.compute_dtype == torch.float16
        self.compile(False), self.reset()

    def reset(self):
        """Forgets all steps."""
        [x.zero_() for x in (self.g, self.m, self.v, self.t, self.steps)]
        self.alive.fill_(True), self.loss_scale.fill_(65536.0 if self.scaled else 1.0)

    def compile(self, on=True):
        eager = self.update_in_pieces if self.p.device.type == 'cpu' else functools.partial(self.update_where, size=1 << 24)
        self.update, self.muon = [torch.compile(f, dynamic=False) for f in (self.update_where, self.update_hidden)] if on else \
            [eager, self.update_hidden]

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
        self.steps += self.alive
        if self.scaled:
            self.loss_scale.mul_(torch.where(ok, 1 + (self.t % 2000 == 0).float(), 0.5))
            self.alive.logical_and_(self.loss_scale > 1e-3)
        else:
            self.alive.copy_(ok)
        bias1, bias2 = (-torch.expm1(self.t * math.log(max(beta, 1e-30))) for beta in self.betas)     # 1 - beta^t
        lr = self.lr.fill_(lr)
        if self.hidden:
            self.muon(ok, self.alive, factor, lr)
        self.update(ok, self.alive, factor, lr, bias1, bias2)
        return norm

    def update_hidden(self, ok, clear, factor, lr):
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
                for x, y in ((p, torch.where(ok, new_p, p)), (m, torch.where(ok, new_m, m)), (g, torch.where(clear, 0.0, g))):
                    x.copy_(y)

    def update_where(self, ok, clear, factor, lr, bias1, bias2, size=1 << 62):
        """The whole update as one expression, which a compiler makes one pass over memory."""
        for part, decay in zip(self.parts, self.weight_decays):
            for p, g, m, v in zip(*(x.split(size) for x in part)):
                new = [x.clone() for x in (p, m, v)]
                self.rule(new[0], g * factor, *new[1:], lr, decay, bias1, bias2, *self.betas, self.eps)
                for x, y in zip((p, m, v), new):
                    x.copy_(torch.where(ok, y, x))
                g.copy_(torch.where(clear, 0.0, g))

    def update_in_pieces(self, ok, clear, *numbers):
        """The same without a compiler, in pieces that fit the cache of a CPU."""
        factor, lr, bias1, bias2 = map(float, numbers)
        for part, decay in zip(self.parts, self.weight_decays) if ok else ():
            for p, g, m, v in zip(*(x.split(1 << 16) for x in part)):
                self.rule(p, g.mul_(factor), m, v, lr, decay, bias1, bias2, *self.betas, self.eps)
        if clear:
            self.g.zero_()

@torch.no_grad()
def clip_grad_norm(params, max_norm):
    """Scales all gradients so that their joint L2 norm is at most max_norm (0: does not). -> the norm before, on the device."""
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

def check_batch(world_size):
    """Raises UserError where the global batch does not divide among processes and micro-batches."""
    if batch_size < 1 or batch_size % world_size:
        near = max(batch_size // world_size, 1) * world_size
        raise UserError(f'batch_size = {batch_size} does not divide among {world_size} processes: take {near} or {near + world_size}')
    share = batch_size // world_size
    if micro_batch_size and share % micro_batch_size:
        near = sorted((m for m in range(1, share + 1) if share % m == 0), key=lambda m: abs(m - micro_batch_size))[:2]
        raise UserError(f'micro_batch_size = {micro_batch_size} does not divide the {share} sequences of a process: take one of {near}')

# -----------------------------------------------------------------------------
# evaluation

@torch.no_grad()
def evaluate(model, fast, shards, T, micro, max_tokens, place, rank=0, world_size=1, stop=None):
    """
    Mean loss in nats per token over the first max_tokens (0: all) of a split, the same non-overlapping windows every
    time, and the same for any number of processes. fast: the model, compiled or not, for batches of the usual shape. None
    where a signal came in between.
    """
    model.eval()
    n = min(len(shards) - 1, max_tokens or len(shards))         # every token but the first is a target
    starts = list(range(0, n - T + 1, T))
    batches = [(starts[i:i + micro], T) for i in range(0, len(starts), micro)]
    rest = n - len(starts) * T
    if rest and (not max_tokens or not starts):                 # the last, shorter window
        batches.append(([len(starts) * T], rest))
    total = torch.zeros(2, dtype=torch.float64)                 # sum of losses, number of targets
    losses, heard = [torch.zeros((), device=place)], None
    for i in range(0, len(batches), world_size):
        asked = stop.signal if stop else 0
        if world_size > 1:      # all give up after the same batch
            flag = torch.full((1,), float(asked), device=place)
            all_reduce(flag)
            asked, heard = heard and heard()[0], read_later(flag, place)
        if asked:
            return model.train() and None
        for starts, length in batches[i:i + world_size][rank:rank + 1]:
            x, y = shards.batch(starts, length, place)
            losses.append((fast if x.shape == (micro, T) else model)(x, y)[1] * y.numel())
            total[1] += y.numel()
    total[0] = torch.stack(losses).cpu().double().sum()
    if world_size > 1:
        total = total.to(place if place.startswith('cuda') else 'cpu')
        all_reduce(total)
    model.train()
    return float(total[0] / total[1])

# -----------------------------------------------------------------------------
# the run on disk

def choose_out_dir(writing):
    """
    out_dir, or the next free out/<dataset>; for a resume the newest of those. Who writes owns it from then on. Raises
    UserError if it is taken, or if there is nothing to resume.
    """
    resuming, folder = init_from in ('resume', 'auto'), Path(out_dir)
    if not out_dir:
        name = data_name(dataset)
        runs = [p for p in Path('out').glob('*') if re.fullmatch(re.escape(name) + r'(-\d+)?', p.name) and checkpoints(p)]
        names = (name if i == 1 else f'{name}-{i}' for i in itertools.count(1))
        folder = max(runs, key=lambda p: p.stat().st_mtime) if resuming and runs else next(
            Path('out') / n for n in names if not any(p.name != '.lock' for p in (Path('out') / n).glob('*')))
    if init_from == 'resume' and not checkpoints(folder):
        raise UserError(f'there is no checkpoint in {folder} to resume; `ls out` shows the runs')
    if writing:
        lock(folder / '.lock', f'another process trains in {folder}: wait for its end, stop it, or give another --out_dir')
    if not resuming and (folder / 'config.py').exists():
        raise UserError(f'{folder} already holds a run: continue it with --init_from={"resume" if checkpoints(folder) else "auto"}, '
                        f'or give another --out_dir')
    return folder

def suggest_lr(log):
    """A third of the rate at which the loss of a range test, as a mean of some steps, was lowest."""
    lr, loss = torch.tensor([[e['lr'], e['loss']] for e in log if 'find' in e]).T
    n = -(-len(lr) // 10)
    return float(lr[int(loss.nan_to_num(math.inf).unfold(0, n, 1).mean(1).argmin()) + n // 2]) / 3

def draw_curves(logs, path):
    """
    One picture of runs, {name: entries of its log}: loss against steps, tokens and time, gradient norm, learning rate, and how
    they ended. Of one run: its speed, what diagnostics found, and of a range test loss against the rate.
    """
    try:
        from matplotlib import colormaps, figure
    except ImportError:
        return say(f'no {path}: pip install matplotlib')
    alone = next(iter(logs.values())) if len(logs) == 1 else []
    looks, found = ([e for e in alone if key in e] for key in ('entropy', 'find'))
    axes = (picture := figure.Figure(figsize=(15, 14 if looks else 7), layout='constrained')).subplots(4 if looks else 2, 3).flatten()
    plot = lambda ax, x, y, rows, i, *style, **kw: ax.plot([e.get(x) for e in rows if y in e], [e[y] for e in rows if y in e], *style,
                                                           lw=1, ms=4, color=colormaps['tab20'](i * 2 % 20 + i // 10 % 2), **kw)
    for ax, x, y in zip(axes, ('step', 'lr' if found else 'tokens', 'seconds', 'step', 'step', 'step' if alone else 'val_loss'),
                        ('loss', 'loss', 'loss', 'grad_norm', 'lr', 'tokens_per_second' if alone else 'run')):
        for i, (name, log) in enumerate((name.replace('$', r'\$'), log) for name, log in logs.items()):
            log = [dict(e, run=name) for e in log if x in e][-1:] if y == 'run' else log
            plot(ax, x, y, log, i, *'o' * (y == 'run'), label=name), plot(ax, x, 'val_loss', log if y == 'loss' else [], i, 'o--')
        ax.set(title=f'{y} by {x}', xscale='log' if x == 'lr' else 'linear', **(dict(yscale='log') if y in ('grad_norm', 'lr') else {}))
        data = [z for line in ax.lines for z in (line.get_ydata() if y == 'loss' else line.get_xdata()) if 'loss' in x + y]
        if losses := sorted(filter(math.isfinite, data)):       # what matters is below
            (ax.set_ylim if y == 'loss' else ax.set_xlim)(0.98 * losses[0], 1.02 * losses[math.ceil(0.9 * len(losses) - 0.9)])
        if x == 'lr':
            ax.axvline(suggest_lr(alone), color='C3', label=f'suggested: {suggest_lr(alone):.1e}')
    for ax, what in zip(axes[6:], SEEN if looks else ()):
        for i, layer in enumerate(looks[-1][what]):
            y = looks[-1][what][layer]
            plot(ax, 'x', 'y', [dict(x=x, y=y) for x, y in (zip(LOG_BINS, y) if type(y) is list else (
                (e['step'], e[what][layer]) for e in looks))], i, label=layer)
        ax.set(title=SEEN[what])
    for ax in axes:
        ax.grid(alpha=0.3), ax.legend(fontsize='x-small') if ax in (axes[0], axes[1], *axes[6:]) else None
    try:
        picture.savefig(path, dpi=110)
    except OSError as e:
        say(f'no {path}: {e.strerror}')

def save(run, step, model, optimizer, eot, tok_path, state):
    """Writes step_<step>/ and drops old checkpoints, but never the best. Raises Diverged where a value is not finite."""
    folder = run / f'step_{step:08d}'
    if not folder.exists():
        if not all(x.sum().isfinite() for x in (optimizer.p, optimizer.m, optimizer.v)):
            raise Diverged(f'a weight or moment is not finite at step {step}: nothing after the last checkpoint was saved')
        tensors = {f'{k}.{name}': x.cpu().clone() for k in 'mv' for name, x in optimizer.views(getattr(optimizer, k)).items()}
        save_checkpoint(folder, model, tok_path, eot, dict(state, step=step, model=asdict(model.config), updates=int(optimizer.t),
                                                           loss_scale=float(optimizer.loss_scale)), tensors)
    evaluations = {e['step']: e['val_loss'] for e in read_log(run / 'log.jsonl') if 'val_loss' in e} | dict(state['val'])
    best = min(evaluations, key=evaluations.get, default=step)
    for old in checkpoints(run)[:-keep_checkpoints]:
        if int(old.name[5:]) != best:
            remove_checkpoint(old)
    return folder

# -----------------------------------------------------------------------------
# what is said at the start and at the end

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
                if fast is not model and place != 'cpu':    # what evaluates is compiled now, when nothing can be lost yet
                    with torch.no_grad():
                        fast.eval()(*data.batch([0] * n, T, place)), fast.train()
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
            all_reduce(found, 'MIN')
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
        except Exception as e:      # compilers fail in many ways
            if isinstance(e, UserError):
                raise
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

def says(loss, bpb):
    return f'validation loss {loss:.4f}' + ('' if bpb is None else f' | {bpb:.3f} bits per byte')

def print_ending(run, folder, step, data, loss, bpb, meta, seconds):
    say(f'\n{says(loss, bpb)} over the whole split' + (' (gzip -9 needs {gzip_bpb:.2f}, xz -9 {xz_bpb:.2f} for the same text)'
                                                        .format(**meta['val']) if bpb else ''))
    say(f'data            {data}\ntime            {duration(seconds)}\ncheckpoint      {folder}\n'
        f'sample from it  python sample.py --out_dir={run}')
    say(f'train further   python train.py {run}/config.py --init_from=resume ' +
        (f'--max_iters={2 * max_iters}' if step >= max_iters else f'--max_minutes={2 * max_minutes:g}'))

# -----------------------------------------------------------------------------

def main():
    started = time.perf_counter()
    rank, local_rank, world_size = setup_ranks()
    tell = say if rank == 0 else lambda *args: None

    check_knobs()       # what can be wrong is found before any data are prepared
    fields = {k: config[k] for k in GPTConfig.__dataclass_fields__ if k in config and k != 'vocab_size'}
    GPTConfig(**fields)
    place, why_place = choose_device(device, local_rank)
    type_, why_type = choose_dtype(dtype, place)
    check_batch(world_size)
    writing = rank == 0 and not eval_only
    run = choose_out_dir(writing)

    # data
    kind = 'gpt2' if init_from in GPT2_MODELS else tokenizer if init_from in STARTS else str(Path(init_from) / 'tokenizer.json')
    folder = find_or_prepare(dataset, kind, vocab_size)
    meta = check_data(folder, read_meta(folder))
    train_data, val_data = Shards(folder, 'train', meta), Shards(folder, 'val', meta)
    tok_path = folder / 'tokenizer.json'
    tok = load_tokenizer(tok_path) if tok_path.exists() else None
    data = f'{meta["source"]}, hash {data_hash(meta)}, in {folder}'

    # model
    stop = None if eval_only else StopSignal()
    set_up(place), connect(place, world_size, timeout)
    clock = dict(saved=time.perf_counter())
    resumed = newest_whole(run, tell) if init_from in ('resume', 'auto') and checkpoints(run) else None
    if world_size > 1:
        all_reduce(torch.zeros(1, device=place))    # rank 0 writes into the folder only when all have looked
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
    model.to(place)
    state = read_state(resumed) if resumed else \
        dict(step=0, windows=0, val=[], seconds=0.0, began=0.0, data=data_hash(meta), optimizer=config['optimizer'], auto={})
    step = first = state['step']
    # what 'auto' and 0 meant before a resume is kept, so that the sums are the same, unless the kind of machine is not
    auto = state['auto'] if state['auto'].get('device') == place.split(':')[0] else {}
    if dtype == 'auto' and auto:
        type_, why_type = auto['dtype'], 'as before'
    model.compute_dtype = getattr(torch, type_)
    optimizer = FlatOptimizer(model, (beta1, beta2), adam_eps, weight_decay, extra=3, rule=config['optimizer'])
    model.train()

    # what is going to happen
    per_step = batch_size * T
    tell(f'data      | {data}')
    tell(f'device    | {place} ({why_place})' + (f', {world_size} processes' if world_size > 1 else ''))
    tell(f'dtype     | {type_} ({why_type}), weights and optimizer float32')
    tell(f'attention | {attention}' + (' (fused kernels of torch)' if attention == 'flash' else ' (as asked)'))
    tell(f'model     | {model.num_params():,} parameters, vocabulary {model.config.vocab_size:,}, context {T}')
    tell(f'data use  | {max_iters:,} steps, {max_iters * per_step:,} tokens, '
         f'{max_iters * per_step / len(train_data):.2f} epochs of {len(train_data):,} tokens')
    knobs = dict(knobs_of_run(run, model, T, folder), processes=world_size)
    if changed := [f'{k} {state["knobs"][k]!r} -> {v!r}' for k, v in knobs.items() if state.get('knobs', {}).get(k, v) != v]:
        tell('changed   | ' + ', '.join(changed))
    state['knobs'] = knobs
    evaluated = lambda: any(e[0] == step for e in state['val'])
    if is_complete(step, state['seconds']) and not eval_only and evaluated():
        tell(f'{run} is complete at step {step}; train further with a larger --max_iters or --max_minutes')
        return dict(run=run, step=step)
    steps = 0 if eval_only else max_iters - step
    fast, compiled, micro, seconds = find_speed(model, optimizer, train_data, T, place, world_size, steps, auto, tell)
    if resumed:
        restore(resumed, optimizer, state)
    grad_accum = batch_size // world_size // micro
    state['auto'] = dict(device=place.split(':')[0], dtype=type_, compile=compiled, micro_batch_size=micro)
    tell(f'batch     | {batch_size} sequences, {per_step:,} tokens per step (processes x micro-batches x sequences: '
         f'{world_size} x {grad_accum} x {micro})')
    tell(f'time      | about {duration(seconds)} here' +
         (f'; smaller: {smaller_config()}' if seconds > 12 * 3600 and not place.startswith('cuda') else ''))

    # files
    if writing:
        start_files(run, resumed, step, knobs)
        tell((f'resumed {resumed}, ' if resumed else '') + f'writing {run}; stop with Ctrl-C, go on with: '
             f'python train.py {run}/config.py --init_from=resume\n')
    wandb = Wandb(wandb_log and writing, project=wandb_project, name=wandb_run_name or run.name, config=config, dir=str(run))

    def log(entry):
        if writing:
            wandb.call('log', {k: v for k, v in entry.items() if k != 'step'}, step=entry['step'])
            try:
                with open(run / 'log.jsonl', 'a', encoding='utf-8') as f:
                    f.write(json.dumps(entry) + '\n')
            except OSError as e:
                tell(f'log.jsonl lacks step {entry["step"]}: {e.strerror}')

    def micro_batches(step, windows):
        """This process's share of a step, micro-batch by micro-batch, with the random numbers of dropout that belong to it."""
        starts = window_starts(windows, batch_size, len(train_data), T, seed)[rank * micro * grad_accum:]
        for i in range(grad_accum):
            if dropout:     # by the number of the micro-batch in the global batch, so that any split of it is the same
                torch.manual_seed(((seed * 1_000_003 + step) * 1_000_003 + rank * grad_accum + i) % 2 ** 63)
            yield train_data.batch(starts[i * micro:(i + 1) * micro], T, place)

    def check():
        """Raises Diverged, in all processes, if a gradient or a weight is not finite in one of them."""
        if not check_alike(step, optimizer, world_size):
            bad = first + int(optimizer.steps) - 1          # nothing has changed since
            what = first_not_finite(model, micro_batches(bad, state['windows'] - (step - bad) * batch_size), float(last), rank, world_size)
            raise Diverged(what and f'at step {bad + 1} the {what} was not finite' + f' in process {rank}' * (world_size > 1) +
                           ', after which no weight changed and nothing was saved: resume with a lower --learning_rate or more --warmup_iters')

    gone = lambda: state['seconds'] + time.perf_counter() - clock['saved']       # seconds of training

    def save_here(must=True):
        """-> the checkpoint, or None where it can not be written and that can wait. Raises UserError where it can not."""
        state['seconds'], clock['saved'] = gone(), time.perf_counter()
        try:
            return save(run, step, model, optimizer, meta['eot'], tok_path, state) if writing else None
        except OSError as e:
            problem = f'step {step} is not saved: {"the disk is full" if disk_is_full(e) else e}'
            if must:
                raise UserError(f'{problem}; mend that and go on with --init_from=resume')
            tell(f'{problem}; training goes on, and the next evaluation saves')

    def evaluate_and_save(max_tokens, must=True):
        """-> (loss, bits per byte, checkpoint), or None if a signal came first"""
        loss = evaluate(model, fast if place != 'cpu' else model, val_data, T, micro, max_tokens, place, rank, world_size, stop)
        if loss is None:
            return None
        if stop:
            stop.limit = math.inf       # saving takes what it takes, and the others wait for it
        check()
        if not math.isfinite(loss):
            raise Diverged(f'the validation loss is {loss} at step {step}: nothing after the last checkpoint was saved; resume with a '
                           f'lower --learning_rate')
        state['val'] = [e for e in state['val'] if e[0] != step] + [[step, loss]]
        log(dict(step=step, val_loss=loss, val_bpb=bits_per_byte(loss, meta), tokens=state['windows'] * T, seconds=gone()))
        saved = None if eval_only else save_here(must)
        if writing:
            draw_curves({run.name: read_log(run / 'log.jsonl')}, run / 'curves.png')
        return loss, bits_per_byte(loss, meta), saved

    # training
    asked, heard, seconds, last, lowest = 0, None, state['seconds'], torch.zeros((), device=place), math.inf
    opening = sample_start or DATASETS.get(dataset, {}).get('start', '')
    flops, peak = model.flops_per_token(T), peak_flops(place) * world_size
    if stop:
        stop.ready = True
    t, t_step = time.perf_counter(), step
    while not (eval_only or is_complete(step, seconds)):
        if step and step % eval_interval == 0 and not evaluated():
            if (result := evaluate_and_save(eval_tokens, must=False)) is None:
                asked = True
                break
            tell(f'step {step} | {says(*result[:2])} | saved {result[2]}')
            if writing and sample_tokens and tok:
                tell('    | ' + peek(model, tok, opening, 1, sample_tokens, seed)[0].replace('\n', '\n    | '))
            t, t_step = time.perf_counter(), step
        begun = time.perf_counter()
        lr = learning_rate * 1e-5 ** (1 - (step + 1) / max_iters) if lr_schedule == 'find' else get_lr(
            schedule(step, seconds, state['began'] or seconds), learning_rate, min_lr, warmup_iters, lr_decay_iters or max_iters)
        loss = torch.zeros((), device=place)
        for x, y in micro_batches(step, state['windows']):
            part = fast(x, y)[1] / (grad_accum * world_size)
            (part * optimizer.loss_scale if type_ == 'float16' else part).backward()
            loss += part.detach()
        asked, seconds = stop.signal, gone()
        if world_size > 1:
            # with the gradients go the loss, and what all must agree on, which is read one step later: no step waits for it
            [x.fill_(y) for x, y in zip(optimizer.extra, (loss, asked / world_size, seconds / world_size))]
            asked, seconds = heard() if heard else (0, state['seconds'])
            if asked:       # all know it from the step before, and leave this one
                break
            all_reduce(optimizer.g)
            loss, heard = optimizer.extra[0].clone(), read_later(optimizer.extra[1:], place)
        state['began'] = state['began'] or seconds      # on the clock of max_minutes
        last = torch.where(optimizer.alive, loss, last)
        look = diagnostics and writing and 0 in ((step + 1) % eval_interval, step + 1 - max_iters)
        before = [optimizer.p.clone(), optimizer.g / optimizer.loss_scale] if look else None
        norm = optimizer.step(lr, grad_clip)
        if before:
            log(dict(step=step, **diagnose(model, x[:4096 // T or 1], *map(optimizer.views, (*before, optimizer.p)))))
        step, state['windows'] = step + 1, state['windows'] + batch_size
        took = time.perf_counter() - begun
        stop.limit = max(stop.patience, 3 * took)
        if heard and took > 1:      # a long step: better wait for it than for the next one
            asked = heard()[0]

        if step % log_interval == 0 or step == 1 or step == max_iters:
            loss, norm, now = float(loss), float(norm), time.perf_counter()     # waits for the device
            ms, rate = 1e3 * (now - t) / (step - t_step), per_step * (step - t_step) / (now - t)
            t, t_step = now, step
            mfu = rate * flops / peak if peak else None
            tell(f'step {step} | loss {loss:.4f} | lr {lr:.1e} | norm {norm:.2f} | {ms:.1f} ms | '
                 f'{short(rate)} tok/s' + (f' | mfu {100 * mfu:.1f}%' if mfu else ''))
            log(dict(step=step - 1, tokens=state['windows'] * T, loss=loss, lr=lr, grad_norm=norm, tokens_per_second=rate, mfu=mfu,
                     seconds=gone(), **({'find': True} if lr_schedule == 'find' else {})))
            if lr_schedule == 'find' and not (step < max_iters and loss < (lowest := min(lowest, loss)) + 1 and math.isfinite(norm)):
                break
            check()
        if asked:
            break

    finding = lr_schedule == 'find' and not eval_only
    if asked or not finding and (result := evaluate_and_save(0)) is None:
        stop.limit = math.inf
        check()
        saved = save_here()
        tell(f'\nstopped at step {step}; saved {saved}\ngo on with: python train.py {run}/config.py --init_from=resume')
        wandb.finish()
        signum = torch.tensor([stop.signal], device=place)
        if world_size > 1:      # perhaps not all have heard it
            all_reduce(signum, 'MAX')
        leave(place, world_size), stop.end()        # in this order: a late signal must not take one that the others wait for
        sys.exit(128 + int(signum))
    loss, bpb, saved = (None, None, None) if finding else result
    if not eval_only and world_size == 1:
        stop.end()
    if finding and writing:
        draw_curves({run.name: (found := read_log(run / 'log.jsonl'))}, run / 'curves.png')
        tell(f'\na third of where the loss was lowest: --learning_rate={suggest_lr(found):.1e}; see {run}/curves.png')
    elif eval_only:
        tell(says(loss, bpb))
    elif writing:
        for text in peek(model, tok, opening, 4, 3 * sample_tokens, seed) if sample_tokens and tok else ():
            tell('-' * 40 + '\n' + text)
        print_ending(run, saved, step, data, loss, bpb, meta, time.perf_counter() - started)
    wandb.finish(), leave(place, world_size)
    return dict(run=run, step=step, val_loss=loss, val_bpb=bpb)

def knobs_of_run(run, model, T, folder):
    """The knobs that start a run again."""
    knobs = dict(config, out_dir=run.as_posix())
    if init_from in ('resume', 'auto'):
        knobs['init_from'] = 'scratch'
    elif init_from != 'scratch':        # what it began with has won over the knobs
        knobs.update({k: v for k, v in asdict(model.config).items() if k in config}, block_size=T, dataset=folder.as_posix())
    return knobs

def start_files(run, resumed, step, knobs):
    """Writes config.py, and drops from a run what came after a resumed checkpoint; damaged ones are put aside."""
    write_whole(run / 'config.py', as_file({k: v for k, v in knobs.items() if k in config}))
    for partial in run.glob('.step_*.partial'):
        shutil.rmtree(partial)
    for later in checkpoints(run):
        if int(later.name[5:]) > step:
            later.rename(run / f'damaged_{later.name}_{time.time():.0f}')
    cut_log(run / 'log.jsonl', step)

def check_knobs():
    check_ranges(config, (1, 10 ** 18, 'max_iters eval_interval log_interval keep_checkpoints'), (1, 10 ** 6, 'batch_size'),
                 (0, 10 ** 18, 'eval_tokens micro_batch_size warmup_iters lr_decay_iters seed'), (0, 10 ** 6, 'sample_tokens max_minutes'),
                 (0, 1e38, 'weight_decay grad_clip learning_rate min_lr adam_eps'))
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise UserError(f'beta1 = {beta1} and beta2 = {beta2} must be from 0 to 1, such as 0.9 and 0.95')
    for name, known in dict(optimizer=('muon', *RULES), lr_schedule=('cosine', 'find'), compile=('auto', True, False)).items():
        if config[name] not in known:
            raise UserError(f'{name} = {config[name]!r}: give one of {", ".join(map(str, known))}')
    if init_from not in (*STARTS, *GPT2_MODELS) and not os.path.isdir(init_from):
        raise UserError(f'init_from = {init_from!r}: give one of {", ".join((*STARTS, *GPT2_MODELS))}, or the folder of a model')
    if not os.path.exists(dataset) and dataset not in DATASETS:
        raise UserError(f'there is no data set {dataset!r}: give a path that exists, or one of {", ".join(DATASETS)}')

def check_resumed(found, wanted, folder, data):
    """Raises UserError, naming the knob, if a checkpoint does not fit the knobs or the data it is resumed with."""
    before = read_state(folder)
    if before.get('data') != data:
        other = [f'{k} = {before["knobs"][k]!r}, not {config[k]!r}' for k in ('dataset', 'tokenizer', 'vocab_size')
                 if before['knobs'].get(k, config[k]) != config[k]]
        raise UserError(f'{folder} was trained on other data ({", ".join(other) or "its tokens have changed"}): resume it as it '
                        f'began, or start a new run with --init_from={folder}')
    for k, v in dict(asdict(found), optimizer=before['optimizer']).items():
        knob = dict(asdict(wanted), optimizer=config['optimizer'])[k]
        differs = knob > v if k in ('block_size', 'vocab_size') else knob != v
        if differs and k not in ('attention', 'dropout'):
            raise UserError(f'{folder} has {k} = {v}, not {knob}: resume it with its own config.py, or start a new run with '
                            f'--init_from={folder}')

if __name__ == '__main__':
    launch(main)
