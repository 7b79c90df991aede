"""
Trains a GPT on whatever device there is.

    python train.py                                        # a small model of Python code, 2 minutes on 2 CPU cores
    python train.py config/train_tinystories.py            # an experiment; --key=value overrides any option
    python train.py --dataset=my_text.txt                  # your own text: a file, a .jsonl, a folder
    python train.py out/python/config.py                   # resumes a run
    torchrun --nproc_per_node=4 train.py                   # one process per GPU, or on the cores (not on Windows)

It prepares missing data, prints a line every log_interval steps (with the MFU on a known GPU)

    step 350 | loss 4.0213 | norm 0.38 | lr 6.0e-03 | 82.4 ms | 18,652 tok/s | 0:01:14 left

and writes out/<run>/: checkpoints step_00001250/ (Hugging Face folders), config.py, log.jsonl, curves.png.
"""
import atexit
import inspect
import json
import math
import os
import signal
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from tqdm import tqdm

import prepare
from configurator import (Diverged, Output, UserError, as_file, command, configure, launch, lock, partial_path,
                          read_json, visible, write)
from model import (GPT, UNSAVED_FIELDS, GPTConfig, Replayed, checkpoints, choose_compile, choose_device, choose_dtype,
                   device_name, find_folder, keep_from, load_model, newest_intact, peak_flops, remove_checkpoint,
                   save_checkpoint, set_up)
from prepare import Shards, data_hash, data_name, find_or_prepare, read_meta
from sample import generate, prompt_ids, texts_of
from tokenizer import find_ends, load_tokenizer

# -----------------------------------------------------------------------------
# data
dataset = 'python'      # (path) a name or path that prepare.py takes, or a data folder
tokenizer = 'bpe'       # (path) bpe, char, byte, word, gpt2, or the path of a tokenizer.json
vocab_size = 4096       # (>= 1, < 1e9) for bpe and word
# the run
out_dir = ''            # (path) folder of the run ('': out/<dataset>, or if that is taken, out/<dataset>-2, ...)
init_from = 'scratch'   # (path) scratch, resume, auto (resume if out_dir has a checkpoint), or another model to start
                        # from: a run, a checkpoint, a Llama, Qwen3 or GPT-2 in a folder, or gpt2 or owner/model on the
                        # hub (auto:gpt2 resumes if it can, and otherwise starts from gpt2)
max_iters = 1250        # (>= 1, < 1e10) optimizer steps
max_minutes = 0.0       # (>= 0, < 1e8) if above 0, the schedule ends after this time or at max_iters, whichever comes
                        # first. The clock starts after the first step. The final evaluation may take as long again
eval_interval = 250     # (>= 1, < 1e10) steps between evaluations, each of which is followed by a checkpoint
eval_tokens = 32768     # (>= 0, < 1e15) validation tokens per evaluation, spread evenly over the split (0: all)
eval_only = False       # only evaluate the complete validation split
log_interval = 50       # (>= 1, < 1e10) steps between printed lines
keep_checkpoints = 2    # (>= 1, < 1e10) number of newest checkpoints to keep, besides the best
sample_tokens = 64      # (>= 0, < 1e7) tokens of sample text printed at each evaluation (0: none)
sample_start = ''       # beginning of the sample text ('': a new document)
seed = 1                # (>= 0, < 1e18) seeds the weights, the data order and dropout
# the optimizer
batch_size = 12         # (>= 1, < 1e8) sequences per optimizer step, over all devices
micro_batch_size = 0    # (>= 0, < 1e8) sequences per device at once (0: 4,096 tokens; on a GPU, 65,536 if they fit)
optimizer = 'muon'      # (muon, adamw, adam, rmsprop, adagrad, momentum or sgd) muon is for matrices in blocks, with
                        # adamw for the rest
learning_rate = 6e-3    # (>= 0, < 1e38) highest rate, reached after warmup_iters
adamw_scale = 4.0       # (>= 0, < 1e9) with muon: rate multiplier for head (also if tied), norms, biases, positions
embed_scale = 20.0      # (>= 0, < 1e9) with muon: rate multiplier for value embeddings, and for tokens' unless tied
min_lr = -1.0           # (>= -1, < 1e9) learning rate at max_iters, at most learning_rate (below 0: a twentieth of it)
warmup_iters = 40       # (>= 0, < 1e10) steps in which the rate rises from 0
lr_decay = 'linear'     # (linear or cosine) linear: in the last 65% of the steps
weight_decay = 0.1      # (>= 0, < 1e9) for matrices (with muon, only those that it updates), not for norms and biases
beta1 = 0.9             # (>= 0, < 1) decay of the running mean of gradients (muon uses 0.95 for its matrices)
beta2 = 0.99            # (>= 0, < 1) decay of the running mean of their squares
adam_eps = 1e-8         # (>= 1e-30, < 1) keeps steps from dividing by 0
grad_clip = 1.0         # (>= 0, < 1e30) largest gradient norm (0: no clipping)
# the machine
device = 'auto'         # auto, cpu, cuda, cuda:1, mps
dtype = 'auto'          # (auto, float32, bfloat16 or float16) of activations and matmuls; weights are float32
compile = 'auto'        # (True, False or auto) auto: if it saves time
timeout = 600           # (>= 1, < 1e9) seconds to wait for another process before assuming it is dead
wandb_log = False       # log to Weights & Biases, too
wandb_project = 'gpt'
# The options of prepare.py and the fields of GPTConfig in model.py are options here, too.
# -----------------------------------------------------------------------------
RANK = int(os.environ.get('RANK', 0))               # number of this process, set by torchrun
LOCAL_RANK = int(os.environ.get('LOCAL_RANK', 0))   # its number on this machine
WORLD_SIZE = int(os.environ.get('WORLD_SIZE', 1))   # number of processes

if __name__ == '__main__':
    # Only the first process prints. An Output keeps going if the terminal closes.
    sys.stdout, sys.stderr = Output(None if RANK else sys.stdout), Output(sys.stderr)
