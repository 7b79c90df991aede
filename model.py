"""
Defines the Transformer: layers, losses, attention, KV cache, and checkpoints that Hugging Face's libraries can load.

    model = GPT(GPTConfig(vocab_size=1024, n_layer=3, n_head=4, n_embd=256, block_size=128))
    logits = model(idx)             # (B, T, vocab_size); idx is (B, T) int64
    loss = model(idx, targets)      # a scalar, in nats per token

The default is Llama-style: pre-norm RMSNorm (arXiv:1910.07467), rotary positions (arXiv:2104.09864), SwiGLU
(arXiv:2002.05202), no biases, and norms of queries and keys as in Qwen3. GPT-2 is `GPTConfig(**GPT2)`; for ablations,
change the fields from qk_norm on. Modules are named as in Hugging Face's Llama, so a checkpoint is the state_dict
without a tied head (a GPT-2's gets its own names and layout).

Mixed precision is explicit, without autocast. In training, weights are float32 (sample.py may cast them), activations
and matmuls use `model.compute_dtype`, and a Linear casts its own weight. Norms, softmax and the loss are float32.
"""
import ctypes
import math
import os
import re
import shutil
import sys
import sysconfig
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from configurator import (UserError, check_value, count, fields_of, file_sha256, new_folder, partial_path, read_json,
                          remove, write, write_json)

@dataclass
class GPTConfig:
    block_size: int = 128           # (>= 1, < 1e9) longest context, in tokens
    vocab_size: int = 4096          # (>= 1, < 1e9) rows of the embedding, at least the tokenizer's ids
    n_layer: int = 3                # (>= 1, < 1e5)
    n_head: int = 4                 # (>= 1, < 1e6)
    n_kv_head: int = 0              # (>= 0, < 1e6) number of key and value heads, for GQA, arXiv:2305.13245 (0: n_head)
    n_embd: int = 128               # (>= 1, < 1e6)
    head_dim: int = 0               # (>= 0, < 1e6) size of each query, key and value (0: n_embd / n_head)
    d_ff: int = 0                   # (>= 0, < 1e8) MLP width (0: 4 n_embd; swiglu: 8/3 n_embd, up to a multiple of 64)
    rope_theta: float = 10000.0     # (>= 1, < 1e12)
    norm_eps: float = 1e-5          # (> 0, < 1)
    dropout: float = 0.0            # (>= 0, < 1)
    bias: bool = False
    tie_weights: bool = False       # lm_head shares the embedding's weights
    qk_norm: bool = True            # RMSNorm of queries and keys, per head (as in Qwen3)
    norm: str = 'rms'               # (rms, layer or none)
    norm_position: str = 'pre'      # (pre or post)
    position: str = 'rope'          # (rope, learned or none) learned: with GPT-2's initial weights everywhere
    mlp: str = 'swiglu'             # (swiglu, silu or gelu)
    value_embeds: bool = False      # every other layer adds an embedding of each token to its values
    attention: str = 'flash'        # (flash or naive) flash: torch's fused kernels

    def __post_init__(self):
        for name in FIELDS:
            value = getattr(self, name)
            setattr(self, name, check_value(value, name, FIELDS, f'{name} = {value!r:.60}'))
        # A 0 is replaced here, so replace(config, n_embd=512) keeps the old head_dim and d_ff.
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        gated_width = math.ceil(8 * self.n_embd / 3 / 64) * 64
        self.d_ff = self.d_ff or (gated_width if self.mlp == 'swiglu' else 4 * self.n_embd)
        if self.n_embd % self.n_head or self.n_head % self.n_kv_head:
            raise UserError(f'n_head = {self.n_head} does not divide n_embd = {self.n_embd}, or n_kv_head = '
                            f'{self.n_kv_head} does not divide n_head; change one of them')
        if self.position == 'rope' and self.head_dim % 2:
            raise UserError(f'rope rotates pairs, but head_dim (or n_embd / n_head) = {self.head_dim}; make it even')

FIELDS = fields_of(GPTConfig)

# Not saved, because a trained model computes the same without them; each start takes them from the options. If you
# change what a model computes, add a field: otherwise `transformers` would take it for a Llama or Qwen3.
UNSAVED_FIELDS = 'dropout', 'attention'

# The fields of other models, written out so that the defaults above may change. A new field whose default means
# "without it" need not be listed. GPT(GPTConfig(**GPT2)) has 124,439,808 parameters.
LLAMA = dict(n_kv_head=0, head_dim=0, rope_theta=10000.0, norm_eps=1e-6, bias=False, tie_weights=False, qk_norm=False,
             norm='rms', norm_position='pre', position='rope', mlp='swiglu')
GPT2 = dict(LLAMA, block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768, d_ff=0, norm_eps=1e-5,
            bias=True, tie_weights=True, norm='layer', position='learned', mlp='gelu')

# -----------------------------------------------------------------------------
# Functions, written out. The layers use torch's faster softmax, silu, gelu and cross_entropy; tests compare those here.

def upcast(x):
    """Returns x in float32, or unchanged if it is float64. Norms, softmax and the loss are computed in that dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

def softmax(x, dim):
    """Returns exp(x) / sum(exp(x)) along dim. The largest element is subtracted first, so that nothing overflows."""
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)

def silu(x):
    """Returns x * sigmoid(x)."""
    return x * torch.sigmoid(x)

def gelu(x):
    """Returns GPT-2's tanh approximation of x * Phi(x) (arXiv:1606.08415)."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)
    return 0.5 * x * (1 + torch.tanh(inner))

