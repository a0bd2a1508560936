import torch
import torch.nn as nn
import torch.nn.functional as F


class SlidingWindowAttention(nn.Module):
    """Each token sees itself and the `window` tokens before it. The cache is a ring of window + 1 slots."""

    def __init__(self, dim=40, heads=5, window=5):
        super().__init__()
        self.heads, self.window = heads, window
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        self.clear()

    def clear(self):
        self.ring, self.seen = None, 0

    def split(self, t):
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(x)), self.split(self.to_v(x))
        i = torch.arange(x.size(1), device=x.device)
        distance = i[:, None] - i[None, :]
        visible = (distance >= 0) & (distance <= self.window)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.out(y.transpose(1, 2).flatten(2))

    def step(self, x):
        """One token, x: (batch, 1, dim)."""
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(x)), self.split(self.to_v(x))
        if self.ring is None:
            self.ring = (k.new_zeros(*k.shape[:2], self.window + 1, k.size(-1)),) * 2
            self.ring = tuple(t.clone() for t in self.ring)
        slot = self.seen % (self.window + 1)
        self.ring[0][:, :, slot] = k[:, :, 0]
        self.ring[1][:, :, slot] = v[:, :, 0]
        self.seen += 1
        filled = min(self.seen, self.window + 1)
        y = F.scaled_dot_product_attention(q, self.ring[0][:, :, :filled], self.ring[1][:, :, :filled])
        return self.out(y.transpose(1, 2).flatten(2))
