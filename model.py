"""
The whole Transformer: layers, losses, attention, KV cache, and checkpoints that Hugging Face opens.

    model = GPT(GPTConfig(vocab_size=1024, n_layer=3, n_head=4, n_embd=256, block_size=128))
    logits = model(idx)             # (B, T, vocab_size); idx is (B, T) int64
    loss = model(idx, targets)      # a scalar, in nats per token

Llama-style by default: pre-norm RMSNorm (arXiv:1910.07467), rotary positions (arXiv:2104.09864), SwiGLU
(arXiv:2002.05202), no biases, and norms of queries and keys as in Qwen3. GPT-2 is `GPTConfig(**GPT2)`, and the
ablations are other values of the last fields. Modules have the names of Hugging Face's Llama, so a checkpoint is the
state_dict without padding and without a tied head.

Mixed precision is explicit, without autocast: in training, weights are float32 (sample.py may cast them); activations
and matmuls use `model.compute_dtype`, and a Linear casts its own weight. Norms, softmax and the loss are computed in
float32.

The evening's reading is the first half: functions, layers, KV cache, GPT.
"""
import ctypes
import json
import math
import os
import re
import shutil
import sys
import sysconfig
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from configurator import UserError, file_sha256, read_json, whole_folder, write

CHOICES = dict(
    norm=('rms', 'layer', 'none'),
    norm_position=('pre', 'post'),
    position=('rope', 'learned', 'none'),
    mlp=('swiglu', 'silu', 'gelu'),
    attention=('flash', 'naive'),
)

@dataclass
class GPTConfig:
    block_size: int = 128           # the longest context, in tokens
    vocab_size: int = 4096
    n_layer: int = 3
    n_head: int = 4
    n_kv_head: int = 0              # heads of keys and values (GQA, arXiv:2305.13245); 0: n_head
    n_embd: int = 128
    head_dim: int = 0               # size of a query, key or value; 0: n_embd / n_head
    d_ff: int = 0                   # width inside the MLP; 0: for swiglu 8/3 n_embd, in multiples of 64; else 4 n_embd
    rope_theta: float = 10000.0
    rope_factor: float = 1.0        # how many times slower slow rotations are (8 in Llama 3.1, 32 in 3.2)
    norm_eps: float = 1e-5
    dropout: float = 0.0
    bias: bool = False
    tie_weights: bool = False       # lm_head is the embedding
    qk_norm: bool = True            # RMSNorm of queries and keys, per head (as in Qwen3)
    norm: str = 'rms'               # rms, layer, none
    norm_position: str = 'pre'      # pre, post
    position: str = 'rope'          # rope, learned (with GPT-2's initialization), none
    mlp: str = 'swiglu'             # swiglu, silu, gelu
    value_embeds: bool = False      # every other layer looks up an embedding of each token for its values, too
    attention: str = 'flash'        # flash (torch's fused kernels), naive

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // max(self.n_head, 1)
        usual = 4 * self.n_embd
        if self.mlp == 'swiglu':
            usual = math.ceil(8 * self.n_embd / 3 / 64) * 64
        self.d_ff = self.d_ff or usual

        for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'head_dim', 'd_ff'):
            if getattr(self, name) < 1:
                raise UserError(f'{name} = {getattr(self, name)}: give 1 or more')
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(f'{name} = {getattr(self, name)!r}: give one of {", ".join(choices)}')
        if self.n_embd % self.n_head or self.n_head % self.n_kv_head:
            raise UserError(f'n_head = {self.n_head} must divide n_embd = {self.n_embd}, and n_kv_head = '
                            f'{self.n_kv_head} must divide n_head: change one of them')
        if self.position == 'rope' and self.head_dim % 2:
            raise UserError(f'rope rotates pairs: head_dim (or n_embd / n_head) = {self.head_dim} must be even')
        if not 0 <= self.dropout < 1:
            raise UserError(f'dropout = {self.dropout}: give 0 or more, and less than 1')

# fields that are not part of a saved model. Any other new field, if set, makes a model that transformers does not know
TRAINING_FIELDS = 'dropout', 'attention'

# other people's models, in full, so that the defaults above may change. GPTConfig(**GPT2) has 124,439,808 parameters
SHARED = dict(n_kv_head=0, head_dim=0, rope_theta=10000.0, rope_factor=1.0, qk_norm=False, norm_position='pre',
              value_embeds=False)
GPT2 = dict(SHARED, block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768, d_ff=0, norm_eps=1e-5,
            bias=True, tie_weights=True, norm='layer', position='learned', mlp='gelu')
LLAMA = dict(SHARED, norm_eps=1e-6, bias=False, tie_weights=False, norm='rms', position='rope', mlp='swiglu')

# -----------------------------------------------------------------------------
# functions, written out. The layers below call torch's own kernels for softmax, silu, gelu, cross_entropy and
# attention: they are faster, and the tests compare them with these

def upcast(x):
    """x in float32, or in float64 if it already is: norms, softmax and the loss are computed in it."""
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
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)
    return 0.5 * x * (1 + torch.tanh(inner))

def cross_entropy(logits, targets):
    """Mean of -log softmax(logits)[target] in nats: logits (..., vocab), targets (...) -> a scalar."""
    logits = logits - logits.amax(-1, keepdim=True)
    target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    log_sum = logits.exp().sum(-1).log()
    return (log_sum - target_logits).mean()

def causal_mask(positions, S):
    """Which of S keys a query may see: up to its own position. positions (..., T) -> bool (..., 1, T, S)"""
    keys = torch.arange(S, device=positions.device)
    return keys <= positions[..., None, :, None]