config = configure(globals(), prepare, GPTConfig)
# Functions read options as globals, or as config['name'] if only another file lists it, as model.py does block_size, or
# if a local variable has this name, such as device.

# -----------------------------------------------------------------------------
# Update rules. Each steps in place, as in torch.optim, for weights p with gradients g. The parameters between decay
# (the weight decay) and * are its moments: an Optimizer makes those that a rule names, with p's shape and zeros, and
# saves them. A new constant is a parameter after the *, with a default.
# Except for muon, p is a long vector of the group's weights, so a rule must work number by number. At step t = 1, 2,
# ..., Adam's means are divided by correction1 = 1 - beta1^t and correction2 = 1 - beta2^t.

def sgd(p, g, lr, decay, **_):
    """Steps down the gradient of the loss + decay / 2 |p|^2."""
    p.sub_(lr * (g + decay * p))

def momentum(p, g, lr, decay, m, *, beta1, **_):
    """Steps down a sum of past gradients that decays by beta1 per step (Polyak, 1964)."""
    m.mul_(beta1).add_(g + decay * p)
    p.sub_(lr * m)

def adagrad(p, g, lr, decay, v, *, eps, **_):
    """Lowers each weight's rate as its squared gradients add up (Duchi, Hazan and Singer, 2011)."""
    g = g + decay * p
    v.addcmul_(g, g)
    p.sub_(lr * g / (v.sqrt() + eps))

def rmsprop(p, g, lr, decay, v, *, beta2, eps, **_):
    """AdaGrad with a decaying mean of squares, so that rates do not vanish (Hinton's lecture 6e, 2012)."""
    g = g + decay * p
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    p.sub_(lr * g / (v.sqrt() + eps))

def adam(p, g, lr, decay, m, v, **others):
    """RMSProp with momentum, with both means unbiased (arXiv:1412.6980, algorithm 1)."""
    adamw(p, g + decay * p, lr, 0.0, m, v, **others)

def adamw(p, g, lr, decay, m, v, *, beta1, beta2, eps, correction1, correction2, **_):
    """Adam with weight decay kept out of the gradient (arXiv:1711.05101, algorithm 2)."""
    p.mul_(1 - lr * decay)
    m.lerp_(g, 1 - beta1)                                   # m = beta1 m + (1 - beta1) g
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)           # v = beta2 v + (1 - beta2) g^2
    p.sub_(lr / correction1 * m / ((v / correction2).sqrt() + eps))

def orthogonalize(x, dtype):
    """
    Returns n matrices with the singular vectors of x (n, a, b), and singular values of 0.7 to 1.2 (tiny ones stay
    smaller). Takes five steps of Muon's Newton-Schulz iteration (kellerjordan.github.io/posts/muon) in dtype.
    """
    if x.size(1) > x.size(2):
        return orthogonalize(x.mT, dtype).mT
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(5):
        s = x @ x.mT
        # x = 3.4445 x + (-4.7750 s + 2.0315 s s) x, in fewer passes over memory
        s = torch.baddbmm(s, s, s, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, s, x, beta=3.4445)
    return x

def muon(p, g, lr, decay, m, *, dtype, beta=0.95, **_):
    """
    Moves matrices p (n, a, b) against their orthogonalized Nesterov momentum, about as far as AdamW would go at the
    same rate (arXiv:2502.16982, equation 4).
    """
    m.lerp_(g, 1 - beta)
    direction = orthogonalize(g.lerp(m, beta), dtype)
    p.mul_(1 - lr * decay)
    p.sub_(lr * 0.2 * max(p.shape[1:]) ** 0.5 * direction)

RULES = {rule.__name__: rule for rule in (adamw, adam, rmsprop, adagrad, momentum, sgd)}
MATRIX_RULES = dict(muon=muon)

def moments_of(rule):
    """moments_of(adamw) -> ['m', 'v'], the parameters between decay and *"""
    return inspect.getfullargspec(rule).args[4:]

@dataclass
class Group:
    """Weights that one rule updates alike. For a matrix rule, they are matrices of one shape."""
    names: list
    rule: object                    # a function in RULES or MATRIX_RULES
    lr_scale: float = 1.0           # multiplies the learning rate, and so the decay
    decay: float = 0.0              # weight decay
    shape: tuple = ()               # of each matrix, for a matrix rule
    flat: list = None               # p, g and the moments of all these weights, each a flat vector

def make_groups(params, tied):
    """
    Returns the Groups of trainable weights (params, by name) that the options ask for. With muon, it takes every matrix
    in a block. tied: whether the embedding is the head, too. For another learning rate, give a layer or an embedding
    its own Group in both returns.
    """
    if optimizer in RULES:
        matrices = [name for name in params if params[name].dim() > 1]
        vectors = [name for name in params if name not in matrices]         # norms and biases
        rule = RULES[optimizer]
        return [Group(matrices, rule, decay=weight_decay), Group(vectors, rule)]

    embeddings, others, by_shape = [], [], defaultdict(list)
    for name, w in params.items():
        if 'embed_values' in name or ('embed_tokens' in name and not tied):
            embeddings.append(name)
        elif '.layers.' in name and w.dim() > 1:
            by_shape[w.shape].append(name)
        else:
            others.append(name)
    return [Group(others, adamw, lr_scale=adamw_scale), Group(embeddings, adamw, lr_scale=embed_scale),
            *[Group(names, MATRIX_RULES[optimizer], decay=weight_decay, shape=shape[-2:])
              for shape, names in sorted(by_shape.items())]]

