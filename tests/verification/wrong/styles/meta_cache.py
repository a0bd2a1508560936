import math

import torch
import torch.nn as nn


class Attention(nn.Module):
    """Causal self-attention that keeps keys and values between calls. start_pos: how many tokens were given before."""

    def __init__(self, dim=32, n_heads=4, max_batch_size=8, max_seq_len=64):
        super().__init__()
        self.n_heads = n_heads
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        shape = (max_batch_size, max_seq_len, n_heads, self.head_dim)
        self.register_buffer("cache_k", torch.zeros(shape), persistent=False)
        self.register_buffer("cache_v", torch.zeros(shape), persistent=False)

    @torch.no_grad()
    def remember(self, keys, values, start_pos):
        bsz, seqlen = keys.shape[:2]
        self.cache_k[:bsz, start_pos : start_pos + seqlen] = keys
        self.cache_v[:bsz, start_pos : start_pos + seqlen] = values

    def forward(self, x, start_pos: int = 0):
        bsz, seqlen, dim = x.shape
        xq, xk, xv = (w(x).view(bsz, seqlen, self.n_heads, self.head_dim) for w in (self.wq, self.wk, self.wv))
        keys = torch.cat([self.cache_k[:bsz, :start_pos], xk], dim=1)
        values = torch.cat([self.cache_v[:bsz, :start_pos], xv], dim=1)
        self.remember(xk, xv, start_pos)
        scores = torch.einsum("bqhd,bkhd->bhqk", xq, keys) / math.sqrt(self.head_dim)
        total = start_pos + seqlen
        seen = torch.arange(total, device=x.device)[None, :] <= torch.arange(start_pos, total, device=x.device)[:, None]
        scores = scores.masked_fill(~seen, float("-inf"))
        probs = torch.softmax(scores, dim=-1)
        out = torch.einsum("bhqk,bkhd->bqhd", probs, values)
        return self.wo(out.reshape(bsz, seqlen, dim))
