import torch
from torch import nn


class MultiQueryAttention(nn.Module):
    """All query heads share one key and one value head (Shazeer 2019)."""

    def __init__(self, hidden_size=40, num_heads=5):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.query_key_value = nn.Linear(hidden_size, hidden_size + 2 * self.head_dim)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, attention_mask):
        """attention_mask: (batch, 1, length, length), additive: 0 keeps, a large negative number hides."""
        batch, length, hidden = hidden_states.shape
        fused = self.query_key_value(hidden_states)
        query, key, value = fused.split([hidden, self.head_dim, self.head_dim], dim=-1)
        query = query.view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        scores = torch.einsum("bhqd,bkd->bhqk", query, key) / self.head_dim**0.5
        scores = scores + attention_mask
        probs = scores.float().softmax(-1).to(query.dtype)
        context = torch.einsum("bhqk,bkd->bqhd", probs, value)
        return self.dense(context.reshape(batch, length, hidden))