def scaled_dot_product_attention(q, k, v, mask=None, dropout=0.0):
    """
    softmax(q k^T / sqrt(hs)) v: q (..., T, hs), k and v (..., S, hs); mask (..., T, S): True where q may look. Without
    a mask, it looks everywhere.
    """
    att = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if mask is not None:
        att = att.masked_fill(~mask, float('-inf'))
    # torch's softmax: through the one above, autograd would also follow the maximum, for nothing
    att = F.softmax(upcast(att), -1).to(v.dtype)
    return F.dropout(att, dropout) @ v

def fused_attention(q, k, v, mask=None, dropout=0.0):
    """
    The same by torch's kernels, which hold no (T, T) matrix in memory. But without a mask it is causal, the fastest
    case. On a Hopper GPU, use torch 2.11 or newer, which chooses cuDNN's kernels.
    """
    dtype = q.dtype
    if q.device.type == 'cpu':          # there the backward pass is 5 times as fast in float32 as in 16 bits
        q, k, v = upcast(q), upcast(k), upcast(v)
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None)
    return y.to(dtype)

LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)

def rope_slowdown(freqs, factor):
    """Llama 3.1 multiplies rope's frequencies by 1 (4 or more turns in 8,192 tokens) down to 1 / factor (1 or none)."""
    low, high, context = LLAMA3.values()
    turns = freqs * context / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept + (1 - kept) / factor

def rope_freqs(hs, theta):
    """theta^(-2i/hs) for each of the hs/2 pairs of a head"""
    return theta ** -(torch.arange(0, hs, 2).float() / hs)

def rope_angles(positions, hs, theta, factor=1.0):
    """positions (T,) -> cos, sin (T, hs/2) of position * frequency; factor: as in rope_slowdown."""
    freqs = rope_freqs(hs, theta)
    freqs = freqs * rope_slowdown(freqs, factor)        # by exactly 1 if the factor is 1
    angles = positions.float()[:, None] * freqs
    return angles.cos(), angles.sin()