def cross_entropy(logits, targets):
    """Returns the mean of -log softmax(logits)[target] in nats. logits (..., vocab), targets (...) -> a scalar"""
    logits = logits - logits.amax(-1, keepdim=True)
    target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    log_sum = logits.exp().sum(-1).log()
    return (log_sum - target_logits).mean()

def causal_mask(positions, S):
    """Returns which of S keys a query may see: those up to its position. positions (..., T) -> bool (..., 1, T, S)"""
    keys = torch.arange(S, device=positions.device)
    return keys <= positions[..., None, :, None]

def scaled_dot_product_attention(q, k, v, mask=None, dropout=0.0):
    """
    Returns softmax(q k^T / sqrt(hs)) v. q (..., nh, T, hs), k and v (..., nkv, S, hs) -> (..., nh, T, hs)

    Each key head serves nh / nkv query heads. mask (..., nh, T, S): True where a query may look, or numbers to add to
    the scores. None: a query sees the keys up to its own. If you change this function, let Attention.forward always
    call it, because the faster ones below compute the unchanged one.
    """
    *heads, T, hs = q.shape
    S = k.size(-2)
    if mask is None:
        mask = causal_mask(torch.arange(T, device=q.device), S)
    rows = q.reshape(*k.shape[:-2], -1, hs)         # Query heads that share keys are stacked in one matrix
    att = (rows @ k.mT / math.sqrt(hs)).view(*heads, T, S)
    att = torch.where(mask, att, float('-inf')) if mask.dtype == torch.bool else att + mask
    # Use torch's softmax: with the one above, autograd would also differentiate the maximum, needlessly.
    att = F.dropout(F.softmax(upcast(att), -1).to(v.dtype), dropout)
    return (att.view(*rows.shape[:-1], S) @ v).view(*heads, T, -1)

def fused_attention(q, k, v, mask=None, dropout=0.0):
    """Computes the same with torch's fused kernels, which store no (T, S) matrix and are fastest without a mask."""
    group = q.size(-3) // k.size(-3)
    if group > 1:               # With enable_gqa, torch would not use its fastest kernels everywhere
        k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None)

def cpu_attention(q, k, v, mask=None, dropout=0.0):
    """Computes the same in the fastest way for a CPU in 16 bits."""
    if torch.compiler.is_compiling() and q.dtype == torch.bfloat16 and q.size(-2) <= 512:
        # Compiled, a step of 6 layers of width 256 is 8% faster without torch's kernels.
        return scaled_dot_product_attention(q, k, v, mask, dropout)
    # torch's kernels with their backward pass take up to 2 times as long in bfloat16, and 6 times in float16.
    return fused_attention(upcast(q), upcast(k), upcast(v), mask, dropout).to(q.dtype)

def rope_angles(positions, hs, theta):
    """Returns cos and sin of position * theta^(-2i/hs) for pair i of a head. positions (T,) -> (T, hs/2) each"""
    freqs = theta ** -(torch.arange(0, hs, 2, device=positions.device).float() / hs)
    angles = positions.float()[:, None] * freqs
    return angles.cos(), angles.sin()

def apply_rope(x, cos, sin):
    """Rotates each pair (x[i], x[i + hs/2]) by its angle, as Llama does. x (..., hs), cos and sin (..., hs/2) -> x"""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

# -----------------------------------------------------------------------------
# Layers. Their matrices are zero until GPT.init_weights fills them.

class Linear(nn.Module):
    def __init__(self, d_in, d_out, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(d_out, d_in))
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None

    def forward(self, x):
        b = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), b)          # x @ weight.T + b in one call

class Embedding(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n, d))

    def forward(self, idx):
        return F.embedding(idx, self.weight)       # weight[idx], with a faster backward

class RMSNorm(nn.Module):
    """Computes x / sqrt(mean(x^2) + eps) * weight."""
    def __init__(self, d, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        # F.rms_norm is no faster on a CPU, and gave wrong gradients on an AMD GPU (pytorch issue 190828).
        f = upcast(x)
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps)
        return (f * self.weight).to(x.dtype)

class LayerNorm(RMSNorm):
    """Computes (x - mean) / sqrt(variance + eps) * weight + bias (arXiv:1607.06450)."""
    def __init__(self, d, eps, bias):
        super().__init__(d, eps)
        self.bias = nn.Parameter(torch.zeros(d)) if bias else None

    def forward(self, x):
        b = None if self.bias is None else upcast(self.bias)
        return F.layer_norm(upcast(x), self.weight.shape, upcast(self.weight), b, self.eps).to(x.dtype)

def make_norm(config):
    if config.norm == 'rms':
        return RMSNorm(config.n_embd, config.norm_eps)
    if config.norm == 'layer':
        return LayerNorm(config.n_embd, config.norm_eps, config.bias)
    return nn.Identity()

