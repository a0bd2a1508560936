import math

import torch
import torch.nn.functional as F


def scaled_dot_product_attention(q, k, v, mask=None):
    """Attention(Q, K, V) = softmax(QK^T / sqrt(d_k)) V

    q: (batch, heads, q_len, d_k), k: (batch, heads, k_len, d_k), v: (batch, heads, k_len, d_v)
    mask: broadcastable to (batch, heads, q_len, k_len), True where attention is allowed
    """
    d_k = q.size(-1)
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    attention = F.softmax(scores, dim=-1)
    values = torch.matmul(attention, v)
    return values, attention