def apply_rope(x, cos, sin):
    """
    Rotates each pair (x[i], x[i + hs/2]) of a head by its angle, the half-split layout of Hugging Face's Llama:
    x (..., hs), cos and sin (..., hs/2) -> (..., hs).
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

# -----------------------------------------------------------------------------
# layers

def random_matrix(rows, columns, std):
    """A weight of a normal distribution without what lies beyond 3 std."""
    w = torch.empty(rows, columns)
    return nn.Parameter(nn.init.trunc_normal_(w, 0.0, std, -3 * std, 3 * std))

class Linear(nn.Module):
    packed = None       # see GPT.pack

    def __init__(self, d_in, d_out, bias=False):
        super().__init__()
        self.weight = random_matrix(d_out, d_in, math.sqrt(2 / (d_in + d_out)))
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None

    def forward(self, x):
        if self.packed is not None:
            return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        w = self.weight.to(x.dtype)
        b = None if self.bias is None else self.bias.to(x.dtype)
        one_row = x.numel() == x.size(-1)
        if one_row and x.device.type == 'cpu' and torch.compiler.is_compiling():
            # compiles to a loop that reads w at the speed of memory, 2 to 3 times as fast as F.linear
            y = (upcast(w) * upcast(x)).sum(-1).to(x.dtype)[None]        # (1, 1, d_out)
            return y if b is None else y + b
        return F.linear(x, w, b)        # x @ w.T + b in one call

class Embedding(nn.Module):
    def __init__(self, n, d, std=1.0):
        super().__init__()
        self.weight = random_matrix(n, d, std)

    def forward(self, idx):
        return F.embedding(idx, self.weight)       # weight[idx], with a faster backward

class RMSNorm(nn.Module):
    """x / rms(x) * weight"""
    def __init__(self, d, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        f = upcast(x)
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps)
        return (f * self.weight).to(x.dtype)

class LayerNorm(RMSNorm):
    """(x - mean) / std * weight + bias (arXiv:1607.06450)"""
    def __init__(self, d, eps, bias):
        super().__init__(d, eps)
        self.bias = nn.Parameter(torch.zeros(d)) if bias else 0.0

    def forward(self, x):
        f = upcast(x)
        f = super().forward(f - f.mean(-1, keepdim=True)) + self.bias
        return f.to(x.dtype)

def make_norm(config):
    if config.norm == 'rms':
        return RMSNorm(config.n_embd, config.norm_eps)
    if config.norm == 'layer':
        return LayerNorm(config.n_embd, config.norm_eps, config.bias)
    return nn.Identity()

class ValueEmbedding(nn.Module):
    """
    What a layer adds to its values: an embedding of each token (arXiv:2410.17897), times a gate for each head that
    reads up to 12 channels (as in nanochat). x (B, T, C), idx (B, T) -> (B, T, nkv, hs)
    """
    def __init__(self, config):
        super().__init__()
        self.channels = min(config.n_embd, 12)
        self.n_kv_head = config.n_kv_head
        self.embed_values = Embedding(config.vocab_size, config.n_kv_head * config.head_dim, 0.02)
        self.gate_proj = Linear(self.channels, config.n_kv_head)

    def forward(self, x, idx):
        values = self.embed_values(idx).to(x.dtype).unflatten(-1, (self.n_kv_head, -1))
        gate = 3 * torch.sigmoid(self.gate_proj(x[..., :self.channels]))
        return gate[..., None] * values

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
        # in the last layer and every other one before it
        has_values = c.value_embeds and (c.n_layer - layer) % 2 == 1
        self.value_embed = ValueEmbedding(config) if has_values else None

    def forward(self, x, angles, mask=None, fused=True, cache=None, positions=None, decode=False, idx=None):
        """
        x (B, T, C); angles: of rope, or None; mask (..., T, S): True where a query may look; fused: by torch's kernels,
        for which the mask None is the causal one; cache and decode: as in GPT.forward; positions: of x in the cache;
        idx (B, T): the tokens, for value embeddings.
        """
        c = self.config
        B, T, _ = x.shape       # batch, time, n_embd
        q = self.q_norm(self.q_proj(x).view(B, T, c.n_head, c.head_dim))
        k = self.k_norm(self.k_proj(x).view(B, T, c.n_kv_head, c.head_dim))
        v = self.v_proj(x).view(B, T, c.n_kv_head, c.head_dim)
        if self.value_embed is not None:
            v = v + self.value_embed(x, idx)
        if angles is not None:
            q, k = apply_rope(q, *angles), apply_rope(k, *angles)
        if cache is not None:
            # rows (B, 1) and positions (B or 1, T) choose places (B, T) of each head: (B, T, nkv, hs), as k is
            cache.k[self.layer][cache.rows, :, positions] = k
            cache.v[self.layer][cache.rows, :, positions] = v
        q = q.transpose(1, 2)       # (B, nh, T, hs)
        k = k.transpose(1, 2)       # (B, nkv, T, hs)
        v = v.transpose(1, 2)

        group = c.n_head // c.n_kv_head     # heads of queries that share a head of keys and values
        if decode:
            k, v = cache.k[self.layer], cache.v[self.layer]     # (B, nkv, S, hs)
            # T is 1, so a group's queries can be the rows of one matrix, and the cache is not repeated for each head
            q = q.reshape(B, c.n_kv_head, group, c.head_dim)
        elif group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)         # (B, nh, T, hs)

        attend = fused_attention if fused else scaled_dot_product_attention
        y = attend(q, k, v, mask, c.dropout if self.training else 0.0)
        y = y.reshape(B, c.n_head, T, c.head_dim)           # the rows of a group are heads again
        y = y.transpose(1, 2).reshape(B, T, -1)             # (B, T, nh * hs)
        return F.dropout(self.o_proj(y), c.dropout, self.training)

class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        c = self.config = config
        if c.mlp == 'swiglu':
            self.gate_proj = Linear(c.n_embd, c.d_ff, c.bias)
        self.up_proj = Linear(c.n_embd, c.d_ff, c.bias)
        self.down_proj = Linear(c.d_ff, c.n_embd, c.bias)

    def forward(self, x):
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

    def forward(self, x, *context):
        """x (B, T, C); context: what Attention takes beside it"""
        if self.pre:
            x = x + self.self_attn(self.input_layernorm(x), *context)
            return x + self.mlp(self.post_attention_layernorm(x))
        x = self.input_layernorm(x + self.self_attn(x, *context))
        return self.post_attention_layernorm(x + self.mlp(x))

class KVCache:
    """
    Keys and values of all layers for a batch of texts. The model fills it with whole prompts, then adds one token to
    each text at a time. `lengths` says how many tokens each text has; what lies beyond them is masked.
    """
    def __init__(self, model, batch, size):
        config, device = model.config, model.lm_head.weight.device
        shape = (batch, config.n_kv_head, size, config.head_dim)
        with device:
            # one tensor per layer: if they shared one, compiled code would copy all of it at every step
            self.k = [torch.zeros(shape, dtype=model.compute_dtype) for _ in range(config.n_layer)]
            self.v = [torch.zeros_like(k) for k in self.k]
            self.lengths = torch.zeros(batch, dtype=torch.int64)
            self.rows = torch.arange(batch)[:, None]
        self.size = size
        if device.type == 'cuda' and 'torch._dynamo' in sys.modules:        # CUDA graphs write only to fixed addresses
            for t in (*self.k, *self.v, self.lengths, self.rows):
                torch._dynamo.mark_static_address(t, guard=False)

class GPT(nn.Module):
    pad_to = 64             # the embedding and the head have a multiple of this many rows

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        # the largest matmul is faster on GPUs with a multiple of 64 rows. the padding exists only in here: its rows are
        # zero, it never gets a probability, and it is in no checkpoint
        self.padding = -config.vocab_size % self.pad_to if config.vocab_size > 1024 else 0
        rows = config.vocab_size + self.padding
        # tied: blocks add nothing at first, and the last norm divides the embedding by its std, so a token's logit for
        # itself is about n_embd * std, the others near 0. exp of it is 1 + vocab_size / 12 at most, so the loss starts
        # about log(1 + 1/12) above log(vocab_size)
        tied_std = min(0.02, math.log(1 + config.vocab_size / 12) / config.n_embd)
        self.model = nn.ModuleDict(dict(
            embed_tokens=Embedding(rows, config.n_embd, tied_std if config.tie_weights else 0.5),
            layers=nn.ModuleList(Block(config, i) for i in range(config.n_layer)),
            norm=make_norm(config) if config.norm_position == 'pre' else nn.Identity()))
        if config.position == 'learned':
            self.model.embed_positions = Embedding(config.block_size, config.n_embd, 0.02)
        self.lm_head = Linear(config.n_embd, rows)
        self.init_weights()
        self.tie_and_tabulate()

    @torch.no_grad()
    def init_weights(self):
        """
        Weights are normal with these standard deviations; those in the first column are cut off at 3 of them. Layers
        draw that column themselves; this function sets the zeros, and all of the second.

            position =                  rope or none                 learned, as in GPT-2
            embed_tokens                0.5, or tied_std if tied     0.02
            embed_positions             -                            0.02
            embed_values                0.02                         0.02
            lm_head, if not tied        sqrt(2 / (d_in + d_out))     0.02
            q, k, v, gate, up_proj      sqrt(2 / (d_in + d_out))     0.02
            o_proj, down_proj           0: blocks add nothing        0.02 / sqrt(2 n_layer)

        Weights of norms are 1; biases and the rows of padding are 0.
        """
        c = self.config
        for name, p in self.named_parameters():
            last = name.endswith(('o_proj.weight', 'down_proj.weight'))
            if c.position == 'learned' and p.dim() == 2:
                std = 0.02 / math.sqrt(2 * c.n_layer) if last else 0.02
                p.normal_(0.0, std)
            elif last:
                p.zero_()
        for w in (self.model.embed_tokens.weight, self.lm_head.weight):
            w[c.vocab_size:] = 0

    def tie_and_tabulate(self):
        """Makes what a checkpoint does not hold: the head if it is the embedding, and the tables of rope."""
        c = self.config
        if c.tie_weights:
            self.lm_head.weight = self.model.embed_tokens.weight
        # not on the device 'meta': there torch would import its compiler for them, which takes 1.4 s
        if c.position == 'rope' and not self.lm_head.weight.is_meta:
            # (block_size, hs/2) each
            tables = rope_angles(torch.arange(c.block_size), c.head_dim, c.rope_theta, c.rope_factor)
            self.register_buffer('angles', torch.stack(tables), persistent=False)

    def forward(self, idx, targets=None, cache=None, lengths=None, decode=False):
        """
        idx (B, T) -> logits (B, T, vocab_size) in float32, or, with targets (B, T), the mean loss alone, in nats, over
        those that are not -100. cache: a KVCache, which whole prompts fill, padded at the end; lengths (B,) says how
        many tokens of each count, and only the last of these have logits, (B, 1, vocab_size). decode: idx (B, 1) is the
        next token of each text.
        """
        c, T = self.config, idx.size(1)
        assert T <= c.block_size, f'{T} tokens do not fit the context of {c.block_size}'
        if decode:
            positions, S = cache.lengths[:, None], cache.size       # (B, 1)
        else:
            positions, S = torch.arange(T, device=idx.device)[None], T          # (1, T)
        # one query is faster written out. so is bfloat16 compiled on a CPU: a step of 6 layers of width 256 by 8%
        compiled_on_cpu = idx.device.type == 'cpu' and torch.compiler.is_compiling()
        written_out = decode or (compiled_on_cpu and self.compute_dtype == torch.bfloat16 and T <= 512)
        fused = c.attention == 'flash' and not written_out
        # None is causal, and faster than a tensor. for another mask, make this line causal_mask(positions, S) & your
        # condition, (B or 1, 1, T, S), for all cases
        mask = None if fused else causal_mask(positions, S)         # (B or 1, 1, T, S)

        x = self.model.embed_tokens(idx)        # (B, T, n_embd)
        if c.position == 'learned':
            x = x + self.model.embed_positions(positions)
        x = F.dropout(x, c.dropout, self.training).to(self.compute_dtype)
        angles = None
        if c.position == 'rope':        # cos and sin, (2, B or 1, T, 1, hs/2): the same for all heads
            angles = self.angles[:, positions].unsqueeze(-2).to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, angles, mask, fused, cache, positions, decode, idx)

        if decode:
            cache.lengths += 1
        elif cache is not None:
            cache.lengths[:] = lengths
            x = x[cache.rows, cache.lengths[:, None] - 1]        # (B, 1, n_embd)
        logits = upcast(self.lm_head(self.model.norm(x)))
        if targets is None:
            return logits[..., :c.vocab_size]
        # not cut off, as rows of an odd length are slow to read on a GPU; label smoothing needs [..., :c.vocab_size]
        if self.padding:
            beyond = torch.arange(logits.size(-1), device=idx.device) >= c.vocab_size
            logits = logits.masked_fill(beyond, float('-inf'))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())         # cross_entropy above, in one kernel

    def pack(self):
        """
        For generation by a float32 model on a CPU that can_pack: adds a copy of each matrix in float16, in the order in
        which FBGEMM reads it. The weights must not change afterwards. On Zen 4, a row times (32000, 288) takes 0.5 ms,
        and in F.linear 4.4 ms in float32, 2.2 in bfloat16. From 16 rows on, bfloat16 is faster, by a tenth to a half.
        """
        for m in self.modules():
            if isinstance(m, Linear):
                m.packed = torch.ops.quantized.linear_prepack_fp16(m.weight.detach(), m.bias)

    def num_params(self):
        """Parameters of the model, without the padding of the vocabulary; tied weights count once."""
        copies = 1 if self.config.tie_weights else 2
        return sum(p.numel() for p in self.parameters()) - copies * self.padding * self.config.n_embd

    def flops_per_token(self, T=None):
        """Training FLOPs per token: 6 per matmul weight, head included, 12 n_layer n_head head_dim T for attention."""
        c = self.config
        T = c.block_size if T is None else T
        in_blocks = sum(m.weight.numel() for m in self.model.layers.modules() if isinstance(m, Linear))
        return 6 * (in_blocks + c.vocab_size * c.n_embd) + 12 * c.n_layer * c.n_head * c.head_dim * T

# -----------------------------------------------------------------------------
# The evening's reading ends here. What follows is reference: machines, Hugging Face's files, checkpoints, GGUF.
#
# which machine this is. `place` is the name of a device, such as 'cpu' or 'cuda:0'

# dense bf16 FLOP/s (fp16 of V100 and T4), without sparsity, from the data sheets and architecture papers of NVIDIA and
# AMD. RTX 3060 and 4070: twice the FLOP/s of their shaders, as in the papers for the other GeForce cards
PEAK_FLOPS = {
    'GB200': 2500e12, 'B300': 2250e12, 'B200': 2250e12, 'GH200': 989e12, 'H200': 989e12, 'H20': 148e12,
    'H100 PCIe': 756e12, 'H100 NVL': 835e12, 'H100': 989e12, 'MI300X': 1307e12,
    'A100': 312e12, 'A10G': 70e12, 'A10': 125e12, 'A40': 149.7e12, 'A6000': 154.8e12,
    'L40S': 362e12, 'L40': 181e12, 'L4': 121e12, 'V100': 125e12, 'T4': 65e12, 'RTX 6000 Ada': 364.2e12,
    'RTX 5090': 209.5e12, 'RTX 4090': 165.2e12, 'RTX 4070': 58.3e12,
    'RTX 3090': 71e12, 'RTX 3080': 59.5e12, 'RTX 3060': 25.5e12,
}

def choose_device(device, local_rank=0):
    """'auto' -> the GPU of this process, an Apple GPU, or the CPU. Raises UserError for a device that is not there."""
    known = ['cpu']
    if torch.backends.mps.is_available() and os.environ.get('WORLD_SIZE', '1') == '1':
        known.append('mps')         # several processes cannot add up gradients on an Apple GPU
    if torch.cuda.is_available():
        known += [f'cuda:{i}' for i in range(torch.cuda.device_count())]
    if device == 'auto':
        device = 'cuda' if 'cuda:0' in known else known[-1]
    if device == 'cuda':
        device = f'cuda:{local_rank}'
    if device not in known:
        raise UserError(f'there is no {device} here, but {", ".join(known)}: try --device={known[-1]}, and no more '
                        f'processes than GPUs')
    return device

def choose_dtype(dtype, place, texts=0, compiled=False):
    """
    'auto' -> bfloat16 where a GPU has it or a CPU is fast at it, float16 on GPUs that have only that, else float32.
    texts: how many a CPU generates at once, for which float16 is best if matrices can be packed, which compiled code
    does not do. If it generates one text, reading half the bytes counts more than slow arithmetic: with AVX2 alone,
    bfloat16 makes 1.6 times as many tokens a second as float32.
    """
    if dtype in ('float32', 'bfloat16', 'float16'):
        return dtype
    if dtype != 'auto':
        raise UserError(f'dtype = {dtype!r}: give auto, float32, bfloat16 or float16')
    if 'cuda' in place:
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return 'bfloat16'
        return 'float16' if torch.cuda.get_device_capability(place)[0] >= 7 else 'float32'
    if texts and not compiled and can_pack(place):
        return 'float16'
    if has_fast_bfloat16() or (texts == 1 and can_pack(place)):
        return 'bfloat16'
    return 'float32'

def has_fast_bfloat16(cpuinfo='/proc/cpuinfo'):
    """
    Whether a CPU multiplies bfloat16 faster than float32: with AMX, or with AVX512_BF16 on AMD's cores. Intel's cores
    with only AVX512_BF16 take 1.6 times as long as in float32, and other x86 cores emulate it.
    """
    with suppress(OSError):         # only Linux has this file
        text = Path(cpuinfo).read_text()
        return 'amx_bf16' in text or ('avx512_bf16' in text and 'AuthenticAMD' in text)
    return False

def can_pack(place):
    """Whether FBGEMM is there: on x86 with AVX2."""
    return place == 'cpu' and 'fbgemm' in torch.backends.quantized.supported_engines

def choose_compile(compile, place, flops=0.0):
    """'auto' -> whether compiling is possible and pays for this many FLOPs. Raises UserError."""
    if 'cuda' in place:
        pays_from = 1e15        # an estimate
        compiler = 'gcc'        # Triton's launchers are C
        possible = find_spec('triton') is not None and torch.cuda.get_device_capability(place)[0] >= 7
    else:
        # two cores with fast bfloat16 take 140 s for 3e13, or 30 s of compiling and 100 s; others 2.5 times as long
        pays_from = 3e13 if has_fast_bfloat16() else 1.2e13
        compiler = 'g++'        # on a Mac it is clang
        # subtle: torch 2.6 compiles the gradient of an embedding so that a token that comes twice counts once
        possible = place == 'cpu' and torch.__version__ >= (2, 7)
    if os.name == 'nt':
        compiler = 'cl'
    # some systems have Python.h in a separate package
    possible = possible and Path(sysconfig.get_path('include'), 'Python.h').exists() and bool(shutil.which(compiler))
    if compile == 'auto':
        return possible and flops >= pays_from
    if compile not in (False, possible):
        raise UserError(f'compile = {compile}: give --compile=False, or install what True needs: a C++ compiler, '
                        f'Python.h (python3-dev), and torch 2.7 on a CPU or Triton on a GPU')
    return compile

def device_name(place):
    """What a person calls it: 'NVIDIA H100 80GB HBM3', 'Apple GPU', '2 threads'."""
    if 'cuda' in place:
        return torch.cuda.get_device_name(place)
    return 'Apple GPU' if place == 'mps' else f'{torch.get_num_threads()} threads'

def set_up(place):
    """Sets, once, TF32 for float32 matmuls on a GPU, and malloc and the compiler on a CPU. Raises UserError."""
    if 'cuda' in place:
        # before the first tensor there: then pieces of odd sizes leave no holes in memory
        name = 'PYTORCH_ALLOC_CONF' if torch.__version__ >= (2, 9) else 'PYTORCH_CUDA_ALLOC_CONF'
        os.environ.setdefault(name, 'expandable_segments:True')
        torch.set_float32_matmul_precision('high')
        torch.cuda.set_device(place)
        try:
            torch.ones(1, device=place) + 1         # the card may be too old for this torch
        except RuntimeError as e:
            raise UserError(f'{place} cannot be used ({str(e).splitlines()[0]}); try --device=cpu')
    elif sys.platform == 'linux':
        # keep freed memory (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD): fresh memory costs a tenth of a step
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)
        libc.mallopt(-1, 2 ** 31 - 1)
        # large pages: a float32 model of 124M generates 15% faster. torch reads this once, before its first tensor
        os.environ.setdefault('THP_MEM_ALLOC_ENABLE', '1')
        # the first compile takes 8 s less without asking g++ what an x86 can do
        if can_pack(place):
            os.environ.setdefault('TORCHINDUCTOR_VEC_ISA_OK', '1')

def peak_flops(place):
    """Dense bf16 FLOP/s of the card, or 0 for an unknown one."""
    for card, flops in PEAK_FLOPS.items():
        if re.search(rf'\b{card}\b(?! (Laptop|Ti|D|SUPER)\b)', device_name(place)):
            return flops
    return 0

# -----------------------------------------------------------------------------
# Hugging Face's files: a Llama's weights have the same names as ours, Qwen3 is a Llama with qk_norm, GPT-2 has its own

GPT2_NAMES = {
    'model.embed_tokens': 'transformer.wte',
    'model.embed_positions': 'transformer.wpe',
    'model.layers': 'transformer.h',
    'model.norm': 'transformer.ln_f',
    'input_layernorm': 'ln_1',
    'self_attn.[qkv]_proj': 'attn.c_attn',      # joined, in this order
    'self_attn.o_proj': 'attn.c_proj',
    'post_attention_layernorm': 'ln_2',
    'mlp.up_proj': 'mlp.c_fc',
    'mlp.down_proj': 'mlp.c_proj',
}

def to_gpt2(tensors):
    """Our names of weights -> GPT-2's, which joins q, k and v, and whose blocks store matrices as (in, out)."""
    out = {}
    for name, x in tensors.items():
        for ours, theirs in GPT2_NAMES.items():
            name = re.sub(ours, theirs, name)
        x = x.t() if '.c_' in name else x       # a Conv1D; a bias is its own transpose
        out[name] = torch.cat([out[name], x], -1) if name in out else x
    return out

