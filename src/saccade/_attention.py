from __future__ import annotations

import torch.nn.functional as F


def attention(query, key, value, mask=None, *, bias=None, scale=None, softcap=None, sink=None, dropout=0.0, backend="auto"):
    causal = mask is not None and type(mask).__name__ == "Causal" and query.shape[2] > 1
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