class ValueEmbedding(nn.Module):
    """
    Computes what a layer adds to its values: an embedding of each token (arXiv:2410.17897), times a gate per head that
    reads up to 12 channels of x (as in nanochat). x (B, T, C), idx (B, T) -> (B, T, nkv, hs)
    """
    def __init__(self, config):
        super().__init__()
        self.channels = min(config.n_embd, 12)
        self.embed_values = Embedding(config.vocab_size, config.n_kv_head * config.head_dim)
        self.gate_proj = Linear(self.channels, config.n_kv_head)

    def forward(self, x, idx):
        gate = 3 * torch.sigmoid(self.gate_proj(x[..., :self.channels]))            # (B, T, nkv)
        values = self.embed_values(idx).to(x.dtype).view(*gate.shape, -1)
        return gate[..., None] * values

@dataclass
class PassInfo:
    """Holds what all layers of a forward pass see besides x (B, T, n_embd)."""
    idx: torch.Tensor           # token ids (B, T)
    positions: torch.Tensor     # their positions (B or 1, T), which are also their slots in the cache
    cos_sin: torch.Tensor = None        # rope tables (2, B or 1, T, 1, hs/2), the same for all heads, or None
    cache: object = None                # a KVCache that gets the keys and values, or None
    decode: bool = False                # False: texts begin here. True: the cache has the keys of their earlier tokens
    extra_losses: dict = None           # by name, at first 0. A layer adds its own, already weighted, as in
                                        # info.extra_losses['balance'] += loss; training minimizes and prints each

class Attention(nn.Module):
    def __init__(self, config, layer=0):
        super().__init__()
        c = self.config = config
        self.layer = layer
        width, kv_width = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
        self.q_proj = Linear(c.n_embd, width, c.bias)
        self.k_proj = Linear(c.n_embd, kv_width, c.bias)
        self.v_proj = Linear(c.n_embd, kv_width, c.bias)
        self.o_proj = Linear(width, c.n_embd, c.bias)
        norm = RMSNorm if c.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(c.head_dim, c.norm_eps), norm(c.head_dim, c.norm_eps)
        # From the last layer back, every second one has a value embedding.
        self.value_embed = ValueEmbedding(config) if c.value_embeds and (c.n_layer - layer) % 2 else None

    def mask(self, info, S):
        """
        Returns which of S keys the queries of this layer see, bool (B or 1, nh or 1, T, S), or numbers to add to the
        scores. None means causal_mask(info.positions, S) and makes kernels fastest, but only if texts begin here (not
        info.decode). A window of n tokens would be causal_mask(positions, S) & ~causal_mask(positions - n, S).
        """
        return causal_mask(info.positions, S) if info.decode else None

    def forward(self, x, info):
        """Computes attention within each row. x (B, T, C) -> (B, T, C)"""
        c = self.config
        B, T, _ = x.shape       # batch, time, n_embd
        # queries, keys, values
        q = self.q_norm(self.q_proj(x).view(B, T, c.n_head, c.head_dim))
        k = self.k_norm(self.k_proj(x).view(B, T, c.n_kv_head, c.head_dim))
        v = self.v_proj(x).view(B, T, c.n_kv_head, c.head_dim)
        if self.value_embed is not None:
            v = v + self.value_embed(x, info.idx)
        # positions and cache
        if info.cos_sin is not None:
            q, k = apply_rope(q, *info.cos_sin), apply_rope(k, *info.cos_sin)
        q = q.transpose(1, 2)       # (B, nh, T, hs)
        k = k.transpose(1, 2)       # (B, nkv, T, hs)
        v = v.transpose(1, 2)
        if info.cache is not None:
            k, v = info.cache.update(self.layer, info, k, v)      # (B, nkv, S, hs)

        # attention and output
        attend = cpu_attention if q.device.type == 'cpu' else fused_attention
        if c.attention == 'naive' or info.decode:       # Fused kernels are slower for single queries
            attend = scaled_dot_product_attention
        y = attend(q, k, v, self.mask(info, k.size(2)), c.dropout if self.training else 0.0)
        y = y.transpose(1, 2).flatten(2)            # (B, T, nh * hs)
        return F.dropout(self.o_proj(y), c.dropout, self.training)

class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        c = self.config = config
        if c.mlp == 'swiglu':
            self.gate_proj = Linear(c.n_embd, c.d_ff, c.bias)
        self.up_proj = Linear(c.n_embd, c.d_ff, c.bias)
        self.down_proj = Linear(c.d_ff, c.n_embd, c.bias)

    def forward(self, x, info):
        c = self.config
        if c.mlp == 'swiglu':
            x = F.silu(self.gate_proj(x)) * self.up_proj(x)
        elif c.mlp == 'silu':
            x = F.silu(self.up_proj(x))
        else:
            x = F.gelu(self.up_proj(x), approximate='tanh')
        return F.dropout(self.down_proj(x), c.dropout, self.training)

class Block(nn.Module):
    def __init__(self, config, layer=0):
        super().__init__()
        self.input_layernorm, self.self_attn = make_norm(config), Attention(config, layer)
        self.post_attention_layernorm, self.mlp = make_norm(config), MLP(config)
        self.pre = config.norm_position == 'pre'

    def forward(self, x, info):
        if self.pre:
            x = x + self.self_attn(self.input_layernorm(x), info)
            return x + self.mlp(self.post_attention_layernorm(x), info)
        # Post-norm: the same two norms, each after its sum.
        x = self.input_layernorm(x + self.self_attn(x, info))
        return self.post_attention_layernorm(x + self.mlp(x, info))