def from_gpt2(tensors):
    """The way back. The hub's own files lack the prefix."""
    out = {}
    for name, x in tensors.items():
        if not name.startswith(('transformer.', 'lm_head.')):
            name = f'transformer.{name}'
        x = x.t().contiguous() if '.c_' in name else x
        for ours, theirs in GPT2_NAMES.items():
            name = name.replace(theirs, ours)
        if '[qkv]' in name:
            for part, y in zip('qkv', x.chunk(3)):
                out[name.replace('[qkv]', part)] = y
        else:
            out[name] = x
    return out

# what has a row for each id, and for the padding
PADDED = 'model.embed_tokens.weight', 'lm_head.weight'

def weights_on_disk(model):
    """The weights as Hugging Face names and shapes them, without padding or a tied head."""
    tensors = model.state_dict()
    for name in PADDED:
        tensors[name] = tensors[name][:model.config.vocab_size]
    if model.config.tie_weights:
        del tensors['lm_head.weight']
    if family(model.config) == 'gpt2':
        tensors = to_gpt2(tensors)
    return {name: x.contiguous() for name, x in tensors.items()}

# the names in config.json of our fields
LLAMA_KEYS = dict(
    vocab_size='vocab_size', tie_word_embeddings='tie_weights', max_position_embeddings='block_size',
    num_hidden_layers='n_layer', num_attention_heads='n_head', num_key_value_heads='n_kv_head',
    hidden_size='n_embd', head_dim='head_dim', intermediate_size='d_ff', rope_theta='rope_theta', factor='rope_factor',
    rms_norm_eps='norm_eps',
)
GPT2_KEYS = dict(
    vocab_size='vocab_size', tie_word_embeddings='tie_weights', n_positions='block_size',
    n_layer='n_layer', n_head='n_head', n_embd='n_embd', n_inner='d_ff', layer_norm_epsilon='norm_eps',
)

