"""Correct attention that knows positions: rotary, ALiBi, relative, windows, and caches for decoding."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class LlamaStyle(nn.Module):
    """Rotary positions, grouped key-value heads, a cache of (key, value) that is passed in and returned."""

    def __init__(self, hidden_size=32, num_heads=4, num_kv_heads=2, base=10000.0):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)
        inv_freq = 1.0 / base ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x, past_key_value=None):
        b, n, _ = x.shape
        q = self.q_proj(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, n, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, n, self.num_kv_heads, self.head_dim).transpose(1, 2)
        start = 0 if past_key_value is None else past_key_value[0].shape[2]
        angles = torch.outer(torch.arange(start, start + n, device=x.device).to(self.inv_freq.dtype), self.inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        if past_key_value is not None:
            k, v = torch.cat((past_key_value[0], k), dim=2), torch.cat((past_key_value[1], v), dim=2)
        cache = (k, v)
        groups = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)
        later = torch.ones(n, k.shape[2], dtype=torch.bool, device=x.device).triu(start + 1)
        scores = scores.masked_fill(later, float("-inf"))
        out = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v
        return self.o_proj(out.transpose(1, 2).reshape(b, n, -1)), cache


class InterleavedRotary(nn.Module):
    """RoFormer's own pairs (even, odd), by complex numbers; causal."""

    def __init__(self, dim=24, heads=3, base=10000.0):
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.base = base

    def turn(self, x):
        n = x.shape[-2]
        angle = torch.arange(n, device=x.device)[:, None] / self.base ** (
            torch.arange(0, self.width, 2, device=x.device) / self.width
        )
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2).type_as(x)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(b, n, d))


class Alibi(nn.Module):
    """Press et al. 2022: a linear penalty by distance, steeper in each head; causal."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("slopes", 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        at = torch.arange(n, device=x.device)
        bias = -self.slopes[:, None, None] * (at[:, None] - at[None, :]).clamp(min=0)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias.to(q.dtype)
        scores = scores.masked_fill(at[None, :] > at[:, None], float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class T5Style(nn.Module):
    """Raffel et al. 2020: no scale, a learned bias for each bucket of distances, both directions."""

    def __init__(self, d_model=32, num_heads=4, d_kv=8, buckets=8, max_distance=20):
        super().__init__()
        self.n_heads, self.d_kv, self.buckets, self.max_distance = num_heads, d_kv, buckets, max_distance
        inner = num_heads * d_kv
        self.q, self.k, self.v = (nn.Linear(d_model, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(buckets, num_heads)

    def bucket(self, relative):
        half = self.buckets // 2
        found = (relative > 0).long() * half
        distance, exact = relative.abs(), half // 2
        far = (
            exact
            + (
                torch.log(distance.float().clamp(min=1) / exact) / math.log(self.max_distance / exact) * (half - exact)
            ).long()
        )
        return found + torch.where(distance < exact, distance, far.clamp(max=half - 1))

    def forward(self, hidden_states):
        b, n, _ = hidden_states.shape
        q, k, v = (
            one(hidden_states).view(b, n, self.n_heads, self.d_kv).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        at = torch.arange(n, device=hidden_states.device)
        bias = self.relative_attention_bias(self.bucket(at[None, :] - at[:, None])).permute(2, 0, 1)
        weights = F.softmax(q @ k.transpose(3, 2) + bias, dim=-1)
        return self.o((weights @ v).transpose(1, 2).reshape(b, n, -1))


class MusicTransformer(nn.Module):
    """Huang et al. 2019: relative positions by skewing, S_rel = skew(Q E^T); causal."""

    def __init__(self, dim=24, heads=3, longest=64):
        super().__init__()
        self.heads, self.longest = heads, longest
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.relative = nn.Parameter(torch.randn(longest, dim // heads) * 0.3)

    def skew(self, qe):
        padded = F.pad(qe, (1, 0))
        b, h, rows, columns = padded.shape
        return padded.reshape(b, h, columns, rows)[:, :, 1:, :]

    def forward(self, x):
        b, n, d = x.shape
        if n > self.longest:
            raise ValueError(f"{n} positions are more than {self.longest}")
        q, k, v = (one(x).view(b, n, self.heads, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        skewed = self.skew(q @ self.relative[self.longest - n :].mT)
        scores = (q @ k.mT + skewed) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.triu(torch.ones(n, n, device=x.device), 1).bool(), float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class SlidingWindow(nn.Module):
    """Each query sees itself and the `window` keys before it."""

    def __init__(self, dim=24, heads=3, window=4):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        at = torch.arange(n, device=x.device)
        behind = at[:, None] - at[None, :]
        seen = (behind >= 0) & (behind <= self.window)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).reshape(b, n, d))


class StatefulCache(nn.Module):
    """Llama's reference: a buffer of the largest size, filled from start_pos on; learned positions, causal."""

    def __init__(self, dim=24, n_heads=3, max_seq_len=64, max_batch_size=16):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        kept = (max_batch_size, max_seq_len, n_heads, self.head_dim)
        self.register_buffer("cache_k", torch.zeros(kept), persistent=False)
        self.register_buffer("cache_v", torch.zeros(kept), persistent=False)

    def forward(self, x, start_pos=0):
        b, n, _ = x.shape
        q, k, v = (one(x).view(b, n, self.n_heads, self.head_dim) for one in (self.wq, self.wk, self.wv))
        with torch.no_grad():
            self.cache_k[:b, start_pos : start_pos + n] = k
            self.cache_v[:b, start_pos : start_pos + n] = v
        keys = torch.cat((self.cache_k[:b, :start_pos], k), 1).transpose(1, 2)
        values = torch.cat((self.cache_v[:b, :start_pos], v), 1).transpose(1, 2)
        scores = torch.matmul(q.transpose(1, 2), keys.transpose(2, 3)) / math.sqrt(self.head_dim)
        if n > 1:
            mask = torch.full((n, n), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
            scores = scores + torch.hstack([torch.zeros((n, start_pos), device=x.device, dtype=x.dtype), mask])
        out = torch.matmul(F.softmax(scores, dim=-1), values)
        return self.wo(out.transpose(1, 2).contiguous().view(b, n, -1))
