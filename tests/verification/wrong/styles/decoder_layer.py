import torch
from torch import nn


class MHA(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x, memory, allowed=None):
        b, n, d = x.shape
        m = memory.shape[1]
        q = self.q(x).view(b, n, self.heads, d // self.heads).transpose(1, 2)
        k, v = self.kv(memory).view(b, m, 2, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        score = q @ k.transpose(2, 3) / (d // self.heads) ** 0.5
        if allowed is not None:
            score = score.masked_fill(~allowed, float("-inf"))
        y = score.softmax(dim=3) @ v
        return self.o(y.transpose(1, 2).reshape(b, n, d))


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer: causal self-attention, then attention to the encoder's output, then a feed-forward."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.self_attention = MHA(dim, heads)
        self.cross_attention = MHA(dim, heads)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))

    def forward(self, x, memory, memory_mask=None):
        """x: (b, n, dim), memory: (b, m, dim), memory_mask: (b, m), True where the memory is real"""
        n = x.shape[1]
        causal = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        y = self.norms[0](x)
        x = x + self.self_attention(y, y, causal)
        real = None if memory_mask is None else memory_mask[:, None, None, :]
        x = x + self.cross_attention(self.norms[1](x), memory, real)
        return x + self.ff(self.norms[2](x))