# settings in config.json that are not fields of ours, with the only value that works here
LLAMA_FIXED = dict(hidden_act='silu', use_sliding_window=False)
GPT2_FIXED = dict(activation_function='gelu_new', scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)

# model_type: its class in transformers, the fields in its config.json, the values of fields that are not there
FAMILIES = dict(
    llama=('LlamaForCausalLM', dict(LLAMA_KEYS, attention_bias='bias', mlp_bias='bias'), LLAMA, LLAMA_FIXED),
    qwen3=('Qwen3ForCausalLM', LLAMA_KEYS, dict(LLAMA, qk_norm=True), LLAMA_FIXED),
    gpt2=('GPT2LMHeadModel', GPT2_KEYS, GPT2, GPT2_FIXED),
)

def family(config):
    """
    The model_type whose values, with the fields of its config.json, make this config; or gpt_ablation. A field that no
    family names has to be as GPTConfig has it.
    """
    for kind, (_, keys, values, _) in FAMILIES.items():
        ours = {name: getattr(config, name) for name in (*keys.values(), *TRAINING_FIELDS)}
        with suppress(UserError):       # rope and an odd head_dim, say
            if GPTConfig(**(values | ours)) == config:
                return kind
    return 'gpt_ablation'

def export_config(config, eot):
    """The config.json of a model, for transformers if that knows its kind."""
    kind = family(config)
    d = dict(model_type=kind, torch_dtype='float32', bos_token_id=eot, eos_token_id=eot)
    if kind == 'gpt_ablation':
        return dict(d, gpt_config=asdict(config))
    name, keys, _, fixed = FAMILIES[kind]
    d.update(architectures=[name], **{theirs: getattr(config, ours) for theirs, ours in keys.items()}, **fixed)
    if d.pop('factor', 1) != 1:
        d['rope_scaling'] = dict(LLAMA3, rope_type='llama3', factor=config.rope_factor)
    return d