class KVCache:
    """
    Stores the keys and values of each layer for a batch of texts of different `lengths`; a mask hides what follows
    them. Change it only in place (k[layer][:] = k[layer][order]), because CUDA graphs keep addresses.
    """
    def __init__(self, model, batch, size):
        config = model.config
        shape = (batch, config.n_kv_head, size, config.head_dim)
        with model.lm_head.weight.device:           # The tensors are made there.
            # Each layer has its own tensor, because compiled code would copy all of a shared one at every step.
            self.k = [torch.zeros(shape, dtype=model.compute_dtype) for _ in range(config.n_layer)]
            self.v = [torch.zeros_like(k) for k in self.k]
            self.lengths = torch.zeros(batch, dtype=torch.int64)
            self.rows = torch.arange(batch)[:, None]

    def update(self, layer, info, k, v):
        """Stores new keys and values (B, nkv, T, hs). Returns what attention reads: these, or in decode, all."""
        # Indexing with rows (B, 1) and positions (B or 1, T) at once selects (B, T, nkv, hs).
        self.k[layer][self.rows, :, info.positions] = k.transpose(1, 2)
        self.v[layer][self.rows, :, info.positions] = v.transpose(1, 2)
        return (self.k[layer], self.v[layer]) if info.decode else (k, v)

class GPT(nn.Module):
    def __init__(self, config, new=True):
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        self.losses = {}                # of the last forward pass, by name: those that training prints
        self.model = nn.ModuleDict(dict(
            embed_tokens=Embedding(config.vocab_size, config.n_embd),
            layers=nn.ModuleList(Block(config, i) for i in range(config.n_layer)),
            norm=make_norm(config) if config.norm_position == 'pre' else nn.Identity()))
        if config.position == 'learned':
            self.model.embed_positions = Embedding(config.block_size, config.n_embd)
        self.lm_head = Linear(config.n_embd, config.vocab_size)
        if config.tie_weights:
            self.lm_head.weight = self.model.embed_tokens.weight
        if config.position == 'rope':
            # Computed on the CPU, because torch would import its compiler for this on the device 'meta' (1.4 s).
            positions = torch.arange(config.block_size, device='cpu')
            cos_sin = torch.stack(rope_angles(positions, config.head_dim, config.rope_theta))       # (2, T, hs/2)
            self.register_buffer('cos_sin', cos_sin.to(self.lm_head.weight.device), persistent=False)
        if new:
            self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """
        Fills each matrix from a normal distribution, truncated at 3 standard deviations. The standard deviation is in
        `table`, by layer name, or else sqrt(2 / (d_in + d_out)); with learned positions, they are GPT-2's.
        """
        c = self.config
        # Blocks add nothing at first, so with a tied head, the input token's logit is about n_embd * std. If that is at
        # most log(1 + vocab_size / 12), the loss still starts within log(1 + 1/12) of a uniform guess.
        tied = min(0.02, math.log(1 + c.vocab_size / 12) / c.n_embd)
        table = dict(embed_tokens=tied if c.tie_weights else 0.5, embed_values=0.02, o_proj=0.0, down_proj=0.0)
        if c.position == 'learned':
            table = dict.fromkeys(('o_proj', 'down_proj'), 0.02 / math.sqrt(2 * c.n_layer))
        for name, w in self.named_parameters():
            if w.dim() > 1:
                others = 0.02 if c.position == 'learned' else math.sqrt(2 / sum(w.shape[-2:]))
                std = table.get(name.split('.')[-2], others)
                nn.init.trunc_normal_(w, 0.0, 1.0, -3.0, 3.0).mul_(std)

    def run_layers(self, idx, cache=None, decode=False, extra_losses=None):
        """Runs all but the head. cache, decode, extra_losses: see PassInfo. idx (B, T) -> x (B, T, n_embd)"""
        c, T = self.config, idx.size(1)
        assert T <= c.block_size, f'{T} tokens exceed the context of {c.block_size}'
        positions = torch.arange(T, device=idx.device)[None]
        if decode:
            positions = cache.lengths[:, None] + positions
        x = self.model.embed_tokens(idx)
        if c.position == 'learned':
            x = x + self.model.embed_positions(positions)
        x = F.dropout(x, c.dropout, self.training).to(self.compute_dtype)
        cos_sin = None
        if c.position == 'rope':
            cos_sin = self.cos_sin[:, positions].unsqueeze(-2).to(x.dtype)
        if extra_losses is None:
            extra_losses = defaultdict(float)
        info = PassInfo(idx, positions, cos_sin, cache, decode, extra_losses)
        for layer in self.model.layers:
            x = layer(x, info)
        return self.model.norm(x)

    def logits(self, x):
        """Returns the logits in float32. x (..., n_embd) -> (..., vocab_size)"""
        return upcast(self.lm_head(x))

    def forward(self, idx, targets=None):
        """
        Returns the logits (B, T, vocab_size) of idx (B, T), or, with targets (B, T), the mean loss in nats. Targets of
        -100 do not count. In training, those in `extra` are added: a step minimizes the sum, and prints each.
        """
        extra = defaultdict(float)      # layers add to it (see PassInfo); a second loss of the logits goes here, too
        logits = self.logits(self.run_layers(idx, extra_losses=extra))
        if targets is None:
            return logits
        # cross_entropy(), but without targets of -100
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.losses = {name: x.detach() for name, x in dict(loss=loss, **extra).items()}
        return sum(extra.values(), loss) if self.training else loss

    def prefill(self, texts, cache):
        """Fills a cache with texts, lists of at least one id. Returns the logits (B, vocab_size) that follow them."""
        idx = nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        cache.lengths[:] = torch.tensor([*map(len, texts)])
        x = self.run_layers(idx.to(cache.lengths.device), cache)
        return self.logits(x[cache.rows[:, 0], cache.lengths - 1])

    def decode(self, idx, cache):
        """Adds T tokens (usually one) to each text: idx (B, T). Returns the logits (B, vocab_size) after the last."""
        x = self.run_layers(idx, cache, decode=True)
        cache.lengths += idx.size(1)
        return self.logits(x[:, -1])

    def num_params(self):
        """Returns the number of parameters. Tied weights count once."""
        return sum(p.numel() for p in self.parameters())

    def matmul_weights(self):
        """Returns the number of weights that every token is multiplied with: those of all Linears."""
        assert all(w.dim() < 3 for w in self.parameters()), 'the FLOPs of weights with three dimensions are unknown'
        return sum(m.weight.numel() for m in self.modules() if isinstance(m, Linear))

    def flops_per_token(self, T=None):
        """Returns the training FLOPs per token of T (default: block_size), all attended to (arXiv:2204.02311)."""
        c = self.config
        T = T or c.block_size
        return 6 * self.matmul_weights() + 12 * c.n_layer * c.n_head * c.head_dim * T

