"""Statistics of attention weights, fused in the compiled kernels: one pass over keys, a second one for `received`.

    s_ij = softcap(scale q_i.k_j) + bias_ij     W_i = exp(sink) + sum_j exp s_ij     p_ij = exp(s_ij) / W_i

No weight is stored: memory is O(B Hq (Lq + Lk)). Nothing here knows of autograd.
Shapes: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, G groups.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._biases import Placement
from .._call import Call
from . import native

MOST_TOP = 32  # keys kept of each row, at most


class NativeStatistics(NamedTuple):
    """(B, Hq, Lq) float32 where nothing else is said; rows that see no key hold 0.

    p is before dropout; keys that a mask or a bias of -inf hides have no weight and no logit. Of a row with a visible
    logit of NaN or +inf every number over weights is NaN, as softmax has it; a visible -inf is a weight of 0.
    """

    lse: Tensor  # natural log of sum_j exp s_ij, WITHOUT the sink; -inf on rows that see no key
    sink: Tensor  # the sink's share of the denominator, exp(sink) / W_i; 0 without a sink
    entropy: Tensor  # -sum_j p_ij log p_ij, nats, at least 0
    largest: Tensor  # max_j p_ij
    largest_at: Tensor  # int64: the first key with the largest logit; -1 on rows that see no key, `nonfinite_at` on NaN
    smallest: Tensor  # min_j p_ij over visible keys
    distance: Tensor  # sum_j p_ij |i + placement - j|
    own: Tensor  # p_ij of j = i + placement; 0 where that is no key or not visible, as in the next three
    previous: Tensor  # of j = i + placement - 1
    next: Tensor  # of j = i + placement + 1
    first: Tensor  # of j = first[b]
    lowest: Tensor  # smallest and largest finite logit s_ij over visible keys; +inf and -inf where there is none
    highest: Tensor
    nonfinite: Tensor  # int64: how many visible logits are NaN or infinite
    nonfinite_at: Tensor  # int64: the first key with such a logit, or -1
    groups: Tensor  # (G, B, Hq, Lq): sum over the group's keys of p_ij
    received: Tensor | None  # (B, Hq, Lk): sum_i p_ij
    top_weights: (
        Tensor | None
    )  # (B, Hq, Lq, top): descending, of equal logits the smaller key first; 0 after the last key
    top_keys: Tensor | None  # int64 (B, Hq, Lq, top); -1 after the last key


def refuses(call: Call, top: int = 0) -> str | None:
    """Why the kernels have no statistics of this call, or None."""
    return native.refuses(call) or "this native build has no statistics"


def run(
    call: Call, placement: Placement, *, first: Tensor | None = None, groups: Tensor | None = None,
    received: bool = False, top: int = 0,
) -> NativeStatistics:  # fmt: skip
    """The statistics of a call that `refuses` takes; its value and its dropout are not looked at.

    Args:
        placement: row i stands at key index i + placement; an int or one per item (B,).
        first: int64 (B,), one key index per item; -1 or None for none.
        groups: bool (G, B | 1, Lk), which keys belong to each group.
        top: how many keys with the largest weights of each row, at most `MOST_TOP`.
    """
    raise NotImplementedError