def import_config(folder):
    """The GPTConfig that a config.json describes. Raises UserError for an architecture that is not supported."""
    d = read_json(folder / 'config.json')
    kind = d.get('model_type')
    if kind == 'gpt_ablation':
        try:
            return GPTConfig(**d['gpt_config'])
        except (KeyError, TypeError) as e:          # of a version with other fields, say
            raise UserError(f'{folder}: config.json has other fields than GPTConfig ({e}): use another folder')
    if kind not in FAMILIES:
        raise UserError(f'the architecture {kind!r} is not supported; use a Llama, Qwen3 or GPT-2')
    _, keys, values, fixed = FAMILIES[kind]
    d = d | (d.get('rope_parameters') or d.get('rope_scaling') or {})
    rope = LLAMA3 if d.get('rope_type') == 'llama3' else dict(rope_type='default', factor=1)
    for name, value in (fixed | rope).items():
        if d.get(name) not in (value, None):
            raise UserError(f'{name} = {d[name]!r} is not supported, only {value!r}: use another model')
    found = {ours: d[theirs] for theirs, ours in keys.items() if d.get(theirs) is not None}
    return GPTConfig(**(values | found))

def find_folder(name, say=print):
    """
    The folder of a model; the newest checkpoint in the folder of a run; or the download of a model on the Hugging Face
    hub, such as 'gpt2' or 'owner/model'. Raises UserError.
    """
    if Path(name).is_dir():
        folder = newest_whole(name, say) if checkpoints(name) else Path(name)
        if (folder / 'log.jsonl').exists():         # a run in its first steps
            text = (folder / 'config.py').read_text(encoding='utf-8')
            options = {name: int(value) for name, value in re.findall(r'^(\w+) = (\d+)$', text, re.M)}
            first = options.get('save_interval') or options['eval_interval']
            raise UserError(f'{folder} has no checkpoint yet; the first one comes at step {first}')
        import_config(folder)           # raises before any text is prepared for it
        return folder
    if not re.fullmatch(r'gpt2(-medium|-large|-xl)?|[\w.-]+/[\w.-]+', name):
        raise UserError(f'there is no model {name!r}: give the folder of a checkpoint or of a Hugging Face model, '
                        f'gpt2, or owner/model on the hub; `ls out` shows the runs')
    from huggingface_hub import snapshot_download
    repo = name if '/' in name else f'openai-community/{name}'
    # config.json first: a model that is not supported is refused before its weights are downloaded
    for patterns in '*.json', ['*.jinja', 'model*.safetensors']:
        try:        # without the manifest of one of ours: it names files that are not needed
            folder = Path(snapshot_download(repo, allow_patterns=patterns, ignore_patterns=MANIFEST))
        except Exception as e:          # of many kinds: no network, no such model, no permission
            raise UserError(f'there is no folder {name}, and the hub does not provide it ({type(e).__name__}): check '
                            f'the name (`ls out` shows the runs) and the network, or give the folder of a download')
        import_config(folder)
    return folder

