import torch.nn as nn
import torch.nn.functional as F


class SelfAttention(nn.Module):
    def __init__(self, d_model: int = 56, num_heads: int = 7, dropout: float = 0.2):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        batch, length, d_model = x.shape
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q = q.view(batch, length, self.num_heads, -1).transpose(1, 2)
        k = k.view(batch, length, self.num_heads, -1).transpose(1, 2)
        v = v.view(batch, length, self.num_heads, -1).transpose(1, 2)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, length, d_model)
        return self.out_proj(y)