# -----------------------------------------------------------------------------
# The machine. Here, `device` is a name such as 'cuda:1', and `dtype` one such as 'bfloat16'. The options with these
# names may also be 'auto'.

# Dense bf16 FLOP/s (fp16 for V100 and T4), without sparsity, from data sheets and papers of NVIDIA and AMD. A key lists
# cards with the same peak; the first that fits counts.
PEAK_FLOPS = {
    'H200 NVL|H100 NVL': 835e12, 'H100 PCIe': 756e12, 'H100|H200|H800|GH200': 989e12, 'MI300X|MI325X': 1307e12,
    'GB200': 2500e12, 'B200': 2250e12, 'B100': 1750e12, 'A100|A800': 312e12, 'A30': 165e12, 'A40': 149.7e12,
    'A10G': 70e12, 'A6000': 154.8e12, 'L40S': 362e12, 'L4': 121e12, 'V100': 125e12, 'T4': 65e12,
    'RTX 6000 Ada': 364.2e12, 'RTX 5090': 209.5e12, 'RTX 4090': 165.2e12, 'RTX 3090': 71e12,
}

def peak_flops(device):
    """Returns the card's dense bf16 FLOP/s, or 0 if unknown."""
    for cards, flops in PEAK_FLOPS.items():
        if re.search(rf'\b({cards})\b(?!.* MIG | (Laptop|Ti|D|SUPER)\b)', device_name(device)):
            return flops
    return 0

def device_name(device):
    """Returns a readable name: 'NVIDIA H100 80GB HBM3', 'Apple GPU', '2 threads'."""
    if 'cuda' in device:
        return torch.cuda.get_device_name(device)
    return 'Apple GPU' if device == 'mps' else count(torch.get_num_threads(), 'thread')

def choose_device(device, local_rank=0):
    """Returns the name of the device: for 'auto', this process's GPU, an Apple GPU, or the CPU. Raises UserError."""
    known = [f'cuda:{i}' for i in range(torch.cuda.device_count())]
    known += ['mps', 'cpu'] if torch.backends.mps.is_available() else ['cpu']
    if device == 'auto':
        device = known[0].split(':')[0]
        if device == 'cpu' and not torch.version.cuda and shutil.which('nvidia-smi'):       # comes with the driver
            print('the NVIDIA GPU of this machine is not used, because this torch is a CPU build; pytorch.org has GPU '
                  'builds', file=sys.stderr)
    if device == 'cuda':
        device = f'cuda:{local_rank}'
    if device not in known:
        raise UserError(f'{device} is not available (found: {", ".join(known)}); use --device={known[0]}, or a GPU '
                        f'build of torch (see pytorch.org) and at most one process per GPU')
    return device

def choose_dtype(dtype, device, texts=0, compiled=False):
    """
    Returns the name of the dtype. 'auto' means 16 bits where they are fast. texts: how many texts a CPU generates at
    once; for these, float16 is best if matrices can be packed, which compiled code does not do. Raises UserError.
    """
    if dtype != 'auto':
        return dtype
    if 'cuda' in device:
        return 'bfloat16' if torch.cuda.is_bf16_supported(including_emulation=False) else 'float16'
    if texts and not compiled and can_pack(device):
        return 'float16'
    return 'bfloat16' if has_fast_bfloat16() else 'float32'

def has_fast_bfloat16(cpuinfo='/proc/cpuinfo'):
    """Returns whether a CPU is faster in bfloat16: with AMX, or AVX512_BF16 on AMD cores (Intel's are slower)."""
    with suppress(OSError):         # Only Linux has this file
        text = Path(cpuinfo).read_text()
        return 'amx_bf16' in text or ('avx512_bf16' in text and 'AuthenticAMD' in text)
    return False

def can_pack(device):
    """Returns whether FBGEMM, which packs float16 matrices, is available (on x86 with AVX2)."""
    return device == 'cpu' and 'fbgemm' in torch.backends.quantized.supported_engines