# tables and masks, which files of older models hold
NO_WEIGHTS = '.inv_freq', '.attn.bias', '.attn.masked_bias'

def load_model(folder, **overrides):
    """
    The GPT in one of our checkpoints, or in a Hugging Face folder of a Llama, Qwen3 or GPT-2. overrides: fields of
    GPTConfig that a checkpoint does not decide (dropout, attention). Raises UserError.
    """
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        check_manifest(folder)
    try:
        config = replace(import_config(folder), **overrides)
        tensors = {}
        for file in folder.glob('model*.safetensors'):
            for name, x in load_file(file).items():
                if not name.endswith(NO_WEIGHTS):
                    tensors[name] = x.float()
        if family(config) == 'gpt2':
            tensors = from_gpt2(tensors)
        with torch.device('meta'):      # names and shapes only: a file's claims allocate nothing
            model = GPT(config)
        if config.tie_weights:
            tensors['lm_head.weight'] = tensors['model.embed_tokens.weight']
        for name in PADDED:
            tensors[name] = F.pad(tensors[name], (0, 0, 0, model.padding))
        model.load_state_dict(tensors, assign=True)
        model.tie_and_tabulate()
    except (SafetensorError, RuntimeError, KeyError, TypeError) as e:
        raise UserError(f'{folder}: config.json and model*.safetensors are not one model of a known kind '
                        f'({" ".join(str(e).split())[:300]}); use another folder')
    return model

# -----------------------------------------------------------------------------
# checkpoints: a folder, written under another name and renamed once it is complete

MANIFEST = 'manifest.json'      # the sha256 of each file of a checkpoint
# what belongs to a model besides its weights: how it reads, which ids end a text, how a chat is written
KEPT = 'tokenizer*', 'vocab.json', 'merges.txt', '*_tokens*.json', 'generation_config.json', 'chat_template*'
KEPT_IDS = 'bos_token_id', 'eos_token_id', 'pad_token_id'

def keep_from(folder):
    """What a model trained further keeps of the folder it came from: {file: bytes}, {id in config.json: value}"""
    config = read_json(folder / 'config.json')
    files = {path.name: path.read_bytes() for pattern in KEPT for path in folder.glob(pattern)}
    return files, {name: config[name] for name in KEPT_IDS if name in config}

def save_checkpoint(folder, model, tokenizer_path, eot, training, tensors, card='', kept={}, ids={}):
    """
    Writes a checkpoint folder that `transformers` opens: config.json, model.safetensors, the tokenizer's files, a
    README.md (card) and the sha256 of every file; for resuming, also training.json (a dict) and
    training.safetensors (a dict of tensors). kept, ids: from keep_from. It gets its name only when all of it is on the
    disk. Raises OSError or SafetensorError if it cannot be written.
    """
    with whole_folder(folder) as unfinished:
        save_file(weights_on_disk(model), unfinished / 'model.safetensors', {'format': 'pt'})
        save_file(tensors, unfinished / 'training.safetensors')
        files = {'config.json': export_config(model.config, eot) | ids, 'training.json': training}
        if tokenizer_path.exists():
            shutil.copyfile(tokenizer_path, unfinished / 'tokenizer.json')
            end = {token['id']: token['content'] for token in read_json(tokenizer_path)['added_tokens']}.get(eot)
            files['tokenizer_config.json'] = dict(
                tokenizer_class='PreTrainedTokenizerFast', eos_token=end, bos_token=end,
                model_max_length=model.config.block_size, clean_up_tokenization_spaces=False)
        # it may name a path that is not UTF-8
        (unfinished / 'README.md').write_text(card, encoding='utf-8', errors='backslashreplace')
        for name, content in files.items():
            (unfinished / name).write_text(json.dumps(content, indent=1))
        for name, content in kept.items():
            (unfinished / name).write_bytes(content)
        hashes = {path.name: file_sha256(path) for path in sorted(unfinished.iterdir())}
        (unfinished / MANIFEST).write_text(json.dumps(hashes, indent=1))
        for path in unfinished.glob('*.safetensors'):
            shutil.copymode(unfinished / 'config.json', path)       # safetensors lets only their owner read them