class Optimizer(torch.optim.Optimizer):
    """
    Updates all weights of a model according to make_groups. The model's weights and their gradients become views of two
    long vectors, p and g: backward() fills g, and changing p changes the model. So clipping is one norm, and processes
    add their gradients in one message. A subclass of torch's Optimizer has zero_grad and satisfies GradScaler.
    """
    def __init__(self, model):
        # p | weights of group 1, one tensor after the other | group 2 | ... | zeros
        # g   their gradients, at the same positions
        params = {name: w for name, w in model.named_parameters() if w.requires_grad}
        self.model, self.groups = model, make_groups(params, model.config.tie_weights)
        self.t = 0              # steps taken
        total = math.ceil(sum(w.numel() for w in params.values()) / 4096) * 4096        # clip views it as 4,096 rows
        vectors = torch.zeros(2, total, device=model.lm_head.weight.device)
        self.p, self.g = vectors
        self.tensors = {}       # saved with the model: m.<name>, v.<name>; add yours after the loop

        end = 0
        for group in self.groups:
            sizes = [params[name].numel() for name in group.names]
            begin, end = end, end + sum(sizes)
            p, g = vectors[:, begin:end]
            letters = moments_of(group.rule)
            group.flat = [p, g, *[torch.zeros_like(p) for _ in letters]]
            parts = [vector.split(sizes) for vector in group.flat]
            for name, p_part, g_part, *moments in zip(group.names, *parts):
                w = params[name]
                w.data = p_part.view_as(w).copy_(w.detach())
                w.grad = g_part.view_as(w)
                for letter, moment in zip(letters, moments):
                    self.tensors[f'{letter}.{name}'] = moment.view_as(w)

        self.p.grad = self.g
        super().__init__([self.p], dict(beta1=beta1, beta2=beta2, eps=adam_eps))        # kept as self.defaults

    def compile(self):
        # Compile each rule. One graph for a step is half as fast; one kernel for all shapes is 4% slower.
        for group in self.groups:
            group.rule = torch.compile(group.rule, dynamic=False)
        torch._dynamo.config.cache_size_limit = 64      # one per matrix shape; the default of 8 is too few

    @contextmanager
    def evaluating(self):
        """
        Context for evaluating, sampling, saving and restoring, in which dropout is off. To use averaged weights there,
        keep the average (at first a copy of p) in `tensors`, and swap its values with p's before and after the yield.
        """
        self.model.eval()
        yield
        self.model.train()

    @torch.no_grad()
    def clip(self, max_norm):
        """Scales the gradient down to a norm of max_norm (0: not at all). Returns the old norm, on the device."""
        # On a CPU, the norm of 30 million float32 numbers at once is off by 0.2%; row by row, it is off by 1e-6.
        norm = self.g.view(4096, -1).norm(dim=1).norm()
        if max_norm:
            self.g.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def step(self, lr):
        self.t += 1
        # No step would change a weight without a Group, or one that model.to(), for example, has moved.
        for name, w in self.model.named_parameters():
            here = w.untyped_storage().data_ptr() == self.p.untyped_storage().data_ptr()
            assert here or not w.requires_grad, f'{name} is in no group, or has moved; make a new Optimizer'
        # Numbers are tensors, because a compiled rule would be compiled again for every new number.
        on_device = partial(self.p.new_full, ())
        for group in self.groups:
            p, g, *moments = [vector.view(-1, *group.shape) for vector in group.flat]
            group.rule(p, g, on_device(lr) * group.lr_scale, group.decay, *moments, **self.defaults,
                       correction1=on_device(1 - self.defaults['beta1'] ** self.t),
                       correction2=on_device(1 - self.defaults['beta2'] ** self.t), dtype=self.model.compute_dtype)

# -----------------------------------------------------------------------------
# A training step

def get_lr(step, last, time_used=0.0):
    """
    Returns the learning rate of a step. It rises by at most learning_rate / warmup_iters from `last`, the rate of the
    step before, so that a finished run warms up again. It falls to min_lr: as half a cosine after warmup_iters (at most
    half of the steps), or linearly over the last 65% of the steps (as in nanochat). time_used is the fraction of
    max_minutes that has passed, which counts if it is ahead of the steps.
    """
    lowest = learning_rate / 20 if min_lr < 0 else min(min_lr, learning_rate)
    left = max(1 - max(step / max_iters, time_used), 0)         # of the run, from 1 to 0
    if lr_decay == 'linear':
        height = min(left / 0.65, 1)
    else:
        falling = 1 - min(warmup_iters / max_iters, 0.5)        # the part of the run in which it falls
        height = 0.5 * (1 - math.cos(math.pi * min(left / falling, 1)))
    rate = lowest + height * (learning_rate - lowest)
    highest = last + learning_rate / max(warmup_iters, 1)           # the warm-up
    return min(rate, highest)

