"""
Trains a GPT on whatever device there is.

    python train.py                                        # a small model of Python code, 2 minutes on 2 CPU cores
    python train.py config/train_tinystories.py            # an experiment; --key=value overrides any option
    python train.py --dataset=my_text.txt                  # your own text: a file, a .jsonl, a folder
    python train.py out/python/config.py --init_from=resume
    torchrun --nproc_per_node=4 train.py                   # one process per GPU; without GPUs, they share the cores

It prepares missing data, prints a line every log_interval steps (with the MFU on a known GPU)

    step 350 | loss 3.9447 | lr 6.0e-03 | norm 0.37 | 94.6 ms | 21,651 tok/s | 1 min left

and writes out/<run>/: checkpoints step_00001000/ that Hugging Face opens, config.py, log.jsonl, curves.png.
"""
import atexit
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections import defaultdict
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tqdm import tqdm

import prepare
from configurator import (Diverged, Output, UserError, as_file, check_range, command, configure, launch, lock,
                          read_json, write)
from model import (GPT, UNSAVED_FIELDS, GPTConfig, SafetensorError, checkpoints, choose_compile, choose_device,
                   choose_dtype, device_name, family, find_folder, import_config, keep_from, load_model, newest_intact,
                   peak_flops, remove_checkpoint, save_checkpoint, set_up)
from prepare import DATASETS, Shards, data_hash, data_name, find_or_prepare, read_meta
from sample import Replayed, generate, prompt_ids, texts_of
from tokenizer import find_ends, load_tokenizer, make_tokenizer_json

# -----------------------------------------------------------------------------
# data
dataset = 'python'      # a name or path that prepare.py takes, or a data folder
tokenizer = 'bpe'       # bpe, char, byte, word, gpt2, or the path of a tokenizer.json
vocab_size = 4096       # for bpe and word
# the run
out_dir = ''            # folder of the run ('': out/<dataset>, or out/<dataset>-2, -3, ... if that is taken)
init_from = 'scratch'   # scratch, resume, auto (resume if out_dir has a checkpoint), or another model to start from: a
                        # run, a checkpoint, a Llama, Qwen3 or GPT-2 in a folder, or gpt2 or owner/model
                        # on the hub (auto:gpt2 resumes if it can, and otherwise starts from gpt2)
max_iters = 1000        # optimizer steps
max_minutes = 0.0       # if above 0, the schedule ends after this time or at max_iters, whichever comes first. The
                        # final evaluation may take as long again
eval_interval = 250     # steps between evaluations
eval_tokens = 32768     # validation tokens per evaluation, spread evenly over the split (0: all)
save_interval = 0       # steps between checkpoints (0: one after each evaluation)
eval_only = False       # only evaluate the complete validation split
log_interval = 50       # steps between printed lines
keep_checkpoints = 2    # number of newest checkpoints to keep, besides the best
sample_tokens = 64      # tokens of sample text printed at each evaluation (0: none)
sample_start = ''       # beginning of the sample text ('': the data set's, or a new document)
seed = 1                # seeds the weights, the data order and dropout
# the optimizer
batch_size = 16         # sequences per optimizer step, over all devices
micro_batch_size = 0    # sequences per device at a time (0: up to 16,384 tokens; on a GPU, 4,096 to 65,536)
optimizer = 'muon'      # muon (adamw except for linear layers in blocks), adamw, adam, rmsprop, adagrad, momentum, sgd
learning_rate = 6e-3    # highest rate, reached after warmup_iters
adamw_scale = 4.0       # with muon: rate multiplier for the head, norms, biases and learned positions
embed_scale = 20.0      # with muon: rate multiplier for value embeddings, and token embeddings unless tied
min_lr = -1.0           # learning rate from lr_decay_iters on (-1: a twentieth of learning_rate)
warmup_iters = 40       # steps in which the rate rises from 0
lr_decay = 'linear'     # linear (in the last 65% of the steps) or cosine
lr_decay_iters = 0      # step at which the rate reaches min_lr (0: max_iters)
weight_decay = 0.1      # for matrices (with muon, only those that it updates), not for norms and biases
beta1 = 0.9             # decay of the running mean of gradients (muon uses 0.95 for its matrices)
beta2 = 0.99            # decay of the running mean of their squares
adam_eps = 1e-8         # keeps steps from dividing by 0
grad_clip = 1.0         # largest gradient norm (0: no clipping)
# the machine
device = 'auto'         # auto, cpu, cuda, cuda:1, mps
dtype = 'auto'          # auto, float32, bfloat16, float16: for activations and matmuls; weights are float32
compile = 'auto'        # True, False, or auto: if it saves time
timeout = 600           # seconds to wait for another process before assuming it is dead
# wandb
wandb_log = False       # log to Weights & Biases, too
wandb_project = 'gpt'
wandb_run_name = ''     # ('': the name of the folder)
# The options of prepare.py and the fields of GPTConfig in model.py are options here, too; config holds all of them.
# -----------------------------------------------------------------------------
if __name__ == '__main__':
    sys.stdout, sys.stderr = Output(sys.stdout), Output(sys.stderr)     # keep going if the terminal closes
config = configure(globals(), prepare, GPTConfig)

RANK = int(os.environ.get('RANK', 0))               # number of this process, set by torchrun
LOCAL_RANK = int(os.environ.get('LOCAL_RANK', 0))   # its number on this machine
WORLD_SIZE = int(os.environ.get('WORLD_SIZE', 1))   # number of processes

# -----------------------------------------------------------------------------
# Update rules. Each steps in place, as in torch.optim, for weights p with gradients g and moments m and v. Except for
# muon, p is a piece of a long vector of the group's weights, so a rule must work number by number. decay is the weight
# decay. At step t = 1, 2, ..., Adam's means, which start at 0, are divided by correction1 = 1 - beta1^t and
# correction2 = 1 - beta2^t. All are called like adamw.

def sgd(p, g, lr, decay, *_):
    """Steps down the gradient of the loss + decay / 2 |p|^2."""
    p.sub_(lr * (g + decay * p))

def momentum(p, g, lr, decay, m, v, beta1, *_):
    """Steps down a sum of past gradients that decays by beta1 per step (Polyak, 1964)."""
    m.mul_(beta1).add_(g + decay * p)
    p.sub_(lr * m)

def adagrad(p, g, lr, decay, m, v, beta1, beta2, eps, *_):
    """Lowers each weight's rate as its squared gradients add up (Duchi, Hazan and Singer, 2011)."""
    g = g + decay * p
    v.addcmul_(g, g)
    p.sub_(lr * g / (v.sqrt() + eps))

def rmsprop(p, g, lr, decay, m, v, beta1, beta2, eps, *_):
    """AdaGrad with a decaying mean of squares, so that rates do not vanish (Hinton's lecture 6e, 2012)."""
    g = g + decay * p
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    p.sub_(lr * g / (v.sqrt() + eps))

