import math

import torch
import torch.nn as nn


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=256):
        super().__init__()
        pe = torch.zeros(max_len, d_model)
        position = torch.arange(0, max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * -(math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0))

    def forward(self, x):
        return x + self.pe[:, : x.size(1)]


class EncoderBlock(nn.Module):
    def __init__(self, d_model=32, n_heads=4, d_ff=64, dropout=0.1):
        super().__init__()
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.positions = PositionalEncoding(d_model)
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def split_heads(self, x):
        batch_size, seq_len, _ = x.size()
        return x.view(batch_size, seq_len, self.n_heads, self.d_head).transpose(1, 2)

    def forward(self, x, src_key_padding_mask=None):
        """x: (batch, seq, d_model); src_key_padding_mask: (batch, seq), True where x is padding"""
        batch_size, seq_len, d_model = x.size()
        x = self.positions(x)
        Q = self.split_heads(self.W_q(x))
        K = self.split_heads(self.W_k(x))
        V = self.split_heads(self.W_v(x))
        scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(self.d_head)
        if src_key_padding_mask is not None:
            hidden = src_key_padding_mask[:, None, None, :]
            scores = scores.masked_fill(hidden, -1e4)
        attn = torch.softmax(scores, dim=-1)
        attn = self.dropout(attn)
        heads = torch.matmul(attn, V)
        concat = heads.transpose(1, 2).contiguous().view(batch_size, seq_len, d_model)
        x = self.norm1(x + self.dropout(self.W_o(concat)))
        x = self.norm2(x + self.dropout(self.ff(x)))
        return x
