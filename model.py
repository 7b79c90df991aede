"""
The whole Transformer: layers, losses, attention, KV cache, and checkpoints that Hugging Face opens.

    model = GPT(GPTConfig(vocab_size=1024, n_layer=3, n_head=4, n_embd=256, block_size=128))
    logits, loss = model(idx, targets)      # (B, T, vocab_size), scalar; idx and targets are (B, T) int64

Llama-style by default: pre-norm RMSNorm (arXiv:1910.07467), rotary positions (arXiv:2104.09864), SwiGLU
(arXiv:2002.05202), no biases. GPT-2 is `GPTConfig(**GPT2)`, and the ablations are other values of the last fields.

Mixed precision is explicit rather than by autocast: weights are float32, `model.compute_dtype` is what activations and
matmuls use, and each layer casts its own weight. Norms, softmax and the loss are computed in float32.
"""
import ctypes
import errno
import json
import math
import os
import platform
import re
import shutil
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from configurator import KINDS, UserError, file_sha256, read_json, sync

@dataclass
class GPTConfig:
    block_size: int = 1024          # the longest context, in tokens
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = 0              # heads of keys and values (GQA, arXiv:2305.13245); 0: n_head
    n_embd: int = 768
    d_ff: int = 0                   # width inside the MLP; 0: 8/3 n_embd to the next 64 for swiglu, else 4 n_embd
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    bias: bool = False
    tie_weights: bool = False       # lm_head is the embedding
    qk_norm: bool = False           # RMSNorm of queries and keys, per head (as in Qwen3)
    norm: str = 'rms'               # rms, layer, none
    norm_position: str = 'pre'      # pre, post
    position: str = 'rope'          # rope, learned, none
    mlp: str = 'swiglu'             # swiglu, silu, gelu
    attention: str = 'flash'        # flash (torch's fused kernels), naive

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type is float and type(value) is int and abs(value) < 1 << 53:
                setattr(self, f.name, float(value))
            elif type(value) is not f.type or f.type is float and not math.isfinite(value):
                raise UserError(f'{f.name} = {value!r}: give {KINDS[f.type]}')
        self.n_kv_head = self.n_kv_head or self.n_head
        self.d_ff = self.d_ff or ((-(-8 * self.n_embd // 3) + 63) // 64 * 64 if self.mlp == 'swiglu' else 4 * self.n_embd)
        for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'd_ff'):
            most = 10_000 if name == 'n_layer' else 1 << 28
            if not 1 <= getattr(self, name) <= most:
                raise UserError(f'{name} = {getattr(self, name)}: give 1 to {most:,}')
        for name, values in dict(norm='rms layer none', norm_position='pre post', position='rope learned none',
                                 mlp='swiglu silu gelu', attention='flash naive').items():
            if getattr(self, name) not in values.split():
                raise UserError(f'{name} = {getattr(self, name)!r}: give one of {values}')
        if self.n_embd % self.n_head or self.n_head % self.n_kv_head:
            raise UserError(f'n_head = {self.n_head} must divide n_embd = {self.n_embd}, and n_kv_head = '
                            f'{self.n_kv_head} must divide n_head; try n_head = {math.gcd(self.n_embd, self.n_head)}')
        hs = self.n_embd // self.n_head
        if self.position == 'rope' and hs % 2:
            raise UserError(f'rope turns pairs: n_embd / n_head = {hs} must be even')
        if self.position == 'rope' and self.block_size * hs > 1 << 28:      # no file holds its tables: 1 GB at most
            raise UserError(f'block_size = {self.block_size}: give {(1 << 28) // hs:,} or less')
        if not 0 <= self.dropout < 1:
            raise UserError(f'dropout = {self.dropout}: give a share from 0 to 1')
        if not (self.rope_theta > 0 and self.norm_eps >= 0):
            raise UserError(f'rope_theta = {self.rope_theta} must be above 0 and norm_eps = {self.norm_eps} not below; try the defaults')

# GPT-2 as a setting: GPTConfig(**GPT2) has 124,439,808 parameters
GPT2 = dict(bias=True, tie_weights=True, norm='layer', position='learned', mlp='gelu')

# -----------------------------------------------------------------------------
# functions, written out

def upcast(x):
    """float32, or float64 if it is that already: what norms, softmax and the loss are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

def softmax(x, dim):
    """exp(x) / sum(exp(x)) along dim; the largest element is subtracted first, so that nothing overflows."""
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)

def silu(x):
    """x * sigmoid(x)"""
    return x * torch.sigmoid(x)

def gelu(x):
    """GPT-2's tanh form of x * Phi(x) (arXiv:1606.08415)."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))

def cross_entropy(logits, targets):
    """Mean of -log softmax(logits)[target] in nats: logits (..., vocab), targets (...) -> a scalar."""
    logits = logits - logits.amax(-1, keepdim=True)
    target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (logits.exp().sum(-1).log() - target_logits).mean()

def scaled_dot_product_attention(q, k, v, mask=None, dropout=0.0):
    """softmax(q k^T / sqrt(hs)) v: q (..., T, hs), k and v (..., S, hs), mask (T, S), True where q may look."""
    att = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if mask is not None:
        att = att.masked_fill(~mask, float('-inf'))
    # softmax above, whose gradient takes a detour by way of the maximum
    return F.dropout(F.softmax(upcast(att), -1).to(v.dtype), dropout) @ v

def rope_angles(positions, hs, theta, device=None):
    """positions (T,) -> cos, sin (T, hs/2) of position * theta^(-2i/hs)."""
    freqs = theta ** (-torch.arange(0, hs, 2, device=device).float() / hs)
    angles = positions.float()[:, None] * freqs
    return angles.cos(), angles.sin()

def apply_rope(x, cos, sin):
    """Turns the pairs (x[i], x[i + hs/2]) of each head by their angle: x (..., T, hs) -> (..., T, hs)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

def rope(x, positions, theta=10000.0):
    """Rotary position embedding in the half-split layout of Hugging Face's Llama: x (..., T, hs), positions (T,)."""
    return apply_rope(x, *rope_angles(positions, x.size(-1), theta, x.device))

# -----------------------------------------------------------------------------
# layers

class Linear(nn.Module):
    def __init__(self, d_in, d_out, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None
        std = math.sqrt(2 / (d_in + d_out))
        nn.init.trunc_normal_(self.weight, 0.0, std, -3 * std, 3 * std)

    def forward(self, x):
        rows = x.numel() // x.size(-1)
        if rows <= 16 and x.device.type == 'cpu' and not torch.is_grad_enabled() and (rows == 1 or x.dtype == torch.bfloat16):
            # a token at a time is bound by reading the weights
            y = self.few_rows(x.reshape(rows, -1)).reshape(*x.shape[:-1], -1)
            return y if self.bias is None else y + self.bias.to(x.dtype)
        # F.linear is x @ weight.T + bias in one call
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def few_rows(self, x):
        """x @ weight.T on a CPU: in bfloat16 1.2 (one row) to 1.6 times as fast as F.linear."""
        w = self.weight.to(x.dtype)
        if len(x) > 1:
            return (w @ x.t()).t()
        if torch.compiler.is_compiling() and w.dtype == torch.float32:      # some libraries read slower than the memory can
            return (w * x).sum(-1)
        return torch.mv(w, x[0])

class Embedding(nn.Module):
    def __init__(self, n, d, std=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, d))
        nn.init.trunc_normal_(self.weight, 0.0, std, -3 * std, 3 * std)

    def forward(self, idx):
        return F.embedding(idx, self.weight)       # weight[idx], with a faster backward

class RMSNorm(nn.Module):
    """x / rms(x) * weight"""

    def __init__(self, d, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        f = upcast(x)
        return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)

class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias (arXiv:1607.06450)"""

    def __init__(self, d, eps, bias):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps
        self.bias = nn.Parameter(torch.zeros(d)) if bias else None

    def forward(self, x):
        f = upcast(x)
        f = f - f.mean(-1, keepdim=True)
        y = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return (y if self.bias is None else y + self.bias).to(x.dtype)

def make_norm(config):
    if config.norm == 'rms':
        return RMSNorm(config.n_embd, config.norm_eps)
    if config.norm == 'layer':
        return LayerNorm(config.n_embd, config.norm_eps, config.bias)
    return nn.Identity()

class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.hs = config.n_embd // config.n_head
        self.dropout, self.flash = config.dropout, config.attention == 'flash'
        # queries, keys and values of all heads in one matmul
        self.c_attn = Linear(config.n_embd, (self.n_head + 2 * self.n_kv_head) * self.hs, config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, config.bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(self.hs, config.norm_eps), RMSNorm(self.hs, config.norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, x, angles, past=None):
        B, T, C = x.shape       # batch, time, n_embd
        q, k, v = self.c_attn(x).view(B, T, -1, self.hs).transpose(1, 2).split(
            (self.n_head, self.n_kv_head, self.n_kv_head), dim=1)        # (B, nh, T, hs), and nkv heads of k and v
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = apply_rope(q, *angles), apply_rope(k, *angles)        # angles (T, hs/2), or (B, 1, T, hs/2)
        mask = None
        if past is not None:        # put the new keys and values where they belong, and look at all
            all_k, all_v, positions, mask = past                         # (B, nkv, S, hs) twice, (B, T), (B, 1, T, S)
            rows = torch.arange(B, device=x.device)[:, None]
            all_k[rows, :, positions], all_v[rows, :, positions] = k.transpose(1, 2), v.transpose(1, 2)
            k, v = all_k, all_v
        y = self.attend(q, k, v, mask).transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)

    def attend(self, q, k, v, mask=None):
        """mask (B, 1, T, S): where queries may look; None: at themselves and before."""
        B, nh, T, hs = q.shape
        S, dropout = k.size(-2), self.dropout if self.training else 0.0
        if mask is not None and T == 1:         # one token: all heads that share keys look at them as rows of one matrix
            return scaled_dot_product_attention(q.view(B, self.n_kv_head, -1, hs), k, v, mask).view(B, nh, 1, hs)
        k, v = [x.repeat_interleave(self.n_head // self.n_kv_head, 1) for x in (k, v)] \
            if self.n_kv_head < self.n_head else (k, v)
        # torch's fused CPU kernel is slow in bfloat16: its backward is 5 times as fast in float32, and compiled code that
        # is written out is faster still (a step of 6 layers at 256 by 15%)
        half_on_cpu = q.device.type == 'cpu' and q.dtype == torch.bfloat16
        if not self.flash or half_on_cpu and torch.compiler.is_compiling() and S <= 512:
            mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril() if mask is None else mask
            return scaled_dot_product_attention(q, k, v, mask, dropout)
        dtype = torch.float32 if half_on_cpu else q.dtype
        y = F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), mask, dropout, is_causal=mask is None and T > 1)
        return y.to(q.dtype)

class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.kind, self.dropout = config.mlp, config.dropout
        if config.mlp == 'swiglu':
            self.gate = Linear(config.n_embd, config.d_ff, config.bias)
        self.up = Linear(config.n_embd, config.d_ff, config.bias)
        self.down = Linear(config.d_ff, config.n_embd, config.bias)

    def forward(self, x):
        if self.kind == 'swiglu':
            x = F.silu(self.gate(x)) * self.up(x)
        else:
            x = F.silu(self.up(x)) if self.kind == 'silu' else F.gelu(self.up(x), approximate='tanh')
        return F.dropout(self.down(x), self.dropout, self.training)

class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.attn = make_norm(config), Attention(config)
        self.ln_2, self.mlp = make_norm(config), MLP(config)
        self.pre = config.norm_position == 'pre'

    def forward(self, x, angles, past=None):
        if self.pre:
            x = x + self.attn(self.ln_1(x), angles, past)
            return x + self.mlp(self.ln_2(x))
        x = self.ln_1(x + self.attn(x, angles, past))
        return self.ln_2(x + self.mlp(x))

class KVCache:
    """Keys and values of all layers, and how many positions each row of the batch has: they may differ."""

    def __init__(self, config, batch, size, device, dtype):
        shape = (batch, config.n_kv_head, size, config.n_embd // config.n_head)
        # a tensor for each layer: a compiler would copy all of one that is shared at every step
        self.k, self.v = ([torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)] for _ in 'kv')
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        if str(device).startswith('cuda'):      # recorded launches may write to what never moves
            for t in (*self.k, *self.v, self.lengths):
                torch._dynamo.mark_static_address(t)

class GPT(nn.Module):
    pad_to = 64             # rows of the vocabulary, inside the model

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        # a vocabulary of a multiple of 64 makes the largest matmul faster on GPUs. the padding exists in here only:
        # its rows are zero, its logits are cut off before the softmax, and a checkpoint does not hold it
        padded = -(-config.vocab_size // self.pad_to) * self.pad_to if config.vocab_size > 1024 else config.vocab_size
        # tied: the blocks begin as the identity, so a token's logit for itself begins at n_embd * std, which must stay
        # small against log(vocab_size) for the loss to begin there
        std = min(0.02, math.log(1 + config.vocab_size / 12) / config.n_embd) if config.tie_weights else 1.0
        self.wte = Embedding(padded, config.n_embd, std)
        if config.position == 'learned':
            self.wpe = Embedding(config.block_size, config.n_embd, 0.02)
        if config.position == 'rope':
            for name, table in zip(('cos', 'sin'), rope_angles(torch.arange(config.block_size), config.n_embd // config.n_head,
                                                               config.rope_theta)):
                self.register_buffer(name, table, persistent=False)     # (block_size, hs/2)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = make_norm(config) if config.norm_position == 'pre' else nn.Identity()
        self.lm_head = Linear(config.n_embd, padded)
        if config.tie_weights:
            self.lm_head.weight = self.wte.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """What differs from the truncated normal that the layers start with."""
        config = self.config
        if config.position == 'learned':            # as GPT-2 starts
            for name, p in self.named_parameters():
                if p.dim() == 2:
                    residual = name.endswith(('c_proj.weight', 'down.weight'))
                    nn.init.normal_(p, 0.0, 0.02 / math.sqrt(2 * config.n_layer) if residual else 0.02)
        else:
            n = config.n_embd
            for block in self.h:
                w = block.attn.c_attn.weight        # three matrices in one: the spread of each for itself
                for part in w.split((n, (w.size(0) - n) // 2, (w.size(0) - n) // 2)):
                    std = math.sqrt(2 / (n + part.size(0)))
                    nn.init.trunc_normal_(part, 0.0, std, -3 * std, 3 * std)
                block.attn.c_proj.weight.zero_()    # every block begins as the identity
                block.mlp.down.weight.zero_()
        for w in (self.wte.weight, self.lm_head.weight):
            w[config.vocab_size:] = 0

    def forward(self, idx, targets=None, cache=None, lengths=None):
        """
        idx (B, T) -> logits (B, T, vocab_size) in float32, and with targets (B, T) the mean loss in nats, else None.
        cache: a KVCache; idx then goes on where it ends, and only the last logits come, (B, 1, V). lengths (B,): how many
        tokens of each row count, where prompts of different lengths were filled up at their ends.
        """
        config = self.config
        B, T = idx.shape
        if cache is None:
            assert T <= config.block_size, f'{T} tokens do not fit the context of {config.block_size}'
            positions = torch.arange(T, device=idx.device)                                      # (T,)
        else:
            positions = cache.lengths[:, None] + torch.arange(T, device=idx.device)             # (B, T)
            mask = torch.arange(cache.k[0].size(2), device=idx.device) <= positions[:, None, :, None]       # (B, 1, T, S)
        x = self.wte(idx)       # (B, T, n_embd)
        if config.position == 'learned':
            x = x + self.wpe(positions)
        x = F.dropout(x, config.dropout, self.training).to(self.compute_dtype)
        angles = None
        if config.position == 'rope':
            angles = [t[positions] if cache is None else t[positions][:, None] for t in (self.cos, self.sin)]
        for i, block in enumerate(self.h):
            x = block(x, angles, None if cache is None else (cache.k[i], cache.v[i], positions, mask))
        if cache is not None:
            x = x[:, -1:] if lengths is None else x[torch.arange(B, device=x.device), lengths - 1][:, None]
            cache.lengths += T if lengths is None else lengths
        logits = upcast(self.lm_head(self.ln_f(x)))
        if logits.size(-1) > config.vocab_size:
            logits = logits[..., :config.vocab_size]
        if targets is None:
            return logits, None
        # cross_entropy above, fused
        return logits, F.cross_entropy(logits.reshape(-1, config.vocab_size), targets.reshape(-1))

    def new_cache(self, batch, size=0):
        """An empty KVCache of `size` positions (0: block_size) for each row of a batch."""
        p = self.wte.weight
        return KVCache(self.config, batch, size or self.config.block_size, p.device, self.compute_dtype)

    def num_params(self):
        """Parameters of the model, without the padding of the vocabulary; tied weights count once."""
        padding = (self.wte.weight.size(0) - self.config.vocab_size) * self.config.n_embd
        return sum(p.numel() for p in self.parameters()) - padding * (1 if self.config.tie_weights else 2)

    def flops_per_token(self, T=None):
        """Training FLOPs per token: 6 per weight of a matmul, the head's too, and 12 n_layer n_embd T for attention."""
        c = self.config
        weights = sum(m.weight.numel() for m in self.h.modules() if isinstance(m, Linear)) + c.vocab_size * c.n_embd
        return 6 * weights + 12 * c.n_layer * c.n_embd * (T or c.block_size)

# -----------------------------------------------------------------------------
# which machine this is; each choice comes with its reason, for the start-up lines

# dense bf16 FLOP/s of common cards (fp16 of V100 and T4), without sparsity, as published
PEAK_FLOPS = {'B200': 2250e12, 'H200': 989e12, 'H100 PCIe': 756e12, 'H100 NVL': 835e12, 'H100': 989e12, 'H20': 148e12,
              'A100': 312e12, 'A10G': 70e12, 'A40': 149.7e12, 'L40S': 362e12, 'L4': 121e12, 'V100': 125e12, 'T4': 65e12,
              'RTX 5090': 209.5e12, 'RTX 4090': 165.2e12, 'RTX 3090': 71e12}

def choose_device(device, local_rank=0):
    """'auto' -> the GPU of this process, an Apple GPU, or the CPU. Raises UserError for a device that is not there."""
    if not re.fullmatch(r'auto|cpu|mps|cuda(:[0-9]+)?', str(device)):
        raise UserError(f'device = {device!r}: give auto, cpu, cuda, cuda:1 or mps')
    if device == 'mps' and not torch.backends.mps.is_available():
        raise UserError('this machine has no Apple GPU that torch can use; try --device=cpu')
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
    try:
        return place, torch.cuda.get_device_name(place)
    except (RuntimeError, AssertionError, ValueError):
        raise UserError(f'device = {device!r}: this machine has {count} GPUs, from cuda:0 on')

DTYPES = 'float32', 'bfloat16', 'float16'

def choose_dtype(dtype, place):
    """'auto' -> bfloat16 where the hardware has it, float16 on GPUs that only have that, else float32."""
    if dtype != 'auto':
        if dtype not in DTYPES:
            raise UserError(f'dtype = {dtype!r}: give auto, float32, bfloat16 or float16')
        return dtype, 'as asked'
    if place.startswith('cuda'):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return 'bfloat16', 'the GPU has it'
        if torch.cuda.get_device_capability(place)[0] >= 7:
            return 'float16', 'the GPU has no bfloat16'
        return 'float32', 'the GPU has neither bfloat16 nor a fast float16'
    if place == 'cpu':      # elsewhere bfloat16 is emulated, slower than float32
        for name, kind in (('_is_amx_tile_supported', 'AMX'), ('_is_avx512_bf16_supported', 'AVX512_BF16')):
            if getattr(torch.cpu, name, lambda: False)():
                return 'bfloat16', f'the CPU has {kind}'
        return 'float32', 'the CPU computes bfloat16 no faster'
    return 'float32', 'bfloat16 is not tried here'

def choose_compile(compile, place, seconds=0.0):
    """'auto' -> whether to compile, for something that takes so many seconds without it on a CPU."""
    if compile not in (True, False, 'auto'):
        raise UserError(f'compile = {compile!r}: give True, False or auto')
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
    if place != 'cpu':
        return False, 'not on this device'
    if compile == 'auto' and seconds < 90:
        return False, 'it would take longer than this run gains by it'
    if not any(map(shutil.which, ('g++', 'clang++', 'cl'))):
        return False, 'no C++ compiler was found'
    return True, 'as asked' if compile is True else 'this run would take more than 90 s without it'

def set_up(place):
    """What is set once: TF32 for float32 matmuls on a GPU, malloc and the compiler on a CPU. Raises UserError."""
    torch.set_float32_matmul_precision('high' if place.startswith('cuda') else 'highest')
    if place.startswith('cuda'):
        torch.cuda.set_device(place)
        try:
            torch.ones(1, device=place) + 1         # the card may be too old for this torch
        except RuntimeError as e:
            raise UserError(f'{place} can not be used ({str(e).splitlines()[0]}); try --device=cpu')
    elif sys.platform == 'linux':
        if hasattr(libc := ctypes.CDLL(None), 'mallopt'):
            # keep freed memory (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD): the kernel zeroes it anew at every step, a tenth of it
            libc.mallopt(-3, 1 << 30), libc.mallopt(-1, 2 ** 31 - 1)
        # large pages: 124M parameters in float32 generate 15% faster. torch looks once, before its first tensor
        os.environ.setdefault('THP_MEM_ALLOC_ENABLE', '1')
        if platform.machine() == 'x86_64':      # the first compile takes 8 s less when g++ is not asked what the CPU can do
            os.environ.setdefault('TORCHINDUCTOR_VEC_ISA_OK', '1')

def synchronize(place):
    """Waits until a device has done what was asked of it."""
    if place.startswith('cuda'):
        torch.cuda.synchronize()
    elif place == 'mps':
        torch.mps.synchronize()

def peak_flops(place):
    """Dense bf16 FLOP/s of the card, or 0 where it is not known."""
    name = torch.cuda.get_device_name(place) if place.startswith('cuda') else ''
    return next((f for card, f in PEAK_FLOPS.items() if re.search(rf'\b{card}\b(?! (Laptop|Ti|D)\b)', name)), 0)

# -----------------------------------------------------------------------------
# names: ours <-> those of a Hugging Face Llama (Qwen3 with qk_norm) or GPT-2

LLAMA_NAMES = [('wte', 'model.embed_tokens'), ('wpe', 'model.embed_positions'), ('ln_f', 'model.norm'),
               ('lm_head', 'lm_head'), ('h.N.ln_1', 'model.layers.N.input_layernorm'),
               ('h.N.ln_2', 'model.layers.N.post_attention_layernorm'), ('h.N.attn.q_norm', 'model.layers.N.self_attn.q_norm'),
               ('h.N.attn.k_norm', 'model.layers.N.self_attn.k_norm'), ('h.N.attn.c_proj', 'model.layers.N.self_attn.o_proj'),
               ('h.N.mlp.gate', 'model.layers.N.mlp.gate_proj'), ('h.N.mlp.up', 'model.layers.N.mlp.up_proj'),
               ('h.N.mlp.down', 'model.layers.N.mlp.down_proj')]
GPT2_NAMES = [('wte', 'transformer.wte'), ('wpe', 'transformer.wpe'), ('ln_f', 'transformer.ln_f'),
              ('h.N.ln_1', 'transformer.h.N.ln_1'), ('h.N.ln_2', 'transformer.h.N.ln_2'),
              ('h.N.attn.c_attn', 'transformer.h.N.attn.c_attn'), ('h.N.attn.c_proj', 'transformer.h.N.attn.c_proj'),
              ('h.N.mlp.up', 'transformer.h.N.mlp.c_fc'), ('h.N.mlp.down', 'transformer.h.N.mlp.c_proj')]

def family(config):
    """The class of transformers that computes the same: 'llama', 'qwen3', 'gpt2'; 'ours' where it has none."""
    c = config
    if (c.norm, c.norm_position, c.position, c.mlp) == ('rms', 'pre', 'rope', 'swiglu'):
        return 'llama' if not c.qk_norm else 'ours' if c.bias else 'qwen3'
    gpt2 = ('layer', 'pre', 'learned', 'gelu')
    if (c.norm, c.norm_position, c.position, c.mlp) == gpt2 and c.bias and not c.qk_norm and c.n_kv_head == c.n_head:
        return 'gpt2'
    return 'ours'

def rename(name, table):
    """rename('h.3.ln_1.weight', LLAMA_NAMES) -> 'model.layers.3.input_layernorm.weight'"""
    stem, _, kind = name.rpartition('.')
    layer = re.search(r'\.(\d+)\.', stem)
    new = dict(table).get(re.sub(r'\.\d+\.', '.N.', stem, count=1))
    return new and f'{new.replace("N", layer[1]) if layer else new}.{kind}'

def export_tensors(model):
    """The weights as Hugging Face names and shapes them: float32, on the CPU, without padding."""
    c, kind, out = model.config, family(model.config), {}
    for name, p in model.state_dict().items():
        p = p.detach().float().to('meta' if p.is_meta else 'cpu')
        if name == 'lm_head.weight' and c.tie_weights:
            continue
        if name in ('wte.weight', 'lm_head.weight'):
            p = p[:c.vocab_size]
        if kind == 'gpt2':
            transposed = p.dim() == 2 and name.startswith('h.')     # GPT-2's Conv1D holds its weights as (in, out)
            out[rename(name, GPT2_NAMES) or name] = (p.t() if transposed else p).contiguous()
        elif '.c_attn.' in name:
            hs = c.n_embd // c.n_head
            for part, x in zip('qkv', p.split((c.n_embd, c.n_kv_head * hs, c.n_kv_head * hs))):
                out[name.replace('h.', 'model.layers.', 1).replace('attn.c_attn', f'self_attn.{part}_proj')] = x.clone()
        else:
            out[rename(name, LLAMA_NAMES)] = p.clone()
    return out

def named_as_here(config, tensors):
    """The names that export_tensors gives: files of the hub hold what is not needed, and leave GPT-2's prefix out."""
    tensors = {k: v for k, v in tensors.items() if not k.endswith(('.attn.bias', '.attn.masked_bias', '.inv_freq'))}
    if family(config) == 'gpt2':
        tensors = {k if k.startswith(('transformer.', 'lm_head.')) else 'transformer.' + k: v for k, v in tensors.items()}
    if config.tie_weights:
        tensors.pop('lm_head.weight', None)
    return tensors

@torch.no_grad()
def import_tensors(model, tensors):
    """Fills the model from tensors with the names and shapes of export_tensors."""
    kind = family(model.config)
    for name, p in model.named_parameters():
        if kind == 'gpt2':
            x = tensors[rename(name, GPT2_NAMES) or name]
            x = x.t() if p.dim() == 2 and name.startswith('h.') else x
        elif '.c_attn.' in name:
            theirs = name.replace('h.', 'model.layers.', 1)
            x = torch.cat([tensors[theirs.replace('attn.c_attn', f'self_attn.{part}_proj')] for part in 'qkv'])
        else:
            x = tensors[rename(name, LLAMA_NAMES)]
        p[:len(x)].copy_(x)

def export_config(config, eot=None):
    """The config.json of the family, and for 'ours' the fields of GPTConfig as they are."""
    c, kind = config, family(config)
    common = dict(vocab_size=c.vocab_size, tie_word_embeddings=c.tie_weights, torch_dtype='float32',
                  bos_token_id=eot, eos_token_id=eot)
    if kind == 'gpt2':
        return dict(common, model_type='gpt2', architectures=['GPT2LMHeadModel'], n_positions=c.block_size,
                    n_ctx=c.block_size, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head, n_inner=c.d_ff,
                    activation_function='gelu_new', layer_norm_epsilon=c.norm_eps, resid_pdrop=c.dropout,
                    embd_pdrop=c.dropout, attn_pdrop=c.dropout)
    if kind == 'ours':
        return dict(common, model_type='gpt_ablation', architectures=['AblationForCausalLM'], gpt_config=asdict(c))
    name = dict(llama='LlamaForCausalLM', qwen3='Qwen3ForCausalLM')[kind]
    return dict(common, model_type=kind, architectures=[name], hidden_size=c.n_embd, intermediate_size=c.d_ff,
                num_hidden_layers=c.n_layer, num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head,
                head_dim=c.n_embd // c.n_head, max_position_embeddings=c.block_size, rms_norm_eps=c.norm_eps,
                rope_theta=c.rope_theta, rope_parameters=dict(rope_type='default', rope_theta=c.rope_theta),
                hidden_act='silu', attention_bias=c.bias, mlp_bias=c.bias, attention_dropout=0.0)

def import_config(d, path='config.json'):
    """config.json as a dict -> GPTConfig. Raises UserError for an architecture or a value that is not possible here."""
    try:
        kind = d['model_type']
        if kind == 'gpt_ablation':
            return GPTConfig(**d['gpt_config'])
        if kind == 'gpt2':
            if d.get('activation_function', 'gelu_new') not in ('gelu_new', 'gelu_pytorch_tanh'):
                raise UserError(f'activation {d["activation_function"]} is not here; only the tanh form of gelu')
            return GPTConfig(block_size=d['n_positions'], vocab_size=d['vocab_size'], n_layer=d['n_layer'],
                             n_head=d['n_head'], n_embd=d['n_embd'], d_ff=d.get('n_inner') or 0,
                             norm_eps=d.get('layer_norm_epsilon', 1e-5),
                             **{**GPT2, 'tie_weights': d.get('tie_word_embeddings', True)})
        if kind not in ('llama', 'qwen3'):
            raise UserError(f'the architecture {kind!r} is not here; Llama, Qwen3 and GPT-2 are')
        ropes = d.get('rope_parameters') or d.get('rope_scaling') or {}
        odd = {k: d[k] for k, usual in (('attention_bias', d.get('mlp_bias', False)), ('hidden_act', 'silu'),
               ('head_dim', d['hidden_size'] // d['num_attention_heads'])) if d.get(k, usual) not in (usual, None)}
        if odd or ropes.get('rope_type', ropes.get('type', 'default')) != 'default':
            raise UserError(f'{odd or ropes} is not supported here; a plain Llama, Qwen3 or GPT-2 is')
        return GPTConfig(
            block_size=d['max_position_embeddings'], vocab_size=d['vocab_size'], n_layer=d['num_hidden_layers'],
            n_head=d['num_attention_heads'], n_kv_head=d.get('num_key_value_heads') or 0, n_embd=d['hidden_size'],
            d_ff=d['intermediate_size'], rope_theta=ropes.get('rope_theta') or d.get('rope_theta') or 10000.0,
            norm_eps=d.get('rms_norm_eps', 1e-6), bias=d.get('attention_bias') or False,
            tie_weights=d.get('tie_word_embeddings') or False, qk_norm=kind == 'qwen3')
    except UserError as e:
        raise UserError(f'{path}: {e}')
    except (KeyError, TypeError, AttributeError, ArithmeticError) as e:
        raise UserError(f'{path} does not describe a model ({type(e).__name__}: {e}); use the folder of another one')

# -----------------------------------------------------------------------------
# checkpoints: a folder, written beside and renamed into place once

MANIFEST = 'manifest.json'

def save_checkpoint(folder, model, tokenizer_path, eot, training=None, tensors=None):
    """
    Writes a checkpoint folder that `transformers` opens: config.json, model.safetensors, the tokenizer's files, and,
    for resuming, training.json (a dict) and training.safetensors (a dict of tensors), with the sha256 of every file.
    The folder appears under its name only when all of it is on the disk and was read back. Raises OSError where it can
    not be written, and leaves nothing then.
    """
    folder = Path(folder)
    partial = folder.with_name(f'.{folder.name}.partial')
    files = [(partial / 'model.safetensors', export_tensors(model)), *([(partial / 'training.safetensors', tensors)] if tensors else [])]
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for path, content in files:
            save_file(content, path, metadata={'format': 'pt'})
        write_json(partial / 'config.json', export_config(model.config, eot))
        write_json(partial / 'generation_config.json', dict(bos_token_id=eot, eos_token_id=eot))
        if tokenizer_path and os.path.exists(tokenizer_path):
            shutil.copyfile(tokenizer_path, partial / 'tokenizer.json')
            write_json(partial / 'tokenizer_config.json',
                       dict(tokenizer_class='PreTrainedTokenizerFast', eos_token='<|endoftext|>',
                            bos_token='<|endoftext|>', model_max_length=model.config.block_size,
                            clean_up_tokenization_spaces=False))
        if training is not None:
            write_json(partial / 'training.json', training)
        for p in partial.iterdir():
            shutil.copymode(partial / 'config.json', p)     # safetensors lets nobody else read
            sync(p)
        for path, written in files:
            with safe_open(path, 'pt') as f:
                if not all(torch.equal(x, f.get_tensor(k)) for k, x in written.items()):
                    raise OSError(errno.EIO, 'it does not hold what was written into it', str(path))
        write_json(partial / MANIFEST, {p.name: file_sha256(p) for p in sorted(partial.iterdir())})
        sync(partial / MANIFEST)
        sync(partial)
        os.rename(partial, folder)
        sync(folder.parent)
    except BaseException as e:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(e, SafetensorError) and (code := re.search(r'os error (\d+)', str(e))):
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(folder))
        raise

def write_json(path, data):
    Path(path).write_text(json.dumps(data, indent=1), encoding='utf-8')

def remove_checkpoint(folder):
    """Removes a checkpoint, which is no longer seen as one from the first moment on."""
    partial = folder.with_name(f'.{folder.name}.partial')
    shutil.rmtree(partial, ignore_errors=True)
    os.rename(folder, partial)
    shutil.rmtree(partial, ignore_errors=True)

def check_manifest(folder):
    """Raises UserError unless every file of a checkpoint is there and as it was written."""
    folder = Path(folder)
    manifest = read_json(folder / MANIFEST)
    try:
        if (folder / MANIFEST).read_text(encoding='utf-8') != json.dumps(manifest, indent=1):
            raise UserError(f'{folder / MANIFEST} is damaged')
        for name in {*manifest, *(p.name for kind in ('*.safetensors', 'tokenizer.json') for p in folder.glob(kind))}:
            path = folder / Path(name).name
            if path.name != name or not path.is_file():
                raise UserError(f'{path} is missing: the checkpoint is not whole')
            if file_sha256(path) != manifest.get(name):
                raise UserError(f'{path} is damaged (its sha256 is not that of {MANIFEST})')
    except OSError as e:
        raise UserError(f'can not read {e.filename or folder}: {e.strerror}')

def checkpoints(run):
    """The checkpoints of a run's folder, oldest first."""
    return sorted((p for p in Path(run).glob('step_*') if re.fullmatch(r'step_\d+', p.name)), key=lambda p: int(p.name[5:]))

def whole_checkpoints(run, say=lambda text: None):
    """Yields the checkpoints of a run that are whole, newest first, and says of the others what is wrong with them."""
    for folder in reversed(checkpoints(run)):
        try:
            check_manifest(folder)
            yield folder
        except UserError as e:
            say(f'{e}; it is not used')

def newest_whole(run, say=lambda text: None):
    """The newest checkpoint of a run that is whole. Raises UserError if none is."""
    if (folder := next(whole_checkpoints(run, say), None)) is None:
        raise UserError(f'no checkpoint in {run} is whole; start again with another --out_dir')
    return folder

def read_tensors(paths, read):
    """{name: what read(file, name) gives} for all tensors of safetensors files. Raises UserError."""
    out = {}
    for path in paths:
        try:
            with safe_open(path, 'pt') as f:
                out.update({k: read(f, k) for k in f.keys()})
        except (OSError, SafetensorError) as e:
            raise UserError(f'can not read {path}: {e}; it is cut short or no safetensors file; use another one')
    return out

def load_tensors(paths, expected, renamed=dict):
    """
    The tensors of safetensors files, renamed. Raises UserError, before memory is taken for any of them, for a name or a
    shape that is not as in `expected` (a dict of tensors), and for numbers that are no floats.
    """
    found = renamed(read_tensors(paths, lambda f, k: (f.get_slice(k).get_shape(), f.get_slice(k).get_dtype())))
    for name in {**expected, **found}:
        if name not in found or name not in expected:
            raise UserError(f'{paths[0]} {"lacks" if name in expected else "holds an unknown"} {name}: '
                            f'config.json and the weights are of different models; use the files of one')
        (shape, kind), wanted = found[name], list(expected[name].shape)
        if shape != wanted or kind not in ('F64', 'F32', 'F16', 'BF16'):
            raise UserError(f'{paths[0]}: {name} has shape {shape} of {kind}, not {wanted} of floats: '
                            f'config.json and the weights are of different models; use the files of one')
    return renamed(read_tensors(paths, lambda f, k: f.get_tensor(k)))

def read_state(folder):
    """training.json of a checkpoint, what train.py resumes from. Raises UserError if it is not as train.py writes it."""
    state = dict(dict(knobs={}), **read_json(folder / 'training.json'))
    state.setdefault('optimizer', 'muon' if state.get('muon') else 'adamw')
    numbers = dict(step=int, windows=int, updates=int, seconds=float, began=float, loss_scale=float)
    if not (all(type(state.get(k)) is kind for k, kind in dict(numbers, val=list, optimizer=str, auto=dict, knobs=dict).items())
            and all(0 <= state[k] < 1 << 53 for k in numbers)
            and all(type(e) is list and [*map(type, e)] == [int, float] for e in state['val'])
            and (not (auto := state['auto']) or auto.get('dtype') in DTYPES and type(auto.get('compile')) is bool
                 and type(n := auto.get('micro_batch_size')) is int and n > 0)):
        raise UserError(f'{folder}/training.json is not as train.py writes it; use another checkpoint')
    return state

def restore(folder, optimizer, state):
    """Fills the optimizer from a checkpoint."""
    views = {f'{k}.{name}': x for k in 'mv' for name, x in optimizer.views(getattr(optimizer, k)).items()}
    for name, x in load_tensors([folder / 'training.safetensors'], views).items():
        views[name].copy_(x)
    optimizer.t.fill_(state['updates'])
    if optimizer.scaled and state['loss_scale'] != 1:       # it was float16 before, too
        optimizer.loss_scale.fill_(state['loss_scale'])

def load_model(folder, **overrides):
    """
    The GPT in a checkpoint of ours, or in any folder of a Hugging Face Llama, Qwen3 or GPT-2. A checkpoint with a
    manifest is checked against it first. overrides: fields of GPTConfig that are no part of a checkpoint (dropout,
    attention). Raises UserError.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f'there is no checkpoint {folder}; `ls out` shows the runs, `ls out/<run>` their checkpoints')
    if (folder / MANIFEST).exists():
        try:
            check_manifest(folder)
        except UserError as e:
            raise UserError(f'{e}; use {next(whole_checkpoints(folder.parent), "another checkpoint")}')
    config = import_config(read_json(folder / 'config.json'), folder / 'config.json')
    files = sorted(folder.glob('model*.safetensors'))
    if not files:
        raise UserError(f'{folder} holds no model.safetensors; convert the weights to safetensors first')
    config = replace(config, **overrides)
    if config.n_layer > len(read_tensors(files, lambda f, k: 0)):       # each layer has several
        raise UserError(f'{files[0]} holds too few tensors for n_layer = {config.n_layer} of config.json; use the files of one model')
    with torch.device('meta'):      # shapes alone: nothing is allocated for what a file claims
        expected = export_tensors(GPT(config))
    tensors = load_tensors(files, expected, lambda found: named_as_here(config, found))
    model = GPT(config)
    import_tensors(model, tensors)
    return model
