"""Score functions and mask functions as people write them for FlexAttention, from their formulas; and PyTorch's answer.

B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv widths: distinct primes, but for Hq.
"""

from __future__ import annotations

import math

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import noop_mask

B, HQ, HKV, LQ, LK, D, DV = 2, 6, 3, 37, 41, 7, 5
FURTHEST = 257  # positions that mask functions hold for
WIDE = 11  # columns of the picture that natten sees


def qkv(dtype=torch.float64, seed=0, heads=(HQ, HKV), lengths=(LQ, LK), batch=B):
    make = torch.Generator().manual_seed(seed)
    shapes = (batch, heads[0], lengths[0], D), (batch, heads[1], lengths[1], D), (batch, heads[1], lengths[1], DV)
    return [torch.randn(shape, generator=make, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def table(*shape, seed=7, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def documents(length, batch=1):
    """Ids that rise, of documents of unequal lengths."""
    starts = torch.tensor([0, 5, 6, 19, 30])
    ids = torch.searchsorted(starts, torch.arange(length), right=True) - 1
    return ids if batch == 1 else torch.stack([torch.roll(ids, 3 * item).sort().values for item in range(batch)])


def score_functions(dtype=torch.float64, lengths=(LQ, LK)):
    """{name: (function, captured tensors that are learned)}."""
    bias, slopes, items = table(HQ, seed=1), table(HQ, seed=2).abs(), table(B, HQ, seed=3)
    near, far = table(HQ, sum(lengths), seed=4), table(B, *lengths, seed=5)
    by_key, gate = table(B, lengths[1], seed=6), table(HQ, seed=8)
    learned = [tensor.to(dtype).requires_grad_() for tensor in (bias, slopes, items, near, far, by_key, gate)]
    bias, slopes, items, near, far, by_key, gate = learned
    ids, prefix = documents(max(lengths)), torch.tensor([5, 13])
    offsets = torch.tensor([0, 5, 6, 19, 30])
    hidden = -math.inf

    def relative(score, b, h, q, k):
        return score + near[h, q - k + lengths[1]]

    def alibi(score, b, h, q, k):
        return score - slopes[h] * (q - k).abs()

    def softcap(score, b, h, q, k):
        return 3.0 * torch.tanh(score / 3.0)

    def natten(score, b, h, q, k):
        down, across = (q // WIDE - k // WIDE).abs(), (q % WIDE - k % WIDE).abs()
        return torch.where((down <= 1) & (across <= 2), score, hidden)

    def stick(score, b, h, q, k):
        return torch.where(k <= q, -torch.log1p(torch.exp(-score)) - gate[h] * torch.sigmoid(score) * (q - k), hidden)

    def dilated(score, b, h, q, k):
        return torch.where((q - k) % 3 == 0, score, hidden)

    def document(score, b, h, q, k):
        return torch.where(ids[q] == ids[k], score, hidden)

    def prefix_lm(score, b, h, q, k):
        return torch.where((k <= q) | (k < prefix[b]), score, hidden)

    def jagged(score, b, h, q, k):
        here = q - offsets[ids[q]], k - offsets[ids[k]]
        return torch.where((ids[q] == ids[k]) & (here[0] >= here[1]), score + bias[h] * here[1], hidden)

    def pairs(score, b, h, q, k):
        return score * torch.sigmoid(far[b, q, k]) + by_key[b, k]

    def clipped(score, b, h, q, k):
        return torch.clamp(score + bias[h], min=-0.5, max=0.75) + torch.minimum(score, items[b, h])

    functions = {
        "times two": lambda score, b, h, q, k: score * 2,
        "squared": lambda score, b, h, q, k: score * score,
        "trig": lambda score, b, h, q, k: torch.sin(score) + 0.5 * torch.cos(score * bias[h]),
        "head offset": lambda score, b, h, q, k: score + 2 * h - bias[h],
        "inverse causal": lambda score, b, h, q, k: torch.where(q <= k, score, hidden),
        "per item": lambda score, b, h, q, k: score + items[b, h],
        "distance by hand": lambda score, b, h, q, k: score + (q - k) / 8,
        "temperature": lambda score, b, h, q, k: score / torch.sqrt(1.0 + slopes[h] * (q + 1)),
        "by key": lambda score, b, h, q, k: score + by_key[b, k],
    }
    named = (relative, alibi, softcap, natten, stick, dilated, document, prefix_lm, jagged, pairs, clipped)
    functions |= {function.__name__: function for function in named}
    return {name: (function, learned) for name, function in functions.items()}


def mask_functions():
    """{name: function}, of (b, h, q_idx, kv_idx)."""
    ids, lengths, prefix = documents(FURTHEST), torch.tensor([31, 41]), torch.tensor([5, 13])
    return {
        "causal": lambda b, h, q, k: q >= k,
        "window": lambda b, h, q, k: (q >= k) & (q - k <= 11),
        "documents": lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k),
        "padding": lambda b, h, q, k: k < lengths[b],
        "prefix": lambda b, h, q, k: (k < prefix[b]) | (q >= k),
        "dilated": lambda b, h, q, k: (q - k) % 3 == 0,
        "by head": lambda b, h, q, k: (q - k).abs() <= 2 * h,
        "nothing for some": lambda b, h, q, k: (k <= q) & (q >= 7),
        "natten": lambda b, h, q, k: ((q // WIDE - k // WIDE).abs() <= 1) & ((q % WIDE - k % WIDE).abs() <= 2),
    }


def theirs(query, key, value, score_mod=None, mask_mod=None, scale=None):
    """out, lse and max_scores of PyTorch's eager code, which forms all scores."""

    def identity(score, b, h, q, k):
        return score

    block_mask = (None, mask_mod or noop_mask)  # of which this code reads the function alone
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    with TransformGetItemToIndex():
        out, lse, top = math_attention(query, key, value, score_mod or identity, block_mask, scale, {})
    return out, lse * math.log(2), top * math.log(2)
