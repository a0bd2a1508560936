"""Statistics of attention weights, fused in the compiled kernels: one pass over keys, a second one for `received`.

    s_ij = softcap(scale q_i.k_j) + bias_ij     W_i = exp(sink) + sum_j exp s_ij     p_ij = exp(s_ij) / W_i

No weight is stored: memory is O(B Hq (Lq + Lk)). Nothing here knows of autograd.
Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, G groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..._biases import Placement
from ..._call import CheckedCall
from . import _kernels, _run
from ._kernels import KernelSettings, _address, _at, _float, _Scores, _shared, readable

MOST_TOP = 32  # keys kept of each row, at most

# In the order of native/call.h, Statistics::Number.
_NUMBERS = (
    "lse",
    "sink",
    "entropy",
    "largest",
    "smallest",
    "distance",
    "own",
    "previous",
    "next",
    "first",
    "lowest",
    "highest",
)

_OF_HEADS = tuple(map(_NUMBERS.index, ("lse", "smallest", "largest", "lowest", "highest")))


class NativeStatistics(NamedTuple):
    """Statistics of rows, (B, Hq, Lq) float32 unless a comment names another shape; rows that see no key have 0.

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
    top_weights: Tensor | None  # (B, Hq, Lq, top): descending, of equal logits the smaller key first; 0 after the last
    top_keys: Tensor | None  # int64 (B, Hq, Lq, top); -1 after the last key


def refuses(call: CheckedCall, top: int = 0) -> str | None:
    """Why the kernels have no statistics of this call, or None."""
    if (reason := _run.refuses(call)) is not None:
        return reason
    if _run.watched():
        return "a compiler or a dispatch mode is watching, and cannot see the native statistics"
    return None if top <= MOST_TOP else f"the native kernels keep at most {MOST_TOP} keys of each row, and top is {top}"


def filled(
    call: CheckedCall,
    placement: Placement,
    *,
    first: Tensor | None = None,
    groups: Tensor | None = None,
    received: bool = False,
    top: int = 0,
) -> StatisticsMemory:
    """The statistics of a call that `refuses` accepts; its value and its dropout are not used.

    Args:
        placement: row i stands at key index i + placement; an int or one per item (B,).
        first: int64 (B,), one key index per item; -1 or None for none.
        groups: bool (G, B | 1, Lk), which keys belong to each group.
        received: whether `received` is wanted, for which every product is computed once more.
        top: how many keys with the largest weights of each row, at most `MOST_TOP`.
    """
    query, key = readable(call.query.detach()), readable(call.key.detach())
    call = call if call.dropout is None else replace(call, dropout=None)
    settings = KernelSettings.of(call, _run.lowered(call.mask, query, key))
    parameter = None if call.bias is None else call.bias.parameter
    scores, sink = _Scores.of(settings, query, key, parameter), _float(call.sink)
    placed = (placement, None) if isinstance(placement, int) else (0, _per_item(placement, call.batch))
    first = None if first is None else _per_item(first, call.batch)
    groups = None if groups is None else groups.contiguous()
    made = StatisticsMemory(query, key.shape[2], 0 if groups is None else len(groups), received, top)
    _kernels.module.statistics(
        _shared(settings, query, key, key, scores, sink),
        _at(query),
        _at(key),
        placed[0],
        _address(placed[1]),
        _address(first),
        _members(groups, made.groups),
        tuple(map(_address, (made.numbers, *made.places.unbind(0)))),
        (top, _address(made.top_weights), _address(made.top_keys)),
        _address(made.received),
    )
    return made


class NativeRanges(NamedTuple):
    """Ranges and norms of real entries, all of which are finite."""

    of_queries: Tensor  # (8, Hq): min, max and mean norm of queries, min and max of logits, of weights, 0
    of_keys: Tensor  # (7, Hkv): min, max and mean norm of keys, then of values, 0


def head_ranges(call: CheckedCall, rows: tuple[int, ...], keys: Tensor | None, has_value: bool) -> NativeRanges | None:
    """Ranges and norms of each head in one pass; None if a head has an entry that is not finite, or no real entry.

    Args:
        call: one that `refuses` takes.
        rows: addresses of its statistics (B, Hq, Lq): lse, smallest, largest, lowest, highest, nonfinite.
        keys: bool (B | 1, Hkv | 1, Lk), the real ones; None: all are.
        has_value: whether values are looked at.
    """
    tensors = [readable(tensor) for tensor in (call.query, call.key, call.value)[: 2 + has_value]]
    if not all(tensor.numel() for tensor in tensors) or not hasattr(_kernels.module, "head_ranges"):
        return None
    query, key = tensors[:2]
    keys = None if keys is None else keys.contiguous()
    made = NativeRanges(*(query.new_zeros(n, x.shape[1], dtype=torch.float32) for n, x in ((8, query), (7, key))))
    sound = _kernels.module.head_ranges(
        (_kernels.TYPES[query.dtype], torch.get_num_threads()),
        *((tensor.shape, _at(tensor)) for tensor in tensors),
        *(() if has_value else (0,)),
        (0, 0, 0) if keys is None else (keys.data_ptr(), *_steps(keys)),
        rows,
        made.of_queries.data_ptr(),
        made.of_keys.data_ptr(),
    )
    return made if sound else None


def _steps(table: Tensor) -> tuple[int, int]:
    """Strides of items and heads, 0 along broadcast axes."""
    batch, heads, _ = table.shape
    return table.stride(0) if batch > 1 else 0, table.stride(1) if heads > 1 else 0


def _per_item(number: Tensor, batch: int) -> Tensor:
    return number.to(torch.int64).expand(batch).contiguous()


def _members(groups: Tensor | None, mass: Tensor) -> tuple[int, ...]:
    """The arguments of native/bindings.cpp for the groups: their address, number and strides, and that of `mass`."""
    if groups is None:
        return 0, 0, 0, 0, 0
    count, items, keys = groups.shape
    return groups.data_ptr(), count, items * keys, 0 if items == 1 else keys, mass.data_ptr()


class StatisticsMemory:
    """Uninitialised memory that the kernels write to."""

    def __init__(self, query: Tensor, keys: int, groups: int, received: bool, top: int) -> None:
        lead, by_key = query.shape[:3], (*query.shape[:2], keys)

        def numbers(*shape: int) -> Tensor:
            return query.new_empty(shape, dtype=torch.float32)

        def places(*shape: int) -> Tensor:
            return query.new_empty(shape, dtype=torch.int64)

        self.numbers, self.places = numbers(len(_NUMBERS), *lead), places(3, *lead)
        self.groups = numbers(groups, *lead)
        self.received = numbers(*by_key) if received else None
        self.top_weights = numbers(*lead, top) if top else None
        self.top_keys = places(*lead, top) if top else None

    def rows(self) -> tuple[int, ...]:
        """The addresses that `head_ranges` takes."""
        start, step = self.numbers.data_ptr(), 4 * self.numbers.stride(0)
        return *(start + n * step for n in _OF_HEADS), self.places.data_ptr() + 8 * self.places.stride(0)

    def named(self) -> NativeStatistics:
        numbers = dict(zip(_NUMBERS, self.numbers.unbind(0), strict=True))
        largest_at, nonfinite, nonfinite_at = self.places.unbind(0)
        return NativeStatistics(
            **numbers,
            largest_at=largest_at,
            nonfinite=nonfinite,
            nonfinite_at=nonfinite_at,
            groups=self.groups,
            received=self.received,
            top_weights=self.top_weights,
            top_keys=self.top_keys,
        )