def adam(p, g, lr, decay, *others):
    """RMSProp with momentum, with both means unbiased (arXiv:1412.6980, algorithm 1)."""
    adamw(p, g + decay * p, lr, 0.0, *others)

def adamw(p, g, lr, decay, m, v, beta1, beta2, eps, correction1, correction2):
    """Adam with weight decay kept out of the gradient (arXiv:1711.05101, algorithm 2)."""
    p.mul_(1 - lr * decay)
    m.lerp_(g, 1 - beta1)                                   # m = beta1 m + (1 - beta1) g
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)           # v = beta2 v + (1 - beta2) g^2
    p.sub_(lr / correction1 * m / ((v / correction2).sqrt() + eps))

RULES = {rule.__name__: rule for rule in (adamw, adam, rmsprop, adagrad, momentum, sgd)}

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

def muon(p, g, lr, decay, m, v, momentum, *_, dtype):
    """
    Moves matrices p (n, a, b) against their orthogonalized Nesterov momentum, about as far as AdamW would go at the
    same rate (arXiv:2502.16982, equation 4).
    """
    m.lerp_(g, 1 - momentum)
    direction = orthogonalize(g.lerp(m, momentum), dtype)
    p.mul_(1 - lr * decay)
    p.sub_(lr * 0.2 * max(p.shape[1:]) ** 0.5 * direction)

@dataclass
class Group:
    """Weights that one rule updates alike. For muon, they are matrices of one shape."""
    names: list
    rule: str
    betas: tuple                    # (beta1, beta2), for the rules that use them
    eps: float
    lr_scale: float = 1.0           # multiplies the learning rate, and so the decay
    decay: float = 0.0              # weight decay
    part: slice = None              # their slice of the optimizer's vectors

def make_groups(params, tied):
    """
    Returns the Groups of trainable weights (params, by name) that the options ask for, muon's last. tied: whether the
    embedding is the head, too. To give a layer or an embedding its own learning rate, give it its own Group (read sizes
    from params; a loaded model may not match the options).
    """
    matrices = [name for name in params if params[name].dim() > 1]
    vectors = [name for name in params if name not in matrices]         # norms and biases
    group = partial(Group, betas=(beta1, beta2), eps=adam_eps)
    if optimizer != 'muon':
        return [group(matrices, optimizer, decay=weight_decay), group(vectors, optimizer)]

    embeddings = [name for name in matrices if 'embed_values' in name or ('embed_tokens' in name and not tied)]
    in_blocks = [name for name in matrices if '.layers.' in name and name not in embeddings]
    others = [name for name in params if name not in in_blocks + embeddings]
    by_shape = defaultdict(list)
    for name in in_blocks:
        by_shape[params[name].shape].append(name)
    return [group(others, 'adamw', lr_scale=adamw_scale), group(embeddings, 'adamw', lr_scale=embed_scale),
            *[group(by_shape[shape], 'muon', betas=(0.95, 0), decay=weight_decay) for shape in sorted(by_shape)]]

class Optimizer(torch.optim.Optimizer):
    """
    Updates all weights of a model according to make_groups. The model's weights and their gradients become views of two
    long vectors, p and g: backward() fills g, and changing p changes the model. So clipping is one norm, processes add
    their gradients in one message, and a step is a few passes over memory. It subclasses torch's Optimizer, with p as
    its only parameter, to get zero_grad and to satisfy GradScaler.
    """
    def __init__(self, model):
        # p     | weights of group 1, one tensor after the other | group 2 | ... | muon's groups | zeros
        # g, m  their gradients and first moments, at the same positions
        # v     their second moments, up to muon's groups, which have none
        params = {name: w for name, w in model.named_parameters() if w.requires_grad}
        self.model, self.groups = model, make_groups(params, model.config.tie_weights)
        names = [name for group in self.groups for name in group.names]
        assert sorted(names) == sorted(params), 'make_groups must list each trainable weight once'
        self.t = 0              # steps taken
        self.rules = dict(RULES, muon=partial(muon, dtype=model.compute_dtype))
        v_size = sum(params[name].numel() for group in self.groups if group.rule != 'muon' for name in group.names)
        total = math.ceil(sum(w.numel() for w in params.values()) / 4096) * 4096       # clip views it as 4,096 rows
        device = model.lm_head.weight.device
        self.p, self.g, self.m = torch.zeros(3, total, device=device)
        self.v = torch.zeros(v_size, device=device)
        self.weights = {}       # the model's tensors, by name
        self.tensors = {}       # saved with the model and t: m.<name>, v.<name>, and anything you add

        end = 0
        for group in self.groups:
            begin = end
            for name in group.names:
                w = params[name]
                here = slice(end, end + w.numel())
                self.weights[name] = self.p[here].view_as(w)
                self.weights[name].copy_(w.detach())
                w.data, w.grad = self.weights[name], self.g[here].view_as(w)
                self.tensors[f'm.{name}'] = self.m[here].view_as(w)
                if group.rule != 'muon':
                    self.tensors[f'v.{name}'] = self.v[here].view_as(w)
                end = here.stop
            group.part = slice(begin, end)

        # Without compile, a CPU works on pieces that fit its cache.
        self.piece = 1 << 16 if device.type == 'cpu' else total
        self.p.grad = self.g
        super().__init__([self.p], {})

    def compile(self):
        # Compile each rule. One graph for a step is half as fast; one kernel for all shapes is 4% slower.
        self.rules = {name: torch.compile(rule, dynamic=False) for name, rule in self.rules.items()}
        torch._dynamo.config.cache_size_limit = 64      # one per matrix shape; the default of 8 is too few
        self.piece = len(self.p)

    def synchronize(self):
        """Copies the weights and tensors of the first process to all others."""
        if WORLD_SIZE > 1:
            for tensor in (self.p, *self.tensors.values()):
                dist.broadcast(tensor, 0)

    @contextmanager
    def evaluating(self):
        """
        Context for evaluating, sampling, saving and restoring, in which all processes have the weights of the first
        and dropout is off. To evaluate and save averaged weights, keep the average (at first a copy of p) in `tensors`,
        and swap its values with p's before and after the yield.
        """
        self.synchronize()          # another GPU may have used another kernel, and be off by an ulp
        self.model.eval()
        yield
        self.model.train()

    @torch.no_grad()
    def clip(self, max_norm):
        """Scales the gradient down to a norm of max_norm (0: not at all). Returns the old norm, on the device."""
        # On a CPU, the norm of 30 million float32 numbers at once is off by 0.2%; row by row, it is off by 1e-6.
        norm = self.g.view(4096, -1).norm(dim=1, dtype=torch.float32).norm()
        if max_norm:
            self.g.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def step(self, lr):
        self.t += 1
        # Rules that draw random numbers (none here does) would draw the same ones in all processes.
        torch.manual_seed((seed * 1_000_003 + self.t) % 2 ** 63)
        params = dict(self.model.named_parameters())
        for name, w in self.weights.items():
            assert params[name].data_ptr() == w.data_ptr(), f'{name} moved; make a new Optimizer'
        lr = self.on_device(lr)
        for group in self.groups:
            group_lr = lr * group.lr_scale
            corrections = [self.on_device(1 - beta ** self.t) for beta in group.betas]
            for p, g, m, v in self.pieces(group):
                self.rules[group.rule](p, g, group_lr, group.decay, m, v, *group.betas, group.eps, *corrections)

    def pieces(self, group):
        """Returns p, g, m and v of a group in pieces for its rule: for muon, as matrices, with an empty v."""
        shape = self.weights[group.names[0]].shape[-2:] if group.rule == 'muon' else ()
        parts = [x[group.part].view(-1, *shape).split(self.piece) for x in (self.p, self.g, self.m, self.v)]
        return zip(*parts, strict=True)         # muon's empty v is one piece, and so are its matrices

    def on_device(self, number):
        """Returns a number as a tensor, because a compiled rule would be compiled again for every new number."""
        return torch.full((), number, dtype=torch.float32, device=self.p.device)