def next_sequences(run):
    """
    Returns where all sequences of a run's next step start, and their length. Their number and length may change from
    step to step. state.tokens is what earlier steps were trained on, but state.step already counts this one.
    """
    return run.train_data.starts(run.state.tokens // run.T, batch_size, run.T, seed), run.T

def micro_batches(run, starts, T, micro):
    """
    Yields this process's share of a step's sequences, in micro-batches with as many tokens as micro of run.T. Take one
    at a time, because each seeds dropout.
    """
    share, size = len(starts) // WORLD_SIZE, micro * run.T // T
    assert share * WORLD_SIZE == len(starts)
    first = RANK * share
    mine = starts[first:first + share]
    for i in range(0, share, size):
        # The forward pass that follows uses this seed. If micro-batches are equally large, dropout does not depend on
        # the number of processes. The factor, a prime, keeps the seeds of different steps and sequences apart.
        torch.manual_seed(((seed * 1_000_003 + run.state.step) * 1_000_003 + first + i) % 2 ** 63)
        yield run.train_data.batch(mine[i:i + size], T, run.device)

def backward(batch, model, scaler, share):
    """
    Adds the gradients of a micro-batch (2, B, T), times its share of the step's sequences, to g. Returns its losses. A
    GPU replays this as a CUDA graph (see Replayed): with train_shakespeare_char.py, 6.0 ms a step on an H200, not 11.2.
    """
    scaler.scale(model(*batch) * share).backward()
    return model.losses

def training_step(model, opt, scaler, batches, sequences, lr, run_backward=backward):
    """
    Runs backward over micro-batches, then steps the optimizer. sequences: total over all processes. Returns numbers, on
    the device, which report() averages over processes: the means of the losses over this one's share of the sequences,
    the gradient norm before clipping, and any that you add.
    """
    opt.zero_grad(set_to_none=False)        # fills g with zeros
    losses = defaultdict(float)
    for batch in batches:
        share = batch.size(1) / sequences
        for name, loss in run_backward(batch, model, scaler, share).items():
            losses[name] += loss * (share * WORLD_SIZE)
    if WORLD_SIZE > 1:
        # Send in the dtype of matmuls. Halving bytes saves an estimated 5 to 10% of a step on 8 GPUs without NVLink.
        message = opt.g.to(model.compute_dtype)
        dist.all_reduce(message)
        opt.g.copy_(message)
    scaler.unscale_(opt)
    grad_norm = opt.clip(grad_clip)
    scaler.step(opt, lr)            # opt.step(lr), unless float16 overflowed
    scaler.update()
    return dict(losses, grad_norm=grad_norm)

def combine(op, *numbers):
    """Returns the sum ('SUM'), maximum ('MAX') or minimum ('MIN') of each number over all processes."""
    if WORLD_SIZE == 1:
        return numbers
    numbers = torch.tensor(numbers, dtype=torch.float64)        # on the CPU, so that GPUs do not wait
    dist.all_reduce(numbers, getattr(dist.ReduceOp, op))
    return numbers.tolist()

# -----------------------------------------------------------------------------
# What a run starts with

def check_options():
    """Raises UserError if options do not fit each other."""
    unit = WORLD_SIZE * max(micro_batch_size, 1)
    if batch_size % unit:
        raise UserError(f'batch_size = {batch_size} is not a multiple of {unit} (processes x micro_batch_size); use '
                        f'--batch_size={math.ceil(batch_size / unit) * unit}')
    if RANK >= WORLD_SIZE or (WORLD_SIZE > 1 and 'MASTER_ADDR' not in os.environ):
        raise UserError('RANK and WORLD_SIZE in the environment are not from torchrun; use torchrun, or unset both')
    model_config()          # checks its fields
    prepare.check_prepared(config)

def model_config(options=config, **others):
    """Returns the GPTConfig that options describe. Raises UserError."""
    fields = {name: options[name] for name in GPTConfig.__dataclass_fields__}
    return GPTConfig(**(fields | others))

def choose_folder():
    """Returns the folder of this run, and a context in which no other process trains there. Raises UserError."""
    folder = Path(out_dir or f'out/{data_name(dataset)}')
    resuming = init_from.split(':')[0] in ('resume', 'auto')
    if (folder / 'config.json').exists():
        raise UserError(f'{folder} is a model, and would hide a run in it; use another --out_dir')
    if not resuming and os.environ.get('TORCHELASTIC_MAX_RESTARTS', '0') != '0':
        raise UserError('--max-restarts of torchrun would begin another run; add --init_from=auto to resume this one')
    if not (out_dir or resuming):
        for i in range(2, 1000):
            if not (folder / 'config.py').exists():
                with suppress(UserError):       # another new run has just taken it
                    return folder, hold(folder)
            folder = Path(f'out/{data_name(dataset)}-{i}')
    if checkpoints(folder) and not resuming:
        raise UserError(f'{folder} already has a run; continue it with --init_from=auto, or use another --out_dir')
    return folder, hold(folder)

def hold(folder):
    """Returns a context in which no other process trains in this folder. Raises UserError if another trains there."""
    held = ExitStack()
    if not (RANK or eval_only):
        held.enter_context(lock(folder / '.lock', wait=False))
    return held

def open_data(base):
    """
    Returns the data folder, its meta.json (with the size of the vocabulary and the end of a document), and both splits,
    whose tok is their tokenizer. base: the folder of a model, whose tokenizer is to be used, or None. May prepare.
    """
    own, wanted = None, tokenizer
    if base:
        own, wanted = load_tokenizer(base), str(base / 'tokenizer.json')
        known = dict(tokenizer=wanted, vocab_size=own.vocab_size, pattern='')
        prepare.check_unused(config, known, f'{base}, which has a tokenizer; leave it out')
    folder = find_or_prepare(dataset, wanted, vocab_size)
    meta = read_meta(folder)
    tok = load_tokenizer(folder) if (folder / 'tokenizer.json').exists() else None
    train_data, val_data = [Shards(folder, split, meta, tok) for split in ('train', 'val')]
    if len(train_data) < 2 * config['block_size'] or len(val_data) < 2:
        raise UserError(f'{folder} has too little text for this context ({len(train_data):,} tokens to train on, '
                        f'{len(val_data):,} for validation); use more, or a smaller --block_size')
    if own and tok and tok.vocab != own.vocab:
        raise UserError(f'{folder} was not made with {wanted}; use the text itself as --dataset')
    return folder, meta, train_data, val_data

def make_model(folder, meta):
    """Returns the model in a folder, or a new one. meta: meta.json of the data. Raises UserError."""
    # GPUs are faster if a vocabulary above 1,024 is a multiple of 64. Training soon makes the ids without a token
    # unlikely, and generate() never draws them. A model from elsewhere keeps its size (GPT-2: 50,257).
    vocab_size = meta['vocab_size']
    if vocab_size > 1024:
        vocab_size = math.ceil(vocab_size / 64) * 64
    wanted = model_config(vocab_size=vocab_size)
    if not folder:
        return GPT(wanted)
    model = load_model(folder, **{name: getattr(wanted, name) for name in UNSAVED_FIELDS})
    for name, found in vars(model.config).items():
        asked = getattr(wanted, name)
        fits = asked <= found if name == 'block_size' else asked == found
        if fits:
            continue
        if name in config.source and name != 'vocab_size':
            raise UserError(f'{folder} has {name} = {found}, but {config.source[name]} asks for {asked}; leave that '
                            f'out, use --{name}={found}, or start a new model with --init_from=scratch')
        config[name] = found            # for config.py
    if meta['vocab_size'] > model.config.vocab_size:
        raise UserError(f'the data have {meta["vocab_size"]:,} ids, but {folder} only {model.config.vocab_size:,}; use '
                        f'the config.py of its run, the text itself as --dataset, or --init_from=scratch')
    return model

def make_scaler(device, dtype):
    """Returns a loss scaler for float16, in which many gradients would underflow. It does nothing for other dtypes."""
    return torch.amp.GradScaler(device.split(':')[0], enabled=dtype == 'float16')

@dataclass
class State:
    """What a run has done so far, as in a checkpoint's training.json."""
    step: int = 0               # optimizer steps
    tokens: int = 0             # what they were trained on
    seconds: float = 0.0        # of steps, evaluations and saves, but not of the first step after each start
    lr: float = 0.0             # learning rate of the last step
    data: str = ''              # hash of the data
    wandb_id: str = ''
    t: int = 0                  # steps of the optimizer, only in the file
    scaler: dict = field(default_factory=dict)          # state of the loss scaler, only in the file

class Run:
    """
    What is trained and saved in a folder. It begins from a checkpoint in it, from another model's folder (base), or
    from neither; origin is the one of these from which it takes the weights.
    """
    def __init__(self, folder, device):
        checkpoint = newest_intact(folder) if init_from == 'resume' or checkpoints(folder) else None
        name = init_from.removeprefix('auto:')
        base = None if name in ('scratch', 'resume', 'auto') else checkpoint or find_folder(name)
        self.folder, self.device, self.wandb = folder, device, None
        self.limit = 60 * max_minutes or math.inf       # seconds
        self.resume = command('train.py', f'{folder.as_posix()}/config.py')
        self.origin = checkpoint or base
        self.data_folder, self.meta, self.train_data, self.val_data = open_data(base)
        self.dtype = choose_dtype(dtype, device)
        torch.manual_seed(seed)
        self.model = make_model(self.origin, self.meta).to(device).train()
        self.model.compute_dtype = getattr(torch, self.dtype)
        self.T = config['block_size']       # tokens in a sequence
        flops = max_iters * batch_size * self.T * self.model.flops_per_token()
        self.compile = choose_compile(compile, device, flops)
        files = self.origin or self.data_folder
        self.ends = find_ends(files, self.model.config.vocab_size, self.meta['eot'])            # ids that end a text
        self.kept = keep_from(files)        # files that stay as they are

        self.opt = Optimizer(self.model)
        self.scaler = make_scaler(device, self.dtype)
        data = data_hash(self.meta)
        self.state = restore(checkpoint, self.opt, self.scaler) if checkpoint else State(data=data)
        if self.state.data != data:
            raise UserError(f'{checkpoint} was trained on other data; use its config.py, or --init_from={checkpoint}')

def restore(folder, opt, scaler):
    """Fills the optimizer (whose p make_model has read) and the scaler. Returns the State. Raises UserError."""
    state = State()
    try:
        for name, value in read_json(folder / 'training.json').items():
            setattr(state, name, type(getattr(state, name))(value))
        found = load_file(folder / 'training.tensors')
        odd = found.keys() ^ opt.tensors.keys()         # in one of them only
        if odd:
            raise ValueError(f'another --optimizer or other tensors: {", ".join(sorted(odd)[:3])}')
        with opt.evaluating():          # as in save(), so that averaged weights are swapped here, too
            for name, tensor in opt.tensors.items():
                tensor.copy_(found[name])
    except (SafetensorError, AttributeError, TypeError, ValueError, RuntimeError) as e:
        raise UserError(f'{folder} cannot be resumed ({e}); use the options of that run, or start a new one with '
                        f'--init_from={folder}')
    opt.t = state.t
    if state.scaler:            # not empty, so float16
        scaler.load_state_dict(state.scaler)
    return state

def connect(device, shared={}):
    """Joins the other processes, if any. Raises UserError if they differ in `shared`, other than where they may."""
    if WORLD_SIZE == 1:
        return
    # Signals and times go through gloo, so that they do not wait for a GPU.
    backend = 'cpu:gloo,cuda:nccl' if 'cuda' in device else 'gloo'
    # After a restart, torchrun goes on with its store, where processes would find the addresses of dead ones (pytorch
    # issue 135712), so each start uses other names in it. Several nodes cannot, because each counts its own restarts.
    one_node = os.environ.get('GROUP_WORLD_SIZE') == '1'
    prefix = os.environ['TORCHELASTIC_RESTART_COUNT'] if one_node else ''
    wait = timedelta(seconds=timeout)
    try:
        store, _, _ = next(dist.rendezvous('env://', timeout=wait))
        dist.init_process_group(backend, store=dist.PrefixStore(prefix, store), rank=RANK, world_size=WORLD_SIZE,
                                timeout=wait)
    except dist.DistError as e:
        raise UserError(f'the {WORLD_SIZE} processes did not find each other in {timeout} s ({e}); start all of them, '
                        f'with torchrun')
    # gloo's threads need Python to free the last message, and abort if Python has shut down.
    atexit.register(time.sleep, 0.1)
    everyones = [None] * WORLD_SIZE
    dist.all_gather_object(everyones, shared)
    may_differ = 'dataset', 'tokenizer', 'out_dir', 'init_from', 'workers', 'device'
    for name in shared:
        found = {everyone[name] for everyone in everyones}
        if len(found) > 1 and name not in may_differ:
            raise UserError(f'the processes differ in {name}: {found}; use the same command, data and run folder')

# -----------------------------------------------------------------------------
# Evaluating

@torch.no_grad()
def evaluate(run, max_tokens=0, latest=math.inf):
    """
    Returns the mean loss in nats per token, the bits per byte and the number of tokens evaluated, keyed as in the log.
    They do not depend on the number of processes, unless `latest`, a time.perf_counter(), ends it early. Reads
    max_tokens (0: all) or a few more of the split in windows of T tokens, which cover it evenly at any moment.
    """
    data, T = run.val_data, run.T
    n = len(data) - 1           # every token but the first is a target
    # The windows i with the smallest fractional parts of i * golden ratio are spread evenly, however many are taken.
    order = np.argsort(np.arange(n // T) * 0.6180339887498949 % 1) * T
    starts = order[:math.ceil((max_tokens or n) / T)]
    size = max(2048 // T, 1)            # 2,048 tokens at a time fit everywhere
    batches = [starts[i:i + size] for i in range(0, len(starts), size)]
    if n % T and len(starts) == len(order):
        batches.append([n - n % T])         # the last, shorter window
    nats = tokens = text_bytes = 0
    for batch in tqdm(batches[RANK::WORLD_SIZE], 'evaluating', disable=RANK > 0 or None, leave=False, delay=3):
        if tokens and time.perf_counter() > latest:
            break
        x, y = data.batch(batch, min(T, n - batch[0]), run.device)
        nats += run.model(x, y).item() * y.numel()
        tokens += y.numel()
        text_bytes += data.text_bytes(y.cpu().numpy())
    nats, tokens, text_bytes = combine('SUM', nats, tokens, text_bytes)
    bits_per_byte = nats / math.log(2) / text_bytes if text_bytes else None
    return dict(val_loss=nats / tokens, val_bpb=bits_per_byte, val_tokens=int(tokens))

def describe(found):
    """describe(dict(val_loss=1.5, val_bpb=0.567, val_tokens=2048)) -> 'validation loss 1.5000 | 0.567 bits per byte'"""
    bpb = '' if found['val_bpb'] is None else f' | {found["val_bpb"]:.3f} bits per byte'
    return f'validation loss {found["val_loss"]:.4f}{bpb}'

def evaluate_run(run):
    """Evaluates the model, prints and logs the result, draws the curves and prints a sample. Returns the result."""
    found = evaluate(run, eval_tokens)
    print(f'step {run.state.step} | {describe(found)} over {found["val_tokens"]:,} tokens')
    log(run, found)
    if RANK:
        return found
    with optional('curves.png'):
        draw_curves(run.folder)
    tok = run.val_data.tok
    if tok and sample_tokens:
        with optional('the sample text'):
            steps = generate(run.model, [prompt_ids(tok, sample_start, run.ends)], sample_tokens, seed=seed,
                             has_ended=lambda text: text[-1] in run.ends, vocab_size=tok.vocab_size, temperature=0.8)
            print('-' * 40, sample_start + texts_of(steps, tok)[0], '-' * 40, sep='\n')
    return found

def check_finite(run, loss=0.0):
    """Raises Diverged unless the loss and all weights are finite."""
    if not math.isfinite(loss) or not run.opt.p.sum().isfinite():
        raise Diverged(f'the loss or a weight is nan or inf at step {run.state.step}; use a lower --learning_rate')

# -----------------------------------------------------------------------------
# The folder of a run: config.py, log.jsonl, curves.png and checkpoints

def start_files(run):
    """Writes config.py, starts wandb, and removes log entries and checkpoints after this step."""
    if RANK:
        return
    data, kind = run.data_folder.as_posix(), run.meta.get('tokenizer', tokenizer)
    options = dict(config, dataset=data, init_from='resume',
                   tokenizer=kind if kind in prepare.TOKENIZERS else f'{data}/tokenizer.json')       # it stays there
    del options['out_dir']
    head = 'from pathlib import Path\nout_dir = Path(__file__).parent.as_posix()\n'         # the folder may be renamed
    head += f'# dataset was made from {run.meta["source"]!r}\n'
    path = run.folder / 'config.py'
    if path.exists():
        before = path.read_text('utf-8').splitlines()
        changed = [line for line in as_file(options).splitlines() if line not in before]
        if changed:
            print('changed |', ', '.join(changed))
    elif run.state.step:
        print(f'{path} is missing, so the options are those of this command')
    write(path, head + as_file(options))
    for later in checkpoints(run.folder):
        if later.name > f'step_{run.state.step:08d}':           # newest_intact skipped it
            remove_checkpoint(later)
    kept = [entry for entry in read_log(run.folder) if entry['step'] <= run.state.step and 'full_val_loss' not in entry]
    write(run.folder / 'log.jsonl', ''.join(json.dumps(entry) + '\n' for entry in kept))
    if wandb_log:
        with optional('wandb'):
            import wandb
            run.wandb = wandb.init(project=wandb_project, name=run.folder.name, config={**config}, dir=str(run.folder),
                                   id=run.state.wandb_id or None, resume='allow')
            run.wandb.define_metric('*', step_metric='step')        # wandb's own step cannot go back
            run.state.wandb_id = run.wandb.id
    print(f'writing | {visible(run.folder)}; stop with Ctrl-C; resume with: {run.resume}')

@contextmanager
def optional(what):
    """Context for optional work: a failure is printed, and training goes on."""
    try:
        yield
    except Exception as e:
        print(f'{what} failed ({type(e).__name__}: {e}); training goes on without it')

def log(run, numbers):
    """Writes an entry to log.jsonl, and to wandb."""
    if RANK:
        return
    state = run.state
    entry = dict(step=state.step, tokens=state.tokens, seconds=state.seconds, **numbers)
    with optional('log.jsonl'), open(run.folder / 'log.jsonl', 'a') as f:
        f.write(json.dumps(entry) + '\n')
    if run.wandb:
        with optional('wandb'):
            run.wandb.log(entry)

def read_log(folder):
    """Returns the entries of a run's log, without broken lines, such as one cut short by a full disk."""
    entries = []
    with suppress(FileNotFoundError), open(folder / 'log.jsonl', 'rb') as lines:
        for line in lines:
            with suppress(ValueError, TypeError, KeyError):
                entry = json.loads(line)
                entries.append(dict(entry, step=int(entry['step'])))
    return entries

def points(entries, name):
    """Returns [(step, value), ...] from the entries of a log that have this value."""
    return [(entry['step'], entry[name]) for entry in entries if name in entry]

def best_checkpoint(folder):
    """Returns the checkpoint of a run with the lowest validation loss in the log."""
    losses = dict(points(read_log(folder), 'val_loss'))
    return min(checkpoints(folder), key=lambda path: losses.get(int(path.name[5:]), math.inf))

def draw_curves(folder):
    """Draws curves.png: the loss, learning rate, gradient norm and speed."""
    from matplotlib.figure import Figure
    entries = read_log(folder)
    figure = Figure(figsize=(12, 6), layout='constrained')
    rows = [['loss', name] for name in ('lr', 'grad_norm', 'tokens_per_second')]
    axes = figure.subplot_mosaic(rows, width_ratios=[3, 1])
    for name, axis in axes.items():
        found = points(entries, name)
        if name == 'tokens_per_second':
            found = found[1:]           # the first step is slow
        axis.plot(*zip(*found), label='training, mean of the steps before')
        axis.set(title=name, xlabel='step')
    losses, val_losses = points(entries, 'loss'), points(entries, 'val_loss')
    later = losses[len(losses) // 10:] + val_losses         # without the first tenth, which falls steeply
    axes['loss'].plot(*zip(*val_losses), 'o--', label='validation')
    axes['loss'].set_ylim(top=1.02 * max(loss for _, loss in later))
    axes['loss'].legend()
    save_figure(figure, folder / 'curves.png')

def save_figure(figure, path):
    unfinished = partial_path(path)
    figure.savefig(unfinished, format='png', dpi=110)
    unfinished.replace(path)

def model_card(run, found):
    """Returns the README.md of a checkpoint, its page on the hub. found: its evaluation or None"""
    evaluation = f'{describe(found)} over {found["val_tokens"]:,} tokens' if found else 'none'
    return f"""---
pipeline_tag: text-generation
license: other     # fill this in, and add base_model if there is one
---
# {run.folder.name}

A language model with {run.model.num_params():,} parameters, trained by plaingpt on {run.state.tokens:,} tokens of
{Path(prepare.WILDCARDS.sub("", run.meta["source"])).name} in {run.state.step:,} steps.
Evaluation during training: {evaluation}.
"""

def save(run, found, last):
    """Writes step_<step>/ and removes old checkpoints except the best. Raises UserError if the last save fails."""
    if RANK:
        return          # The others wait in their next collective, up to timeout
    folder = run.folder / f'step_{run.state.step:08d}'
    eot = run.ends[0] if run.ends else None
    state = vars(run.state) | dict(t=run.opt.t, scaler=run.scaler.state_dict())
    try:
        save_checkpoint(folder, run.model, run.data_folder / 'tokenizer.json', eot, state, run.opt.tensors,
                        model_card(run, found), run.kept)
    except (OSError, SafetensorError) as e:
        if last:
            raise UserError(f'{folder} cannot be saved ({e}); make room, then repeat the command with --init_from=auto')
        print(f'{folder} cannot be saved ({e}); training goes on, and the next save tries again')
        return          # without a new checkpoint, keep the old ones
    best = best_checkpoint(run.folder)
    for old in checkpoints(run.folder)[:-keep_checkpoints]:
        if old != best:
            with optional(f'removing {old}'):       # On Windows, another program may have a file open
                remove_checkpoint(old)

# -----------------------------------------------------------------------------
# The loop, and main

class Interrupt(ExitStack):
    """Context in which SIGINT, SIGTERM, SIGHUP or SIGUSR1 is noted for the loop. A later one exits at once."""
    def __enter__(self):
        self.signal = 0         # its number
        with suppress(ValueError):              # In a thread, Python cannot handle signals
            for kind in signal.Signals:         # Windows lacks two of these; nohup ignores SIGHUP
                if kind.name in ('SIGINT', 'SIGTERM', 'SIGHUP', 'SIGUSR1') and signal.getsignal(kind) != signal.SIG_IGN:
                    before = signal.signal(kind, self.hear)
                    self.callback(signal.signal, kind, before)          # at its end, for the next cell of a notebook
        return self

    def hear(self, number, frame):
        if not self.signal:
            self.signal, self.heard = number, time.monotonic()
            with suppress(OSError):     # print() may be what the signal interrupted
                os.write(sys.stdout.fileno(), b'\na checkpoint is saved after this step (Ctrl-C: ends without it)\n')
        elif time.monotonic() > self.heard + 1:         # torchrun forwards Ctrl-C, so it arrives twice
            sys.exit(128 + number)

def micro_batch_sizes(T, device):
    """Returns how many sequences a process may take at a time, most first. Each divides its share of the batch."""
    if micro_batch_size:
        return [micro_batch_size]
    most = 4096         # tokens
    if 'cuda' in device:            # more are no faster, or would hardly fit
        most = min(65536, torch.cuda.get_device_properties(device).total_memory // 10 ** 6)     # a token per MB
    share = batch_size // WORLD_SIZE
    return [n for n in range(share, 0, -1) if share % n == 0 and (n * T <= most or n == 1)]

def memory_left(run, model, size):
    """Returns the share of the GPU's memory that a micro-batch of this size leaves free, or 0 if it does not fit."""
    try:
        # what AdamW needs if it is not compiled
        spare = torch.empty(3 * len(run.opt.p), device=run.device)      # noqa: F841
        model(*run.train_data.batch([0] * size, run.T, run.device)).backward()
        free, total = torch.cuda.mem_get_info(run.device)
        return free / total
    except torch.OutOfMemoryError:
        return 0.0

def choose_micro_batch(run, model):
    """Returns the first of micro_batch_sizes that leaves 2% of every GPU's memory free. Raises UserError."""
    for size in micro_batch_sizes(run.T, run.device):
        if 'cuda' not in run.device:
            return size         # untried
        [left] = combine('MIN', memory_left(run, model, size))
        torch.cuda.empty_cache()
        if left > 0.02:
            return size
        print(f'memory  | {size} sequences at once do not fit')
        torch.compiler.reset()          # otherwise it would compile once for all sizes, which is slower
    raise UserError(f'a micro-batch of {size} does not fit; use a smaller --micro_batch_size, --block_size or model')

def report(run, history, began, tokens, T):
    """Prints and logs the means of the steps in history, and their speed: `tokens` since `began`, in contexts of T."""
    step, steps, names = run.state.step, len(history), history[-1]
    sums = combine('SUM', *[float(sum(numbers[name] for numbers in history)) for name in names])    # waits for a GPU
    entry = {name: total / steps / WORLD_SIZE for name, total in zip(names, sums)}
    check_finite(run, entry['loss'])
    seconds = time.perf_counter() - began
    rate, peak = tokens / seconds, peak_flops(run.device) * WORLD_SIZE
    entry.update(lr=run.state.lr, ms=1e3 * seconds / steps, tokens_per_second=rate)
    if peak:
        entry['mfu'] = rate * run.model.flops_per_token(T) / peak
    log(run, entry)
    forms = dict(loss='loss {:.4f}', lr='lr {:.1e}', grad_norm='norm {:.2f}', ms='{:.1f} ms',
                 tokens_per_second='{:,.0f} tok/s', mfu='mfu {:.1%}')
    parts = [forms.get(name, f'{name} {{:.4g}}').format(value) for name, value in entry.items()]
    if step > 1:            # the first step may compile
        left = min((max_iters - step) * seconds / steps, run.limit - run.state.seconds)
        parts.append(f'{timedelta(seconds=round(max(left, 0)))} left')
    print(f'step {step}', *parts, sep=' | ')

def compile_both(model, opt):
    """Compiles the optimizer. Returns the compiled model."""
    opt.compile()
    # On a CPU, compiled code would draw its own random numbers one by one: a step with dropout takes 1.5 times as long.
    return torch.compile(model, options=dict(fallback_random=not model.lm_head.weight.is_cuda))

def train(run, interrupt):
    """Takes the remaining steps of a run, evaluates and saves. Exits after a signal."""
    state, opt, model = run.state, run.opt, run.model
    if run.compile:         # only for training, not for evaluations
        print('compile | the first step takes half a minute to two minutes longer')
        model = compile_both(model, opt)
    micro = choose_micro_batch(run, model)
    print(f'steps   | {max_iters:,} of {batch_size} x {run.T} tokens ({max_iters * batch_size * run.T:,} of '
          f'{len(run.train_data):,}), micro-batch {micro}\n')
    stop, clock_began = 0, None
    last = state.step >= max_iters or state.seconds >= run.limit
    if last:
        print(f'nothing is left to train after step {state.step}; use a larger --max_iters or --max_minutes')
    history = []            # numbers of the steps since the last printed line or checkpoint
    replayed = Replayed(backward)
    while not (stop or last):
        if not history:
            began, tokens_before = time.perf_counter(), state.tokens
        state.step += 1
        state.lr = get_lr(state.step, state.lr, state.seconds / run.limit)
        starts, T = next_sequences(run)
        batches = micro_batches(run, starts, T, micro)
        history.append(training_step(model, opt, run.scaler, batches, len(starts), state.lr, replayed))
        state.tokens += len(starts) * T

        # All processes must agree on signals and the clock, which starts after the first step, because it may compile.
        if clock_began is None:
            clock_began = time.perf_counter() - state.seconds           # as if earlier steps came right before
        stop, state.seconds = combine('MAX', interrupt.signal, time.perf_counter() - clock_began)
        last = state.step >= max_iters or state.seconds >= run.limit
        if state.step % log_interval == 0 or state.step in (1, max_iters):
            report(run, history, began, state.tokens - tokens_before, T)
            history = []
        if stop or last or state.step % eval_interval == 0:
            check_finite(run)
            replayed = Replayed(backward)           # frees the memory of the CUDA graph
            with opt.evaluating():
                found = None if stop else evaluate_run(run)
                save(run, found, stop or last)
            history = []

    # All wait here for the save, because torchrun stops them when one exits. A signal may have come meanwhile.
    [stop] = combine('MAX', interrupt.signal)
    if stop:
        print(f'stopped at step {state.step}; resume with: {run.resume}')
        sys.exit(128 + int(stop))

def finish(run):
    """Evaluates the complete validation split (after training, for at most max_minutes), and prints how to sample."""
    latest = math.inf if eval_only else time.perf_counter() + run.limit
    with run.opt.evaluating():
        final = evaluate(run, latest=latest)
    print(f'\n{describe(final)} over {final["val_tokens"]:,} of {len(run.val_data) - 1:,} validation tokens')
    if not (RANK or eval_only):
        log(run, {f'full_{name}': value for name, value in final.items()})
        best = best_checkpoint(run.folder)
        print('sample from the best checkpoint:', command('sample.py', f'--out_dir={best.as_posix()}'))

def main(arguments=None):
    """Trains. arguments: those of a command line, such as ['--max_iters=100'], in a notebook or another script."""
    if arguments is not None:
        config.begin(arguments)
    check_options()
    device = choose_device(config['device'], LOCAL_RANK)
    set_up(device)
    folder, held = choose_folder()          # before anything is prepared or written
    with held:
        run = Run(folder, device)
        state = run.state
        print(f'data    | {visible(run.meta["source"])}, hash {state.data}, in {run.data_folder}')
        print(f'device  | {device} ({device_name(device)}), processes: {WORLD_SIZE}, {run.dtype}, '
              f'compile {run.compile}')
        print(f'model   | {run.model.num_params():,} parameters, from {visible(run.origin or "scratch")}')
        connect(device, dict(config, dtype=run.dtype, data=state.data, checkpoint=(state.step, state.seconds)))
        if WORLD_SIZE > 1:          # Different kinds of CPU draw different numbers from one seed
            for tensor in (run.opt.p, *run.opt.tensors.values()):
                dist.broadcast(tensor, 0)
        if not eval_only:
            start_files(run)
            if state.step == 0 and run.origin:
                with run.opt.evaluating():
                    evaluate_run(run)           # the other model as it is
            with Interrupt() as interrupt:
                train(run, interrupt)
        finish(run)

if __name__ == '__main__':
    launch(main)
