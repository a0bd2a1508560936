import torch
from torch import nn


class AlibiAttention(nn.Module):
    def __init__(self, embed_dim=32, num_heads=8):
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v = nn.Linear(embed_dim, embed_dim, bias=False)
        self.o = nn.Linear(embed_dim, embed_dim, bias=False)
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / num_heads) for h in range(num_heads)])
        self.register_buffer("slopes", slopes.view(num_heads, 1, 1), persistent=False)

    def forward(self, x):
        b, n, e = x.shape
        q, k, v = (f(x).reshape(b, n, self.num_heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        pos = torch.arange(n, device=x.device)
        distance = (pos[None, :] - pos[:, None]).to(x.dtype)
        logits = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        logits = logits + self.slopes * distance
        future = distance > 0
        logits = logits.masked_fill(future, torch.finfo(logits.dtype).min)
        y = logits.softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(b, n, e))
