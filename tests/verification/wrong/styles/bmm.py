import math

import torch


def dot_product_attention(query, key, value, key_padding_mask=None):
    """query, key, value: (B, T, C). key_padding_mask: (B, S), True at the padding."""
    scores = torch.bmm(query / math.sqrt(query.size(-1)), key.transpose(1, 2))
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask.unsqueeze(1), torch.finfo(scores.dtype).min)
    attn = torch.softmax(scores, dim=2)
    return torch.bmm(attn, value)
