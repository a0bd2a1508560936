import math

import torch


def repeat_kv(x, n_rep):
    """(batch, kv_heads, length, dim) -> (batch, kv_heads * n_rep, length, dim)"""
    batch, kv_heads, length, dim = x.shape
    if n_rep == 1:
        return x
    x = x[:, :, None, :, :].expand(batch, kv_heads, n_rep, length, dim)
    return x.reshape(batch, kv_heads * n_rep, length, dim)


def grouped_query_attention(q, k, v, mask=None):
    """q: (batch, heads, length, dim); k, v: (batch, kv_heads, length, dim). mask: True = may attend."""
    n_rep = q.shape[1] // k.shape[1]
    k = repeat_kv(k, n_rep)
    v = repeat_kv(v, n_rep)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), float("-inf"))
    weights = torch.softmax(scores.float(), dim=-1).to(q.dtype)
    return weights @ v
