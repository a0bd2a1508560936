"""Twenty score functions and three mask functions of FlexAttention's kind, from their formulas, for `flex.py`.

Functions are made for a length L, H heads and a batch of 1; what they capture is float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

HEADS, WIDE = 4, 64  # heads; columns of the picture that `natten` sees
HIDDEN = -math.inf
ScoreMod = Callable[..., Tensor]
# Operations for each score, loads included, of functions that are short: these should keep the chip busy.
SHORT = frozenset(("identity", "times two", "head offset", "alibi", "by key", "inverse causal", "causal", "squared"))


def plain(length: int) -> dict[str, ScoreMod]:
    """Functions of the score and the indices, without tensors."""
    return {
        "identity": lambda score, b, h, q, k: score,
        "times two": lambda score, b, h, q, k: score * 2,
        "squared": lambda score, b, h, q, k: score * score,
        "trig": lambda score, b, h, q, k: torch.sin(score) + torch.cos(score),
        "causal": lambda score, b, h, q, k: torch.where(q >= k, score, HIDDEN),
        "inverse causal": lambda score, b, h, q, k: torch.where(q <= k, score, HIDDEN),
        "distance": lambda score, b, h, q, k: score + (q - k),
        "softcap": lambda score, b, h, q, k: 20.0 * torch.tanh(score / 20.0),
        "sigmoid gate": lambda score, b, h, q, k: score * torch.sigmoid(score),
        "dilated": lambda score, b, h, q, k: torch.where((q - k) % 4 == 0, score, HIDDEN),
        "natten": lambda score, b, h, q, k: torch.where(
            ((q // WIDE - k // WIDE).abs() <= 3) & ((q % WIDE - k % WIDE).abs() <= 3), score, HIDDEN
        ),
        "stick": lambda score, b, h, q, k: torch.where(q > k, -torch.log1p(torch.exp(-score)), HIDDEN),
        "temperature": lambda score, b, h, q, k: score / torch.sqrt(1.0 + 0.01 * (q + 1)),
    }


def learned(length: int) -> dict[str, ScoreMod]:
    """Functions that read tensors: gradients reach those of floats."""
    offset, slopes = (torch.randn(HEADS, requires_grad=True) for _ in range(2))
    near = torch.randn(HEADS, 2 * length, requires_grad=True)
    by_key = torch.randn(1, length, requires_grad=True)
    ids = torch.arange(length) // max(length // 16, 1)
    prefix = torch.tensor([length // 4])

    def jagged(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inside = (ids[q] == ids[k]) & (q >= k)
        return torch.where(inside, score + offset[h] * (q - k), HIDDEN)

    return {
        "head offset": lambda score, b, h, q, k: score + offset[h],
        "alibi": lambda score, b, h, q, k: score - slopes[h] * (q - k).abs(),
        "relative": lambda score, b, h, q, k: score + near[h, q - k + length],
        "by key": lambda score, b, h, q, k: score + by_key[b, k],
        "documents": lambda score, b, h, q, k: torch.where(ids[q] == ids[k], score, HIDDEN),
        "prefix": lambda score, b, h, q, k: torch.where((k <= q) | (k < prefix[b]), score, HIDDEN),
        "jagged": jagged,
    }


def score_functions(length: int) -> dict[str, ScoreMod]:
    return {**plain(length), **learned(length)}


def mask_functions(length: int) -> dict[str, Callable[..., Tensor]]:
    ids, prefix = torch.arange(length) // max(length // 16, 1), length // 4
    return {
        "window": lambda b, h, q, k: (q >= k) & (q - k <= 256),
        "documents": lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]),
        "prefix": lambda b, h, q, k: (q >= k) | (k < prefix),
    }


def ten_operations(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """An arbitrary program of ten operations, none of them recognised."""
    apart = (q - k).abs().float()
    return torch.maximum(score * 1.25 + 0.5, apart * 0.125 - score) - torch.minimum(score, apart * 0.25)
