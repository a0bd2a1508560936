import torch
import torch.nn as nn


class LocalAttention(nn.Module):
    """Causal attention over the last `window` positions, the own one included; `cache` is what the last call returned."""

    def __init__(self, embed_dim=36, num_heads=3, window=6):
        super().__init__()
        self.num_heads, self.window = num_heads, window
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, cache=None):
        b, t, e = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        past = 0
        if cache is not None:
            past = cache[0].shape[2]
            k = torch.cat([cache[0], k], dim=2)
            v = torch.cat([cache[1], v], dim=2)
        rows = torch.arange(past, past + t, device=x.device).unsqueeze(1)
        cols = torch.arange(past + t, device=x.device).unsqueeze(0)
        hidden = (cols > rows) | (cols <= rows - self.window)
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(hidden, float("-inf"))
        y = scores.softmax(-1) @ v
        keep = self.window - 1
        cache = (k[:, :, -keep:], v[:, :, -keep:])
        return self.proj(y.transpose(1, 2).reshape(b, t, e)), cache
