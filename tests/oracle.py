"""Attention straight from its formula, in float64, one set of keys at a time: the judge of every backend.

Nothing here comes from saccade. A query sees a *set* of keys; the sums run over that set and nothing else is read,
so a NaN where a query may not look cannot arrive, forward or backward. Everything but `see` is differentiable.
Queries that see the same set stand beside each other in one tensor, and share nothing else: no product sums over them.

B batch, Hq/Hkv query/kv heads, Lq/Lk lengths, D key width, Dv value width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Attended(NamedTuple):
    out: Tensor  # (B, Hq, Lq, Dv)
    lse: Tensor  # (B, Hq, Lq), natural logarithm, the sink counted
    weights: Tensor  # (B, Hq, Lq, Lk), rows sum to one less the sink's share


def attend(query, key, value, see=None, *, bias=None, scale=None, softcap=None, sink=None, factor=None) -> Attended:
    """`softmax(softcap(scale * q.k) + bias)` over the keys seen, times values.

    see: bool array broadcastable to (B, Hq, Lq, Lk), True = attend. bias: dense tensor, likewise; -inf hides a key.
    sink: (Hq,), one more logit in the denominator. factor: (B, Hq, Lq, Lk), what dropout multiplies each weight by.
    """
    query, key, value = query.double(), key.double(), value.double()
    (batch, heads, rows, width), (_, kv_heads, keys, _) = query.shape, key.shape
    full = (batch, heads, rows, keys)
    see = np.broadcast_to(np.asarray(True if see is None else see), full)
    bias = torch.zeros(full, dtype=torch.float64) if bias is None else bias.double().expand(full)
    seen = see & (bias.detach().numpy() != -math.inf)
    scale = width**-0.5 if scale is None else scale
    group, flat = heads // kv_heads, batch * heads * rows
    queries, biases = query.reshape(flat, width), bias.reshape(flat, keys)
    factors = None if factor is None else factor.expand(full).reshape(flat, keys)
    sinks = None if sink is None else sink.double()[None, :, None].expand(full[:3]).reshape(flat)
    order, out, lse, weights = [], [], [], []
    for own, js in sets(seen.reshape(flat, keys)):
        theirs = own // (heads * rows), own // rows % heads // group  # the item and the key head of each query
        logits = scale * (queries[own][:, None] * key[theirs][:, js]).sum(-1)  # (queries, keys of the set)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits + biases[own][:, js]
        shares, total = _softmax(logits, None if sinks is None else sinks[own])
        kept = shares if factors is None else shares * factors[own][:, js]
        order.append(own)
        out.append((kept[:, :, None] * value[theirs][:, js]).sum(1))
        lse.append(total)
        weights.append(torch.zeros(len(own), keys, dtype=torch.float64).index_copy(1, js, shares))
    place = torch.cat(order).argsort() if order else None
    return Attended(
        _grid(out, place, (batch, heads, rows, value.shape[-1])),
        _grid(lse, place, (batch, heads, rows)),
        _grid(weights, place, full),
    )


def sets(seen: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries that see the same keys, and those keys, of a bool array (queries, Lk)."""
    queries: dict[bytes, list[int]] = {}
    for n, sees in enumerate(seen):
        queries.setdefault(sees.tobytes(), []).append(n)
    for sees, own in queries.items():
        js = torch.from_numpy(np.flatnonzero(np.frombuffer(sees, dtype=bool)))
        for some in torch.tensor(own).split(max(1, 2**14 // (len(js) + 1))):  # so that their products stay in the cache
            yield some, js


def _softmax(logits: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """The shares of each row's logits in `sum exp(logits) + exp(sink)`, and its logarithm."""
    terms = logits if sink is None else torch.cat([logits, sink[:, None]], 1)
    if terms.shape[1] == 0:
        return logits, torch.full((len(logits),), -math.inf, dtype=torch.float64)
    top = terms.detach().amax(1, keepdim=True)
    total = torch.exp(terms - top).sum(1, keepdim=True)
    return torch.exp(logits - top) / total, (top + torch.log(total))[:, 0]


def _grid(parts: list[Tensor], place: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64) if place is None else torch.cat(parts)[place].reshape(shape)


# Who sees whom, from the definitions. Position of query i: i + offset, offset Lk - Lq (bottom-right) unless placed.


def pairs(rows: int, keys: int, rule, offset=None) -> np.ndarray:
    """bool (1 or B, 1, rows, keys) of `rule(position, j)`; offset: None, an int, or one per batch item."""
    offsets = [keys - rows] if offset is None else np.atleast_1d(np.asarray(offset)).tolist()
    table = [[[bool(rule(i + o, j)) for j in range(keys)] for i in range(rows)] for o in offsets]
    return np.array(table, dtype=bool).reshape(len(offsets), 1, rows, keys)


def causal(rows: int, keys: int, offset=None) -> np.ndarray:
    return pairs(rows, keys, lambda p, j: j <= p, offset)


def window(rows: int, keys: int, left, right, offset=None) -> np.ndarray:
    low = math.inf if left is None else left
    high = math.inf if right is None else right
    return pairs(rows, keys, lambda p, j: -low <= j - p <= high, offset)


def key_lengths(lengths, keys: int) -> np.ndarray:
    """bool (B, 1, 1, keys): key j of item b is there when j < lengths[b]."""
    return np.array([[j < n for j in range(keys)] for n in lengths], dtype=bool)[:, None, None, :]


def query_lengths(lengths, rows: int) -> np.ndarray:
    """bool (B, 1, rows, 1)."""
    return np.array([[i < n for i in range(rows)] for n in lengths], dtype=bool)[:, None, :, None]


def same_document(ids) -> np.ndarray:
    """bool (B, 1, L, L) from ids (B, L)."""
    return np.array([[[a == b for b in line] for a in line] for line in np.asarray(ids).tolist()])[:, None]


def alibi(slopes: Tensor, rows: int, keys: int, offset=None) -> Tensor:
    """Dense (1, Hq, rows, keys) of `-slope_h * |position(i) - j|` (Press et al. 2022)."""
    offset = keys - rows if offset is None else offset
    distance = [[abs(i + offset - j) for j in range(keys)] for i in range(rows)]
    return -slopes.double()[None, :, None, None] * torch.tensor(distance, dtype=torch.float64)


@functools.cache
def t5_bucket(relative: int, buckets: int, bidirectional: bool, max_distance: int) -> int:
    """Bucket of `j - position(i)` (Raffel et al. 2020, section 2.1): half of them exact, the rest logarithmic.

    The logarithm is compared in whole numbers, `log(d/e) / log(m/e) >= k/n` as `d^n e^k >= m^k e^n`: no rounding.
    """
    base = 0
    if bidirectional:
        buckets //= 2
        base = buckets if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = max(0, -relative)
    exact = buckets // 2
    if distance < exact:
        return base + distance
    n = buckets - exact
    reached = [k for k in range(n) if distance**n * exact**k >= max_distance**k * exact**n]
    return base + exact + max(reached)


def relative_bias(table: Tensor, rows: int, keys: int, bidirectional: bool, max_distance: int, offset=None) -> Tensor:
    """Dense (1, Hq, rows, keys) of `table[bucket, h]`."""
    offset = keys - rows if offset is None else offset
    distances = range(1 - rows - offset, keys - offset)  # j - i - offset
    buckets = torch.tensor(
        [t5_bucket(d, len(table), bidirectional, max_distance) for d in distances], dtype=torch.int64
    )
    index = buckets[torch.arange(keys) - torch.arange(rows)[:, None] + rows - 1]
    return table.double()[index].permute(2, 0, 1)[None]