# -----------------------------------------------------------------------------
# schedule, batches, the step, evaluation

def get_lr(step, time_used=0.0, last=None):
    """
    Returns the learning rate of a step. It rises by at most learning_rate / warmup_iters per step, from 0 or from
    `last`, the rate of the step before, so that a finished run warms up again when it is trained further. It falls to
    min_lr: as half a cosine after warmup_iters (at most half of the steps), or linearly over the last 65% of the steps
    (as in nanochat). time_used is the fraction of max_minutes that has passed; the schedule follows the steps or the
    clock, whichever is ahead.
    """
    end = lr_decay_iters or max_iters
    lowest = learning_rate / 20 if min_lr < 0 else min_lr
    decay_steps = end - min(warmup_iters, end / 2) if lr_decay == 'cosine' else 0.65 * end
    left = max(end - max(step, time_used * end), 0)
    remaining = min(left / decay_steps, 1)          # from 1 to 0
    if lr_decay == 'cosine':
        remaining = 0.5 * (1 - math.cos(math.pi * remaining))
    rise = learning_rate / max(warmup_iters, 1)
    highest = step * rise if last is None else last + rise
    return min(lowest + remaining * (learning_rate - lowest), highest)

def max_seconds():
    """Returns the limit of a run's time, which includes evaluations and saves."""
    return 60 * max_minutes or math.inf

def next_lr(state):
    """Returns the learning rate of a run's next step. The time of the first step, which may compile, is ignored."""
    time_used = (state['seconds'] - state['first_step']) / (max_seconds() - state['first_step'])
    return get_lr(state['step'] + 1, time_used, state['lr'])

def micro_batches(data, starts, step, T, micro, device):
    """Yields this process's share of a step's sequences, which begin at `starts`, micro-batch by micro-batch."""
    share = len(starts) // WORLD_SIZE
    for i in range(RANK * share, (RANK + 1) * share, micro):
        # Seed dropout for the forward pass that follows. If micro-batches are equally large, dropout does not depend on
        # the number of processes. The factor, a prime, keeps the seeds of different steps and sequences apart.
        torch.manual_seed(((seed * 1_000_003 + step) * 1_000_003 + i) % 2 ** 63)
        yield data.batch(starts[i:i + micro], T, device)

def backward(batch, model, scaler, share):
    """
    Adds the gradients of a micro-batch, idx and targets (2, B, T), to g, times its share of the step's sequences.
    Returns its losses, by name. A GPU replays this function as a CUDA graph (see Replayed), without which a step of
    config/train_shakespeare_char.py would take 11.2 ms on an H200 instead of 6.0.
    """
    scaler.scale(model(*batch) * share).backward()
    return model.losses

def training_step(model, opt, scaler, batches, sequences, lr, backward=backward):
    """
    Runs backward over micro-batches, then steps the optimizer. sequences: total over all processes. Returns numbers to
    print and log, still on the device: the mean of each loss over this process's sequences, the gradient norm before
    clipping, and any that you add. train() averages each over processes, and the losses also over the steps since the
    last printed line, evaluation or save.
    """
    opt.zero_grad(set_to_none=False)        # fills g with zeros
    losses = defaultdict(float)
    for batch in batches:
        share = batch.size(1) / sequences
        for name, loss in backward(batch, model, scaler, share).items():
            losses[name] += loss * share
    if WORLD_SIZE > 1:
        # Send in the dtype of matmuls. Halving bytes saves an estimated 5 to 10% of a step on 8 GPUs without NVLink.
        message = opt.g.to(model.compute_dtype)
        dist.all_reduce(message)
        opt.g.copy_(message)
    scaler.unscale_(opt)
    grad_norm = opt.clip(grad_clip)
    scaler.step(opt, lr)
    scaler.update()
    return {name: loss * WORLD_SIZE for name, loss in losses.items()} | dict(grad_norm=grad_norm)

def make_scaler(device, dtype):
    """Returns a loss scaler for float16, in which many gradients would underflow. It does nothing for other dtypes."""
    return torch.amp.GradScaler(device.split(':')[0], enabled=dtype == 'float16')

