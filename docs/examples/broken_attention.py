"""The textbook's multi-head attention with one line broken, to see what `saccade verify` says."""

import math

import torch
from torch import nn


class TextbookAttention(nn.Module):
    """Causal multi-head self-attention: x (batch, length, embed_dim) -> (batch, length, embed_dim)."""

    def __init__(self, embed_dim, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.query = nn.Linear(embed_dim, embed_dim)
        self.key = nn.Linear(embed_dim, embed_dim)
        self.value = nn.Linear(embed_dim, embed_dim)
        self.output = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        batch, length, _ = x.shape
        return x.view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x):
        batch, length, embed_dim = x.shape
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.head_dim)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(2)
        scores = scores.masked_fill(future, float("-inf"))
        weights = self.dropout(scores.softmax(dim=-1))
        merged = (weights @ value).transpose(1, 2).reshape(batch, length, embed_dim)
        return self.output(merged)