def choose_compile(compile, device, flops=0.0):
    """Returns whether to compile: for 'auto', if this saves time over this many FLOPs. Raises UserError."""
    # It takes half a minute. With these FLOPs, it saves 13 s (GPT-2) to 55 s (small models) on an H100, and 40 of 140 s
    # on two cores with fast bfloat16.
    pays_from = 3e13 if has_fast_bfloat16() else 1.2e13
    has_tools = shutil.which('cl' if os.name == 'nt' else 'g++') and device != 'mps'
    if 'cuda' in device:
        pays_from = 5e15
        has_tools = has_tools and find_spec('triton')
    possible = bool(has_tools) and Path(sysconfig.get_path('include'), 'Python.h').exists()
    if compile == 'auto':
        return possible and flops >= pays_from
    if compile and not possible:
        raise UserError('this machine cannot compile; use --compile=False, or install a C++ compiler, Python.h '
                        '(python3-dev), and for a GPU Triton')
    return compile

class Replayed:
    """
    Stands for a function of a tensor and other arguments. On a CUDA GPU, the second call with the same arguments (but
    for the tensor's numbers) records a CUDA graph, and later ones replay it: one launch instead of hundreds. The
    function must not wait for the GPU (as .item() does), and must keep its state in tensors that stay in place. A
    replay takes no new decisions in Python, and overwrites the results of the call before.
    """
    def __init__(self, function):
        self.function, self.key = function, None

    def __call__(self, x, *others):
        if not x.is_cuda:
            return self.function(x, *others)
        key = [x.shape, *others]
        if self.key != key:
            self.key, self.graph, self.x = key, None, x.clone()
            return self.function(self.x, *others)
        self.x.copy_(x)
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode='thread_local'):       # other threads may use the GPU
                self.results = self.function(self.x, *others)
        self.graph.replay()
        return self.results

def set_up(device):
    """Sets up this process: TF32 for float32 matmuls on a GPU, malloc and the compiler on a CPU."""
    if 'cuda' in device:
        torch.set_float32_matmul_precision('high')
        torch.cuda.set_device(device)
    elif sys.platform == 'linux':
        # Keep freed memory (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD), because fresh memory costs a tenth of a step.
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)
        libc.mallopt(-1, 2 ** 31 - 1)
        if can_pack(device):        # The first compile takes 8 s less if it does not test what an x86 CPU supports
            os.environ.setdefault('TORCHINDUCTOR_VEC_ISA_OK', '1')

# -----------------------------------------------------------------------------
# Hugging Face's files: config.json, and weights with Llama's names (also in Qwen3) or GPT-2's

# Keys of config.json for fields of GPTConfig
LLAMA_KEYS = dict(
    vocab_size='vocab_size', tie_word_embeddings='tie_weights', max_position_embeddings='block_size',
    num_hidden_layers='n_layer', num_attention_heads='n_head', num_key_value_heads='n_kv_head',
    hidden_size='n_embd', head_dim='head_dim', intermediate_size='d_ff', rope_theta='rope_theta',
    rms_norm_eps='norm_eps',
)
GPT2_KEYS = dict(
    vocab_size='vocab_size', tie_word_embeddings='tie_weights', n_ctx='block_size', n_positions='block_size',
    n_layer='n_layer', n_head='n_head', n_embd='n_embd', n_inner='d_ff', layer_norm_epsilon='norm_eps',
)
# Settings of config.json without a field of GPTConfig, and the only supported value of each
LLAMA_FIXED = dict(hidden_act='silu', rope_scaling=None, rope_type='default', sliding_window=None)
QWEN3_FIXED = dict(use_sliding_window=False, attention_bias=False, **LLAMA_FIXED)
GPT2_FIXED = dict(activation_function='gelu_new', scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)

@dataclass
class Family:
    """A kind of model that transformers knows."""
    architecture: str       # its class in transformers
    keys: dict              # the field of GPTConfig for each key of config.json
    values: dict            # values of the fields that a file does not give
    fixed: dict             # settings without a field

# by model_type
FAMILIES = dict(
    llama=Family('LlamaForCausalLM', dict(LLAMA_KEYS, attention_bias='bias', mlp_bias='bias'), LLAMA, LLAMA_FIXED),
    qwen3=Family('Qwen3ForCausalLM', LLAMA_KEYS, dict(LLAMA, qk_norm=True), QWEN3_FIXED),
    gpt2=Family('GPT2LMHeadModel', GPT2_KEYS, GPT2, GPT2_FIXED),
)

def family(config):
    """Returns the model_type whose config.json gives this config when it is read again, or 'gpt_ablation'."""
    for kind, known in FAMILIES.items():
        ours = {name: getattr(config, name) for name in (*known.keys.values(), *UNSAVED_FIELDS)}
        with suppress(UserError):       # for example, rope with an odd head_dim
            if GPTConfig(**(known.values | ours)) == config:
                return kind
    return 'gpt_ablation'

def settings(kind, config):
    """Returns what config.json says of a config in a family."""
    known = FAMILIES[kind]
    return known.fixed | {theirs: getattr(config, ours) for theirs, ours in known.keys.items()}