@torch.no_grad()
def evaluate(model, data, T, max_tokens=0, at_once=2048, latest=math.inf):
    """
    Returns the mean loss in nats per token, the bits per byte and the number of tokens evaluated, keyed as in the
    log. They do not depend on the number of processes, unless `latest` ends it early. Reads max_tokens (0: all) or a
    few more of the split in windows of T tokens, which cover it evenly at any moment. model: in evaluation mode;
    at_once: tokens per forward pass; latest: no pass begins after this time.perf_counter().
    """
    n = len(data) - 1           # every token but the first is a target
    # The windows i with the smallest fractional parts of i * golden ratio are spread evenly, however many are taken.
    order = np.argsort(np.arange(n // T) * 0.6180339887498949 % 1) * T
    starts = order[:math.ceil((max_tokens or n) / T)]
    size = max(at_once // T, 1)
    batches = [starts[i:i + size] for i in range(0, len(starts), size)]
    if n % T and len(starts) == len(order):
        batches.append([n - n % T])         # the last, shorter window
    losses, tokens, text_bytes = [], 0, 0
    for batch in tqdm(batches[RANK::WORLD_SIZE], 'evaluating', disable=RANK > 0 or None, leave=False, delay=3):
        if losses and time.perf_counter() > latest:
            break
        length = min(T, n - batch[0])
        x, y = data.batch(batch, length, str(model.lm_head.weight.device))
        losses.append(model(x, y) * y.numel())          # stays on the device
        tokens += y.numel()
        text_bytes += data.text_bytes(batch, length)
    nats, tokens, text_bytes = combine('SUM', sum(map(float, losses)), tokens, text_bytes)
    bits_per_byte = nats / math.log(2) / text_bytes if text_bytes else None
    return dict(val_loss=nats / tokens, val_bpb=bits_per_byte, val_tokens=int(tokens))

def combine(op, *numbers):
    """Returns the sum ('SUM'), maximum ('MAX') or minimum ('MIN') of each number over all processes."""
    if WORLD_SIZE == 1:
        return numbers
    numbers = torch.tensor(numbers, dtype=torch.float64)        # on the CPU, so that GPUs do not wait
    dist.all_reduce(numbers, getattr(dist.ReduceOp, op))
    return numbers.tolist()

def check_finite(run, loss=0.0):
    """Raises Diverged unless the loss and all weights are finite."""
    if not math.isfinite(loss) or not run.opt.p.sum().isfinite():
        raise Diverged(f'the loss or a weight became nan or inf at step {run.state["step"]}; resume from the last '
                       f'checkpoint, or start over, with a lower --learning_rate or more --warmup_iters')

# -----------------------------------------------------------------------------
# a run: its state, evaluations and checkpoints

# training.json keeps this state, from which a run resumes. read_state() adds the kind of device, and start() the hash
# of the data.
NEW_STATE = dict(
    step=0, sequences=0, tokens=0,      # optimizer steps, and what they were trained on
    seconds=0.0, first_step=0.0,        # elapsed (with evaluations and saves), now and after step 1
    lr=0.0,                             # learning rate of the last step
    evaluated=dict(step=0),             # last evaluation and its step; step 0 of a new model is not evaluated
    best=dict(step=0, val_loss=math.inf),       # the same for the best checkpoint
    dtype='auto', compile='auto',       # values in use; 'auto' means these on resume
    options={}, wandb_id='',              # set by start_files(); the run's id at wandb
    t=0, scaler={},                     # of the optimizer and the scaler; save() sets them in the file only
)

@dataclass
class Run:
    """All that is trained, evaluated, logged and saved."""
    folder: Path
    state: dict             # see NEW_STATE
    meta: dict              # meta.json of the data
    train_data: Shards
    val_data: Shards
    tok_path: Path          # tokenizer.json, which may be missing
    ends: list              # ids that end a text: see find_ends
    kept: dict              # files of the starting model: see keep_from
    model: GPT
    fast: object            # the model for training, compiled if that pays; evaluations use `model`
    opt: Optimizer
    scaler: torch.amp.GradScaler
    device: str
    T: int                  # tokens in a sequence
    micro: int              # sequences per device at a time
    eval_batch: int         # tokens evaluated at a time
    wandb: object = None    # None if it is off or failed

def evaluate_run(run, last):
    """
    Evaluates the model of a run, prints and logs the result, draws the curves and, unless last, prints a sample. The
    optimizer's g still has the last step's clipped gradient, or zeros after a resume.
    """
    found = evaluate(run.model, run.val_data, run.T, eval_tokens, run.eval_batch)
    check_finite(run, found['val_loss'])
    step = run.state['step']
    run.state['evaluated'] = dict(found, step=step)
    say(f'step {step} | {describe(found)} over {found["val_tokens"]:,} tokens')
    if RANK:
        return
    log(run, found)
    with optional('curves.png'):
        draw_curves(run.folder)
    if not last:
        show_texts(run, 1, sample_tokens)

def save(run, last):
    """
    Writes step_<step>/ and removes old checkpoints except the best. Raises UserError if the final save fails. Only the
    first process writes; the others wait in their next collective, up to timeout.
    """
    state, step = run.state, run.state['step']
    check_finite(run)
    folder = run.folder / f'step_{step:08d}'
    if RANK or folder.exists():         # exists if the run has just resumed from it
        return
    best = state['best']
    if state['evaluated']['step'] == step:
        best = min(best, state['evaluated'], key=lambda entry: entry['val_loss'])
    training = dict(state, best=best, t=run.opt.t, scaler=run.scaler.state_dict())
    try:
        save_checkpoint(folder, run.model, run.tok_path, run.meta['eot'], training, run.opt.tensors, model_card(run),
                        run.kept)
    except (OSError, SafetensorError) as e:
        if last:
            raise UserError(f'{folder} cannot be saved ({e}); make room, then repeat the command with --init_from=auto')
        say(f'{folder} cannot be saved ({e}); training goes on, and the next save tries again')
        return          # without a new checkpoint, keep the old ones
    state['best'] = best
    for old in checkpoints(run.folder)[:-keep_checkpoints]:
        if int(old.name[5:]) != best['step']:
            with suppress(OSError):         # Windows keeps files that are open elsewhere; the next save tries again
                remove_checkpoint(old)

# -----------------------------------------------------------------------------
# End of the core, except for main(), start() and train() at the bottom. In between: memory, signals, files, checks.
#
# memory

def tokens_at_once(device):
    """Returns the largest number of tokens in a forward pass. More would be no faster, or would hardly fit."""
    if 'cuda' not in device:
        return 4096 if device == 'mps' else 16384       # an Apple GPU swaps instead of failing
    memory = torch.cuda.get_device_properties(device).total_memory
    if memory < 20e9:
        return 8192
    return 32768 if memory < 60e9 else 65536

def largest_divisor(n, limit):
    """Returns the largest divisor of n up to `limit`: largest_divisor(12, 5) -> 4"""
    return max(d for d in range(1, limit + 1) if n % d == 0)

def divide_batch(T, device):
    """Returns micro_batch_size, or if it is 0, the largest suitable size that divides the batch."""
    share = batch_size // WORLD_SIZE
    most = max(tokens_at_once(device) // T, 1)
    micro = micro_batch_size or largest_divisor(share, most)
    if 2 * micro < min(share, most) and not micro_batch_size:
        say(f'{share} sequences divide only into micro-batches of {micro}, which is slow; use '
            f'--batch_size={round(share / most) * most * WORLD_SIZE}')
    return micro

def choose_batches(model, opt, data, T, device):
    """Prints the division of the batch. Returns the sequences of a micro-batch and the tokens evaluated at a time."""
    micro = divide_batch(T, device)
    if 'cuda' in device:
        micro = fit_micro_batch(model, opt, data, T, device, micro)
    say(f'steps   | {max_iters:,}, {max_iters * batch_size * T / len(data):.2f} epochs of {len(data):,} tokens')
    say(f'batch   | {batch_size} sequences, {batch_size * T:,} tokens (processes x micro-batches x sequences: '
        f'{WORLD_SIZE} x {batch_size // WORLD_SIZE // micro} x {micro})')
    # Evaluation takes less memory than training, even without compile.
    return micro, min(tokens_at_once(device) // 8, micro * T // 2)

def fit_micro_batch(model, opt, data, T, device, micro):
    """Halves the micro-batch until a step fits into every GPU's memory with a margin. Returns the micro-batch."""
    if WORLD_SIZE > 1:
        dist.all_reduce(opt.g)          # so that NCCL allocates its buffers now
    while True:
        free, total = 0, 1
        try:
            spare = torch.empty(3 * len(opt.p), device=device)      # memory for AdamW if it is not compiled
            model(*data.batch(data.starts(0, micro, T, seed), T, device)).backward()
            free, total = torch.cuda.mem_get_info(device)
        except RuntimeError as e:       # from torch, Triton or cuBLAS
            if not re.search('out of memory|ALLOC_FAILED|NVML_SUCCESS', str(e)):        # the last on a MIG slice
                raise
        spare = None
        torch.cuda.empty_cache()        # outside the except, where `e` would keep the memory in use
        [left] = combine('MIN', free / total)
        if left > 0.02:
            return micro
        if micro == 1 or micro_batch_size:
            raise UserError(f'a micro-batch of {micro} does not fit into memory; use a smaller --micro_batch_size, '
                            f'which trains the same, or if it is 1, a smaller --block_size or model')
        say(f'memory  | {micro} sequences at once do not fit; trying fewer')
        torch.compiler.reset()          # otherwise it would compile once for all sizes, which is slower
        micro = largest_divisor(micro, micro // 2)

# -----------------------------------------------------------------------------
# signals and processes

class Interrupt:
    """
    Notes SIGINT, SIGTERM, SIGHUP or SIGUSR1 for the loop, which saves and exits. A later one exits at once, as does any
    after the last save.
    """
    signal, heard = 0, 0.0          # number of the signal, and its time

    def listen(self):
        for kind in signal.Signals:         # Windows lacks two of these; nohup ignores SIGHUP
            if kind.name in ('SIGINT', 'SIGTERM', 'SIGHUP', 'SIGUSR1') and signal.getsignal(kind) != signal.SIG_IGN:
                signal.signal(kind, self.hear)

    def hear(self, number, frame):
        if not self.signal:
            self.signal, self.heard = number, time.monotonic()
            if RANK == 0:
                with suppress(OSError):     # print() may be what the signal interrupted
                    os.write(sys.stdout.fileno(), f'\nreceived {signal.Signals(number).name}; a checkpoint is saved '
                             f'after this step (press Ctrl-C again to end without it)\n'.encode())
        elif time.monotonic() > self.heard + 1:         # torchrun forwards Ctrl-C, so it arrives twice
            sys.exit(128 + number)

# options that may differ between nodes if they lead to the same data and checkpoints
OWN_OPTIONS = 'dataset', 'tokenizer', 'workers', 'init_from', 'device'

def connect(device, shared={}):
    """Joins the other processes, if any. Raises UserError if they differ in `shared`, except in OWN_OPTIONS."""
    if WORLD_SIZE == 1:
        return
    # Signals and times go through gloo, so that they do not wait for a GPU. Windows has no NCCL.
    backend = 'cpu:gloo,cuda:nccl' if 'cuda' in device and dist.is_nccl_available() else 'gloo'
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    # gloo's threads need Python to free the last message, and abort if Python has shut down.
    atexit.register(time.sleep, 0.1)
    everyones = [None] * WORLD_SIZE
    dist.all_gather_object(everyones, shared)
    for name, here in shared.items():
        there = {theirs[name] for theirs in everyones} - {here}
        if there and name not in OWN_OPTIONS:
            raise UserError(f'the processes do not have the same {name} (here {here!r}, elsewhere {there}); start all '
                            f'of them with the same command, data and run folder (for GPUs of two kinds, add --dtype)')

# -----------------------------------------------------------------------------
# the run on disk: out/<run>/ with config.py, log.jsonl, curves.png and a folder for each checkpoint

def choose_out_dir():
    """
    Returns the folder of the run, and a context in which no other process trains there. The folder is out_dir or the
    first free out/<dataset>, or to resume, the latest with a checkpoint. Raises UserError.
    """
    folders = [Path(out_dir or f'out/{data_name(dataset)}')]
    if not out_dir:
        folders += [Path(f'{folders[0]}-{i}') for i in range(2, 1000)]
    saved = [run for run in folders if checkpoints(run)]
    may_resume = init_from.split(':')[0] in ('resume', 'auto')
    if may_resume and saved:
        run = max(saved, key=os.path.getmtime)
        return run, lock_run(run)
    if init_from == 'resume':
        raise UserError(f'{folders[0]} has no checkpoint to resume; use the --out_dir of another run (see `ls out`)')
    for run in folders:
        # A run that has saved nothing yet may be somebody else's, so only --out_dir and auto take it.
        if run not in saved and (out_dir or may_resume or not (run / 'config.py').exists()):
            try:
                return run, lock_run(run)
            except UserError:       # another run begins there
                if out_dir or may_resume:
                    raise
    raise UserError(f'{out_dir} already has a run; continue it with --init_from=auto, or use another --out_dir')

def lock_run(run):
    if RANK or eval_only:
        return nullcontext()
    run.mkdir(parents=True, exist_ok=True)
    return lock(run / '.lock', wait=False)

def resume_command(run, *arguments):
    return command('train.py', f'{run}/config.py', '--init_from=resume', *arguments)

def read_log(run):
    """Returns the entries of a run's log, without broken lines, such as one cut short by a full disk."""
    entries = []
    with suppress(FileNotFoundError), open(run / 'log.jsonl', errors='replace') as lines:
        for line in lines:
            with suppress(ValueError):
                match json.loads(line):
                    case {'step': int()} as entry:
                        entries.append(entry)
    return entries

def points(entries, name):
    """Returns [(step, value), ...] from the entries of a log that have this value."""
    return [(entry['step'], entry[name]) for entry in entries if name in entry]

# config.py resumes the run in its current folder. A copy under another name starts a new run.
CONFIG_HEAD = '''from pathlib import Path

if Path(__file__).name == 'config.py':
    out_dir = Path(__file__).parent.as_posix()
'''

def start_files(run, state, options, text):
    """
    Writes config.py, drops log entries and sets aside checkpoints after this step, and prints changed options. text:
    the text that was prepared
    """
    step = state['step']
    for unfinished in run.glob('.step_*.partial'):
        shutil.rmtree(unfinished)
    for later in checkpoints(run):
        if int(later.name[5:]) > step:          # not intact, or a copy under another number
            later.rename(run / f'damaged_{later.name}_{time.time():.0f}')
    entries = [entry for entry in read_log(run) if entry['step'] <= step and 'full_val_loss' not in entry]
    write(run / 'log.jsonl', ''.join(json.dumps(entry) + '\n' for entry in entries))
    for name, before in state['options'].items():
        if options.get(name) != before:
            say(f'since step {step}: {name} {before!r} -> {options.get(name)!r}')
    note = f'# dataset was prepared from {str(text)!r}; if it is lost, resume with that as --dataset\n'
    write(run / 'config.py', CONFIG_HEAD + note + as_file(options))
    state['options'] = options
    say(f'writing | {run}; stop with Ctrl-C; resume with: {resume_command(run)}\n')

@contextmanager
def optional(what):
    """Context for optional work: a failure is printed, and training goes on."""
    try:
        yield
    except Exception as e:
        say(f'{what} failed ({type(e).__name__}: {e}); training goes on without it')

def start_wandb(run):
    with optional('wandb'):
        import wandb
        run.wandb = wandb.init(project=wandb_project, name=wandb_run_name or run.folder.name, config=config,
                               dir=str(run.folder), id=run.state['wandb_id'] or None, resume='allow')
        run.state['wandb_id'] = run.wandb.id

def log(run, numbers):
    """Writes an entry to log.jsonl, and to wandb until that fails."""
    entry = {name: run.state[name] for name in ('step', 'tokens', 'seconds')} | numbers
    with optional('log.jsonl'), open(run.folder / 'log.jsonl', 'a') as f:
        f.write(json.dumps(entry) + '\n')
    if run.wandb:
        wandb, run.wandb = run.wandb, None          # stays None on failure
        with optional('wandb'):
            wandb.log(entry, step=entry['step'])
            run.wandb = wandb

def draw_curves(run):
    """Draws curves.png: the loss, learning rate, gradient norm and speed."""
    from matplotlib.figure import Figure
    entries = read_log(run)
    figure = Figure(figsize=(12, 6), layout='constrained')
    rows = [['loss', name] for name in ('lr', 'grad_norm', 'tokens_per_second')]
    axes = figure.subplot_mosaic(rows, width_ratios=[3, 1])
    for name, axis in axes.items():
        axis.plot(*zip(*points(entries, name)), label='training, mean since the last point')
        axis.set(title=name, xlabel='step')
        axis.grid(alpha=0.3)
    axes['loss'].plot(*zip(*points(entries, 'val_loss')), 'o--', label='validation')
    axes['loss'].legend()
    figure.savefig(run / 'curves.png', dpi=110)

def model_card(run):
    """Returns the README.md of a checkpoint, its page on the hub."""
    arguments = [re.sub(r'(^|=)(\w:)?[/\\].*[/\\]', r'\1', argument) for argument in sys.argv[1:]]       # no folders
    evaluated, last = 'not evaluated', run.state['evaluated']
    if last['step'] == run.state['step']:
        evaluated = f'{describe(last)} over {last["val_tokens"]:,} of {len(run.val_data) - 1:,} validation tokens'
    library = 'plaingpt' if family(run.model.config) == 'gpt_ablation' else 'transformers'
    return f"""---
library_name: {library}
pipeline_tag: text-generation
license: other     # fill this in, and add base_model if there is one
---
# {run.folder.name}

A language model: {run.model.num_params():,} parameters, vocabulary {run.model.config.vocab_size:,}, context {run.T:,}
tokens, trained on {Path(run.meta["source"]).name}: {run.state["sequences"]:,} sequences in {run.state["step"]:,} steps
({duration(run.state["seconds"])}; {run.device}, {device_name(run.device)}; processes: {WORLD_SIZE}).
Evaluation: {evaluated}.

    python {shlex.join(["train.py", *arguments])}
"""

def read_state(run, device):
    """
    Returns the newest intact checkpoint to resume and the contents of its training.json, or None and a new state. A
    resumed run resolves 'auto' as before, so that it computes the same, unless the kind of device has changed.
    """
    kind = device.split(':')[0]
    if kind == 'cuda' and choose_dtype('auto', device) != 'bfloat16':
        kind = 'cuda without bfloat16'
    folder, state = None, dict(NEW_STATE, device=kind)
    if checkpoints(run):
        folder = newest_intact(run)
        state = load_state(folder)
    for name in ('dtype', 'compile'):
        if config[name] != 'auto' or state['device'] != kind:
            state[name] = config[name]
    state.update(device=kind, dtype=choose_dtype(state['dtype'], device))
    return folder, state

def load_state(folder):
    """Returns the state in a checkpoint, with a new run's values for missing entries."""
    state = NEW_STATE | read_json(folder / 'training.json')
    tokens = state['sequences'] * state['options'].get('block_size', 0)
    return dict(state, tokens=state['tokens'] or tokens)        # older runs did not count them

def restore(folder, opt, scaler):
    """
    Fills the optimizer and the scaler from a checkpoint. Tensors that it lacks (added by you) keep their values. Raises
    UserError if it was trained with another optimizer or other trainable weights.
    """
    state = load_state(folder)
    [path] = folder.glob('training.*tensors')           # older runs have training.safetensors
    found = load_file(path)
    needed = {name for name in opt.tensors if name.startswith(('m.', 'v.'))}
    odd = (needed - found.keys()) | (found.keys() - opt.tensors.keys())
    before = state['options']['optimizer']
    if before != optimizer or odd:
        what = f'other weights ({", ".join(sorted(odd)[:3])})' if before == optimizer else f'--optimizer={before}'
        raise UserError(f'{folder} was trained with {what}; repeat that, or start a new run with --init_from={folder}')
    if opt.tensors.keys() > found.keys():
        say(f'{folder} does not have {", ".join(sorted(opt.tensors.keys() - found.keys()))}; starting these anew')
    with opt.evaluating():          # as in save(), so that averaged weights are swapped here, too
        for name, tensor in found.items():
            opt.tensors[name].copy_(tensor)
    opt.t = state['t']
    if state['scaler']:         # {} except with float16
        scaler.load_state_dict(state['scaler'])

# -----------------------------------------------------------------------------
# what a run starts with: options, data, model

def check_options():
    """Raises UserError if an option's value is not valid."""
    check_range(config, 1, math.inf, 'max_iters', 'batch_size', 'eval_interval', 'log_interval', 'keep_checkpoints',
                'timeout')
    check_range(config, 0, math.inf, 'max_minutes', 'eval_tokens', 'save_interval', 'sample_tokens', 'micro_batch_size',
                'warmup_iters', 'grad_clip', 'learning_rate', 'lr_decay_iters')
    check_range(config, 0, 1, 'beta1', 'beta2')
    check_range(config, 0, 2 ** 64 - 3, 'seed')         # the final sample texts use seed to seed + 3
    if optimizer not in ('muon', *RULES):
        raise UserError(f'optimizer = {optimizer!r} is unknown; use muon, {", ".join(RULES)}')
    if lr_decay not in ('linear', 'cosine'):
        raise UserError(f'lr_decay = {lr_decay!r} is unknown; use linear or cosine')
    unit = WORLD_SIZE * max(micro_batch_size, 1)
    if batch_size % unit:
        raise UserError(f'batch_size = {batch_size} is not a multiple of {unit} (processes x micro_batch_size); use '
                        f'--batch_size={math.ceil(batch_size / unit) * unit}')
    if warmup_iters > (lr_decay_iters or max_iters):
        say(f'warmup_iters = {warmup_iters} is longer than the run; use --warmup_iters={max_iters // 10}')
    model_config()

def model_config(options=config, **others):
    """Returns the GPTConfig that options describe. Raises UserError."""
    fields = {name: options[name] for name in GPTConfig.__dataclass_fields__}
    return GPTConfig(**(fields | others))

def open_data(source):
    """
    Returns the data folder, its meta.json, and training and validation data. Prepares them if they are missing, for the
    model in the folder source if given. Raises UserError if they are damaged, too few, or for another model.
    """
    wanted = str(source / 'tokenizer.json') if source else tokenizer
    folder = find_or_prepare(dataset, wanted, vocab_size)
    meta = read_meta(folder)
    tok_path = folder / 'tokenizer.json'
    tok = load_tokenizer(tok_path) if tok_path.exists() else None
    train_data, val_data = Shards(folder, 'train', meta, tok), Shards(folder, 'val', meta, tok)
    if len(train_data) < 2 * config['block_size'] or len(val_data) < 2:
        raise UserError(f'{folder} has {len(train_data):,} training and {len(val_data):,} validation tokens, too few '
                        f'for a context of {config["block_size"]}; use more text or a smaller --block_size')
    if tok and source and os.path.exists(wanted) and tok.vocab != load_tokenizer(wanted).vocab:
        raise UserError(f'{folder} was not made with {wanted}; use the text itself as --dataset')
    return folder, meta, train_data, val_data

def make_model(folder, meta, resumed):
    """Returns the model in a folder, or a new one. Raises UserError if the options describe a different model."""
    wanted = model_config(vocab_size=meta['ids' if folder else 'vocab_size'])
    if not folder:
        return GPT(wanted)
    before = import_config(folder)
    fields = {name: getattr(wanted, name) for name in UNSAVED_FIELDS}
    asks = config.source | dict(vocab_size='the data')
    if not resumed and not asks.get('block_size', '').startswith('--'):
        asks.pop('block_size', None)        # a config file may suit many models
    elif not resumed and before.position == 'rope':         # rope's tables can have any length
        fields['block_size'] = max(wanted.block_size, before.block_size)
    model = load_model(folder, **fields)
    for name, value in vars(model.config).items():
        asked = getattr(wanted, name)
        enough = name in ('vocab_size', 'block_size') and asked < value         # a larger one is fine
        if name in asks and asked != value and not enough:
            cure = 'prepare the data with its tokenizer' if name == 'vocab_size' else 'leave that out'
            other = 'start a new run with another --out_dir' if resumed else 'use --init_from=scratch'
            raise UserError(f'{folder} has {name} = {value}, but {asks[name]} asks for {asked}; {cure}, or {other}')
    return model

def options_of_run(model, T, data_folder, source, state):
    """Returns the options for a run's config.py, which starts the same run, on the prepared tokens."""
    options = dict(config, block_size=T, dataset=data_folder.as_posix())
    del options['out_dir']
    wanted = vars(model_config(vocab_size=model.config.vocab_size, block_size=model.config.block_size))
    # Only fields that differ are updated, so that d_ff = 0, for example, still follows n_embd.
    options.update(vars(model.config).items() - wanted.items())
    if source:
        options['tokenizer'] = (source / 'tokenizer.json').as_posix()
    else:
        options['init_from'] = state['options'].get('init_from', 'scratch')
    return options

# -----------------------------------------------------------------------------
# printed lines

def describe(entry):
    """describe(dict(val_loss=1.5, val_bpb=0.567)) -> 'validation loss 1.5000 | 0.567 bits per byte'"""
    bpb = entry['val_bpb']
    return f'validation loss {entry["val_loss"]:.4f}' + ('' if bpb is None else f' | {bpb:.3f} bits per byte')

PROGRESS = dict(loss='loss {:.4f}', lr='lr {:.1e}', grad_norm='norm {:.2f}', ms='{:.1f} ms',
                tokens_per_second='{:,.0f} tok/s', mfu='mfu {:.1%}')

def progress(step, entry, left):
    """Returns the printed line of a step. The first step may compile, so its line has no estimate of the time left."""
    parts = [f'step {step}']
    for name, value in entry.items():
        form = PROGRESS.get(name, f'{name} {{:.4g}}')
        parts.append(form.format(value))
    if step > 1:
        parts.append(f'{duration(left)} left')
    return ' | '.join(parts)

def duration(seconds):
    """duration(4000) -> '67 min'"""
    if seconds < 60:
        return f'{seconds:.0f} s'
    return f'{seconds / 60:.0f} min' if seconds < 7200 else f'{seconds / 3600:.1f} h'

def show_texts(run, n, length):
    """Prints n generated texts of `length` tokens, or nothing if length is 0 or there is no tokenizer."""
    tok = run.val_data.tok
    if length == 0 or not tok:
        return
    start = sample_start or DATASETS.get(run.meta.get('dataset'), {}).get('start', '')
    prompts = [prompt_ids(tok, start, run.ends)] * n
    steps = generate(run.model, prompts, length, run.ends, tok.vocab_size, seed, temperature=0.8)
    for text in texts_of(steps, tok, run.ends):
        say(f'{"-" * 40}\n{start}{text}')

def print_ending(run, final):
    """Prints the final evaluation and the next commands."""
    best, folder = run.state['best'], run.folder
    print(f'\n{describe(final)} over {final["val_tokens"]:,} of {len(run.val_data) - 1:,} validation tokens')
    print(f'time            {duration(run.state["seconds"])}')
    print(f'checkpoint      {checkpoints(run.folder)[-1]}')
    if 0 < best['step'] < run.state['step']:
        folder = folder / f'step_{best["step"]:08d}'
        print(f'the best one    {folder}, {describe(best)}')
    if run.val_data.tok:
        print('sample from it ', command('sample.py', f'--out_dir={folder}'))
    else:
        print('to sample from it,', make_tokenizer_json(checkpoints(run.folder)[-1], run.tok_path.parent))
    longer = [f'--max_iters={2 * run.state["step"]}']
    if max_minutes:
        longer.append(f'--max_minutes={2 * max_minutes:g}')
    print('train further  ', resume_command(run.folder, *longer))

# -----------------------------------------------------------------------------

def say(text):
    if RANK == 0:
        print(text, flush=True)

def main():
    # The machine and the run come first, so that mistakes show before data are prepared.
    check_options()
    device = choose_device(config['device'], LOCAL_RANK)
    set_up(device)
    run_folder, held = choose_out_dir()         # before anything is written
    with held:
        run = start(run_folder, device)
        train(run)
        finish(run)

def start(run_folder, device):
    """
    Returns the Run in this folder. It resumes a checkpoint, or starts from another model or a new one. With eval_only,
    only evaluates the model and exits.
    """
    checkpoint, state = read_state(run_folder, device)      # the checkpoint to resume, or None
    wanted, other_model = init_from.removeprefix('auto:'), None
    if wanted not in ('scratch', 'resume', 'auto'):
        other_model = find_folder(wanted)

    # the data and the model
    data_folder, meta, train_data, val_data = open_data(other_model)
    data_id = data_hash(meta)
    if checkpoint and state['data'] != data_id:
        raise UserError(f'{checkpoint} was trained on other data; use its config.py, or start with '
                        f'--init_from={checkpoint}')
    torch.manual_seed(seed)
    loaded_from = checkpoint or other_model
    model = make_model(loaded_from, meta, checkpoint).to(device).train()
    model.compute_dtype = getattr(torch, state['dtype'])
    T = min(config['block_size'], model.config.block_size)
    options = options_of_run(model, T, data_folder, other_model, state)
    # A checkpoint is identified by its step and time.
    connect(device, dict(options, dtype=state['dtype'], data=data_id, checkpoint=(state['step'], state['seconds'])))
    say(f'data    | {meta["source"]}, hash {data_id}, in {data_folder}')
    say(f'device  | {device} ({device_name(device)}), processes: {WORLD_SIZE}')
    say(f'model   | {model.num_params():,} parameters, vocabulary {model.config.vocab_size:,}, context {T}, from '
        f'{loaded_from or "scratch"}')
    if family(model.config) == 'gpt_ablation':
        say('        | no transformers class for this model: only plaingpt can load its checkpoints')
    if eval_only:
        say(f'{describe(evaluate(model.eval(), val_data, T, 0, tokens_at_once(device) // 8))} over the whole split')
        sys.exit(0)

    # the optimizer
    opt, scaler = Optimizer(model), make_scaler(device, state['dtype'])
    if checkpoint:
        restore(checkpoint, opt, scaler)
    opt.synchronize()           # different kinds of CPU draw different numbers from one seed

    # compiling, and the size of a forward pass
    compiled = choose_compile(state['compile'], device, max_iters * batch_size * T * model.flops_per_token(T))
    say(f'dtype   | {state["dtype"]}, weights and optimizer float32; compile {compiled}')
    fast = model
    if compiled:
        say('compile | the first step takes half a minute to two minutes longer')
        fast = torch.compile(model)
        opt.compile()
    micro, eval_batch = choose_batches(fast, opt, train_data, T, device)

    state.update(data=data_id, compile=compiled)
    if other_model and not checkpoint:
        state['evaluated'] = dict(step=-1)          # evaluates this model before the first step
    ends = find_ends(loaded_from or data_folder, meta['eot'])
    kept = keep_from(loaded_from) if loaded_from else {}
    run = Run(run_folder, state, meta, train_data, val_data, data_folder / 'tokenizer.json', ends, kept, model, fast,
              opt, scaler, device, T, micro, eval_batch)
    if state['step'] >= max_iters:
        say(f'step {state["step"]} of {max_iters}: nothing is left to train; for more, use a larger --max_iters')
    if RANK == 0:
        start_files(run_folder, state, options, meta.get('dataset', data_folder))
        if wandb_log:
            start_wandb(run)
    return run

def train(run):
    """Takes the remaining steps of a run, evaluates and saves. Exits after a signal."""
    state, T, interrupt = run.state, run.T, Interrupt()
    peak = peak_flops(run.device) * WORLD_SIZE
    stop, step = 0, state['step']
    first = step + 1
    began = time.perf_counter() - state['seconds']
    history = []        # numbers of the steps since the last printed line, evaluation or save
    replayed = Replayed(backward)
    while True:
        # Evaluate and save at intervals and after the last step, but not a new model at step 0 (see NEW_STATE).
        last = step >= max_iters or state['seconds'] >= max_seconds()
        evaluating = not stop and (last or step % eval_interval == 0) and step != state['evaluated']['step']
        saving = stop or last or (step > 0 and step % (save_interval or eval_interval) == 0)
        if evaluating or saving:
            replayed = Replayed(backward)           # frees the memory of the CUDA graph
            with run.opt.evaluating():
                if evaluating:
                    evaluate_run(run, last)
                if saving:
                    save(run, stop or last)
            history = []
        if stop or last:
            break

        # a step
        if not history:
            line_began = time.perf_counter()
        lr = next_lr(state)
        starts = run.train_data.starts(state['sequences'], batch_size, T, seed)
        step += 1
        batches = micro_batches(run.train_data, starts, step, T, run.micro, run.device)
        history.append(training_step(run.fast, run.opt, run.scaler, batches, batch_size, lr, replayed))
        state['sequences'] += batch_size
        state['tokens'] += batch_size * T
        state.update(step=step, lr=lr)
        if step == first:           # now there is something to save
            interrupt.listen()

        printing = step % log_interval == 0 or step in (1, max_iters)
        if printing:            # waits for the device
            means = {name: float(sum(past[name] for past in history)) / len(history) for name in run.model.losses}
            numbers = dict(means, lr=lr) | history[-1] | means
            sums = combine('SUM', *map(float, numbers.values()))
            entry = {name: x / WORLD_SIZE for name, x in zip(numbers, sums)}
            check_finite(run, entry['loss'])

        # All processes must agree on signals and the clock.
        stop, state['seconds'] = combine('MAX', interrupt.signal, time.perf_counter() - began)
        if step == 1:
            state['first_step'] = state['seconds']

        if printing:
            seconds = (time.perf_counter() - line_began) / len(history)
            rate = batch_size * T / seconds
            entry.update(ms=1e3 * seconds, tokens_per_second=rate)
            if peak:
                entry['mfu'] = rate * run.model.flops_per_token(T) / peak
            left = min((max_iters - step) * seconds, max_seconds() - state['seconds'])
            say(progress(step, entry, max(left, 0)))
            if RANK == 0:
                log(run, entry)
            history = []

    # All processes wait here for the save, because torchrun stops the others when one exits with an error. A signal may
    # have arrived in the final evaluation.
    [stop] = combine('MAX', interrupt.signal)
    if stop:
        say(f'stopped at step {step}; resume with: {resume_command(run.folder)}')
        sys.exit(128 + int(stop))
    interrupt.signal = True         # everything is saved, so the next signal exits at once

def finish(run):
    """
    Evaluates the complete validation split (with max_minutes, as much of it as takes that long), and prints samples and
    the next commands.
    """
    with run.opt.evaluating():
        final = evaluate(run.model, run.val_data, run.T, 0, run.eval_batch, time.perf_counter() + max_seconds())
        if RANK == 0:
            log(run, {f'full_{name}': value for name, value in final.items()})
            show_texts(run, 4, 3 * sample_tokens)
            print_ending(run, final)

if __name__ == '__main__':
    launch(main)