def replace_card(folder, card):
    """Replaces the README.md of a checkpoint. Meanwhile the manifest does not list it, so that a crash does no harm."""
    hashes = read_json(folder / MANIFEST)
    hashes.pop('README.md', None)
    write(folder / MANIFEST, json.dumps(hashes, indent=1))
    write(folder / 'README.md', card)
    hashes['README.md'] = file_sha256(folder / 'README.md')
    write(folder / MANIFEST, json.dumps(hashes, indent=1))

def remove_checkpoint(folder):
    """Removes a checkpoint; from the first moment on it no longer looks like one."""
    hidden = folder.rename(folder.with_name(f'.{folder.name}.partial'))
    shutil.rmtree(hidden, ignore_errors=True)

def check_manifest(folder):
    """Raises UserError unless every file of a checkpoint is there, as it was written."""
    for name, sha256 in read_json(folder / MANIFEST).items():
        path = folder / name
        if not path.is_file() or file_sha256(path) != sha256:
            raise UserError(f'{path} is damaged or missing (its sha256 is not that in {MANIFEST}): use another one')

def checkpoints(run):
    """The checkpoints of a run's folder, oldest first."""
    return sorted(Path(run).glob('step_' + 8 * '[0-9]'))

def newest_whole(run, say=print):
    """The newest whole checkpoint of a run; says what is wrong with newer ones. Raises UserError if there is none."""
    for folder in reversed(checkpoints(run)):
        try:
            check_manifest(folder)
            return folder
        except UserError as e:
            say(f'{e}; it is not used')
    raise UserError(f'no checkpoint in {run} is whole; start again with another --out_dir')

# -----------------------------------------------------------------------------
# GGUF, the format of llama.cpp and Ollama

def write_gguf(path, model, tok, stop, type_):
    """
    Writes a Llama, Qwen3 or GPT-2 and its BPE tokenizer as a GGUF file, for llama.cpp and Ollama: matrices in type_,
    the rest in float32; `stop` is the id that ends a text, or None. Raises UserError for other models and tokenizers.
    """
    import gguf
    c, kind = model.config, family(model.config)
    if kind not in FAMILIES or not getattr(tok, 'merges', None):
        raise UserError('GGUF has no form for this model, only for a Llama, Qwen3 or GPT-2 with a BPE tokenizer of '
                        "ours: for one of others, give the checkpoint to llama.cpp's convert_hf_to_gguf.py")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    unfinished = f'{path}.partial'
    w = gguf.GGUFWriter(unfinished, kind)
    add_shape(w, c)
    add_tokens(w, tok, stop, c.vocab_size, gguf.TokenType)

    matrix = dict(float32='F32', float16='F16', bfloat16='BF16')[type_]
    w.add_file_type(gguf.LlamaFileType['ALL_F32' if matrix == 'F32' else f'MOSTLY_{matrix}'])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], c.n_layer)
    heads = dict(q_proj=c.n_head, k_proj=c.n_kv_head)
    for name, x in weights_on_disk(model).items():
        part = name.split('.')[-2]
        if part.startswith('c_'):       # GPT-2's, which Hugging Face stores as (in, out)
            x = x.t()
        if kind == 'llama' and part in heads:       # the two rows that rope rotates stand side by side
            x = x.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).reshape(x.shape)
        stored_as = gguf.GGMLQuantizationType[matrix if x.dim() > 1 else 'F32']
        x = gguf.quants.quantize(x.numpy(), stored_as)
        w.add_tensor(names.get_name(name, ('.weight', '.bias')), x, raw_dtype=stored_as)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    os.replace(unfinished, path)

def add_shape(w, c):
    """The sizes of a model, and those that only other kinds have: llama.cpp ignores them."""
    w.add_context_length(c.block_size)
    w.add_block_count(c.n_layer)
    w.add_embedding_length(c.n_embd)
    w.add_feed_forward_length(c.d_ff)
    w.add_head_count(c.n_head)
    w.add_head_count_kv(c.n_kv_head)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_layer_norm_eps(c.norm_eps)
    w.add_layer_norm_rms_eps(c.norm_eps)
    w.add_rope_freq_base(c.rope_theta)
    if c.rope_factor != 1:
        slowdown = rope_slowdown(rope_freqs(c.head_dim, c.rope_theta), c.rope_factor)
        w.add_tensor('rope_freqs.weight', (1 / slowdown).numpy())

def add_tokens(w, tok, stop, size, types):
    """A tokenizer for a model with `size` ids; the last ones may have no token."""
    _, bpe, _ = tok.as_json()
    tokens = [f'[unused {id}]' for id in range(size)]
    kinds = [types.UNUSED] * size
    for token, id in bpe['vocab'].items():
        tokens[id] = token
        kinds[id] = types.CONTROL if token in tok.special_ids else types.NORMAL
    w.add_tokenizer_model('gpt2')
    w.add_tokenizer_pre(dict(gpt2='gpt-2', gpt4='dbrx')[tok.pattern_name])      # llama.cpp's names for our PATTERNS
    w.add_token_list(tokens)
    w.add_token_types(kinds)
    w.add_token_merges([' '.join(pair) for pair in bpe['merges']])
    w.add_add_bos_token(False)
    if stop is not None:
        w.add_bos_token_id(stop)
        w.add_eos_token_id(stop)