def export_config(config, eot):
    """Returns the contents of config.json, which transformers can read unless the model is a gpt_ablation."""
    kind = family(config)
    d = dict(model_type=kind, torch_dtype='float32', bos_token_id=eot, eos_token_id=eot)
    if kind == 'gpt_ablation':
        return dict(d, gpt_config={name: x for name, x in vars(config).items() if name not in UNSAVED_FIELDS})
    return dict(d, **settings(kind, config), architectures=[FAMILIES[kind].architecture],
                max_window_layers=config.n_layer)

def import_config(folder):
    """Returns the GPTConfig that config.json describes. Raises UserError if it is not supported."""
    d = read_json(folder / 'config.json')
    kind = d.get('model_type')
    if kind not in ('gpt_ablation', *FAMILIES):
        raise UserError(f'the architecture {kind!r} is not supported; use a model of one of {", ".join(FAMILIES)}')
    try:
        if kind == 'gpt_ablation':
            return GPTConfig(**d['gpt_config'])
        known = FAMILIES[kind]
        d.update(d.get('rope_parameters') or {})        # transformers 5 has rope_theta and rope_type there
        fields = dict(known.values)
        for theirs, ours in known.keys.items():
            if d.get(theirs) is not None or ours not in fields:
                fields[ours] = d[theirs]
        config = GPTConfig(**fields)
    except (UserError, LookupError, TypeError, ValueError) as e:
        raise UserError(f'{folder}/config.json describes no model ({type(e).__name__}: '
                        f'{str(e).partition(";")[0]}); use another one')
    for name, value in settings(kind, config).items():
        if d.get(name) not in (value, None):
            raise UserError(f'{name} = {d[name]!r:.60} is not supported, only {value!r:.60}; use another model')
    return config

GPT2_NAMES = {
    'model.embed_tokens': 'wte',
    'model.embed_positions': 'wpe',
    'model.layers.': 'h.',
    'model.norm': 'ln_f',
    'input_layernorm': 'ln_1',
    'self_attn.[qkv]_proj': 'attn.c_attn',      # joined, in this order
    'self_attn.o_proj': 'attn.c_proj',
    'post_attention_layernorm': 'ln_2',
    'mlp.up_proj': 'mlp.c_fc',
    'mlp.down_proj': 'mlp.c_proj',
}

def gpt2_name(name):
    """gpt2_name('model.layers.0.self_attn.q_proj.bias') -> 'h.0.attn.c_attn.bias'"""
    for ours, theirs in GPT2_NAMES.items():
        name = re.sub(ours, theirs, name)
    return name

def weights_on_disk(model):
    """
    Returns the weights with Hugging Face's names and shapes, without a tied head. GPT-2 joins q, k and v, and its
    blocks store matrices as (in, out).
    """
    tensors, tied = model.state_dict(), model.config.tie_weights
    if tied:
        del tensors['lm_head.weight']
    if family(model.config) != 'gpt2':
        return tensors
    out = {}
    for ours, x in tensors.items():
        name = gpt2_name(ours)
        if not tied and ours != 'lm_head.weight':
            name = f'transformer.{name}'        # transformers wants this with an untied head; mlx-lm never wants it
        if '.c_' in name:       # t() leaves a bias as it is
            x = x.t().contiguous()
        out[name] = torch.cat([out[name], x], -1) if name in out else x
    return out

def from_gpt2(tensors, names):
    """Inverse of weights_on_disk for a GPT-2 with these names of ours. Tensors with other names stay as they are."""
    joined = defaultdict(list)          # our names, by the name of the tensor that has them all
    for name in names:
        joined[gpt2_name(name)].append(name)
    out = {}
    for name, x in tensors.items():
        theirs = name.removeprefix('transformer.')
        ours = joined.get(theirs, [name])
        x = x.t() if '.c_' in name else x
        out.update(zip(ours, x.chunk(len(ours))))
    return out

# A model's files besides its weights: tokenizer, end-of-text ids, chat template
KEPT = ('tokenizer.json', 'tokenizer_config.json', 'tokenizer.model', 'vocab.json', 'merges.txt', 'added_tokens.json',
        'special_tokens_map.json', 'generation_config.json', 'chat_template.jinja')

def find_folder(name):
    """Returns the folder of a model: this one, a run's newest intact checkpoint, or a download. Raises UserError."""
    folder = Path(name)
    if not folder.is_dir():
        folder = download(name)
    elif not (folder / 'config.json').exists():         # a run
        folder = newest_intact(folder, to_resume=False)
    import_config(folder)           # Raises before any text is prepared for it
    if not any(folder.glob('model*.safetensors')):
        raise UserError(f'{name} has no model.safetensors; make one with save_pretrained of transformers')
    return folder

def download(name):
    """Downloads a model from the Hugging Face hub, or finds it in the cache. Returns its folder. Raises UserError."""
    from huggingface_hub import snapshot_download
    repo = name if '/' in name else f'openai-community/{name}'
    # Get config.json first, so that an unsupported model is refused before its weights are downloaded.
    for patterns in 'config.json', [*KEPT, 'model*.safetensors*']:
        try:
            folder = Path(snapshot_download(repo, allow_patterns=patterns))
        except Exception as e:          # Errors have many types: no such model, network or permission
            raise UserError(f'{name} is not a folder, and the hub does not provide it ({type(e).__name__}); use a '
                            f'folder (your runs are in out/), gpt2 or owner/model, and check the network')
        import_config(folder)
    return folder

# Tables of rope and masks, which older files have among their weights
NO_WEIGHTS = '.inv_freq', '.attn.bias', '.attn.masked_bias'

def load_model(folder, **overrides):
    """Loads a GPT from a checkpoint or a Hugging Face folder. overrides: fields to replace. Raises UserError."""
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        check_manifest(folder, to_resume=False)
    config = replace(import_config(folder), **overrides)
    files = ['model.safetensors']
    if not (folder / files[0]).exists():        # Files outside the index may be of an older model
        files = set(read_json(folder / 'model.safetensors.index.json')['weight_map'].values())
    try:
        model = GPT(config, new=False)
        tensors = {name: x for file in files for name, x in load_file(folder / file).items()
                   if not name.endswith(NO_WEIGHTS)}
        if family(config) == 'gpt2':
            tensors = from_gpt2(tensors, model.state_dict())
        if config.tie_weights:
            embedding = tensors['model.embed_tokens.weight']
            if not torch.equal(tensors.setdefault('lm_head.weight', embedding), embedding):
                raise UserError(f'{folder} has its own head, but its config.json says tie_word_embeddings = true; '
                                f'change that to false')
        model.load_state_dict(tensors)          # copies, in float32
        if not all(w.isfinite().all() for w in model.parameters()):
            raise UserError(f'{folder} has weights that are nan or inf; use another one')
    except (SafetensorError, FileNotFoundError, RuntimeError, LookupError, TypeError) as e:
        raise UserError(f'config.json and model*.safetensors in {folder} are damaged, or do not match '
                        f'({str(e)[:300]}); download them again, or use others')
    return model.eval()

# -----------------------------------------------------------------------------
# Checkpoints. Each is a folder, written under another name and renamed once it is complete.

MANIFEST = 'manifest.json'      # the sha256 of each file of a checkpoint

def keep_from(folder):
    """Returns the files that a model keeps when it is trained further, {name: bytes}, without links to elsewhere."""
    inside = folder.resolve(), (folder / '../../blobs').resolve()           # the second is that of the hub's cache
    files = [folder / name for name in KEPT]
    return {file.name: file.read_bytes() for file in files if file.is_file() and file.resolve().parent in inside}

def save_checkpoint(folder, model, tokenizer_path, eot, training, tensors, card, kept):
    """
    Writes a checkpoint folder that `transformers` can load, with a README.md (card), the files of keep_from, and what
    resuming needs: a dict, and a dict of tensors. It gets its name when all of it is on the disk. Raises OSError or
    SafetensorError.
    """
    with new_folder(folder) as unfinished:
        save_file(weights_on_disk(model), unfinished / 'model.safetensors', {'format': 'pt'})
        save_file(tensors, unfinished / 'training.tensors')         # vLLM and others read every *.safetensors
        write_json(unfinished / 'config.json', export_config(model.config, eot))
        write_json(unfinished / 'training.json', training)
        write(unfinished / 'README.md', card)
        for path in unfinished.glob('*tensors'):
            shutil.copymode(unfinished / 'config.json', path)       # safetensors lets only the owner read its files
        if tokenizer_path.exists():
            shutil.copyfile(tokenizer_path, unfinished / 'tokenizer.json')
            end = {token['id']: token['content'] for token in read_json(tokenizer_path)['added_tokens']}.get(eot)
            write_json(unfinished / 'tokenizer_config.json', dict(
                tokenizer_class='PreTrainedTokenizerFast', model_max_length=model.config.block_size,
                eos_token=end, bos_token=end, pad_token=end, unk_token=end,         # ctranslate2 needs the last
                model_input_names=['input_ids', 'attention_mask']))     # transformers 4 would add a third, which fails
        for name, content in kept.items():
            (unfinished / name).write_bytes(content)
        write_json(unfinished / MANIFEST, {path.name: file_sha256(path) for path in sorted(unfinished.iterdir())})

def remove_checkpoint(folder):
    """Removes a checkpoint, but renames it first, so that its remains do not look like one."""
    remove(folder.rename(partial_path(folder.with_name('removed'))))        # and what a kill has left there

def check_manifest(folder, to_resume):
    """Raises UserError if a file other than README.md is missing or changed. training.* is needed only to resume."""
    for name, sha256 in read_json(folder / MANIFEST).items():
        path = folder / name
        if name.startswith('training.') and not to_resume and not path.exists():
            continue
        if path.is_file() and file_sha256(path) == sha256:
            continue
        if name != 'README.md':
            raise UserError(f'{path} is damaged or missing (sha256 differs from {MANIFEST}); use another checkpoint')
        print(f'{path} was changed or removed (its sha256 differs from {MANIFEST})', file=sys.stderr)

def checkpoints(run):
    """Returns the checkpoints in the folder of a run, oldest first."""
    return sorted(path for path in Path(run).glob('step_' + 8 * '[0-9]') if path.is_dir())

def newest_intact(run, to_resume=True):
    """Returns the newest intact checkpoint of a run, and prints why newer ones are skipped. Raises UserError."""
    for folder in reversed(checkpoints(run)):
        try:
            check_manifest(folder, to_resume)
            return folder
        except UserError as e:
            print(f'skipped: {e}', file=sys.stderr)
    raise UserError(f'{run} has no intact checkpoint; wait for its first one, train it with --init_from=auto, or use '
                    f'another folder (runs are in out/, models in the snapshots/ of a hub cache)')
