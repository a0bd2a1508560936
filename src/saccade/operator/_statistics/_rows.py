"""The result of every backend: numbers per row (and per key) of one call, before they are combined.

Below: the places of rows among the keys, and the rows that are not tokens.

Shape legend: B items, Hq query heads, Lq / Lk lengths, G named groups, p_ij weights, s_ij logits (bias included).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .._biases import Placement
from .._call import CheckedCall, _stands_at
from .._masks import Mask, Padding
from .._masks._algebra import And
from .._masks._placement import At, Slice


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of rows, (B, Hq, Lq) unless a comment names another shape. Rows that see no key have 0, key -1, and
    lse = -inf."""

    lse: Tensor  # the sink counted
    entropy: Tensor
    largest: Tensor
    largest_at: Tensor
    smallest: Tensor  # the smallest weight among the keys seen
    distance: Tensor
    mass: dict[str, Tensor]  # self, previous, next, first, sink, then the groups
    low: Tensor  # the least finite logit, +inf where there is none
    high: Tensor  # the greatest, -inf
    bad: Tensor  # int64, how many logits are not finite
    bad_at: Tensor  # int64, the first key of them, -1
    top_weights: Tensor  # (B, Hq, Lq, top)
    top_keys: Tensor
    pivot: Tensor | None  # p_ij = exp((s_ij - pivot_i) - rest_i), more exact than exp(s_ij - lse_i) where lse is large;
    rest: Tensor  # None: 0
    received: Tensor | None = None  # (B, Hq, Lk)


def joined(parts: list[RowStatistics], dim: int) -> RowStatistics:
    """Rows one after another (dim 2) or items (dim 0)."""
    if len(parts) == 1:
        return parts[0]
    columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(RowStatistics)}
    return RowStatistics(**{name: _joined(column, dim) for name, column in columns.items()})


def _joined(column: list[Any], dim: int) -> Any:
    if isinstance(column[0], dict):
        return {name: torch.cat([part[name] for part in column], dim) for name in column[0]}
    return None if column[0] is None else torch.cat(column, dim)


def standing(call: CheckedCall) -> Placement:
    """The placement of the queries: row i is at key index `i + result`, by the mask, else by the bias, else
    bottom-right."""
    bias = None if call.bias is None else call.bias.offset
    found = _stands_at(call.mask, None if bias is not None else call.length_k - call.length_q, call.device)
    if found is not None:
        return found
    if bias is None:
        raise ValueError("mask: a slice without the positions of its queries; pass mask.slice(..., lengths=(Lq, Lk))")
    return bias


def positions(rows: Tensor, placement: Placement) -> Tensor:
    """Key index of each row (r,) of each item: int64 (B|1, r)."""
    return rows[None] + (placement if isinstance(placement, int) else placement.to(rows.device)[:, None])


def padded_rows(mask: Mask | None, length: int, device: torch.device) -> Tensor:
    """Rows that `Padding(queries=...)` marks as padding, bool (B|1, 1, Lq|1)."""
    found = _padded(mask, 0, length, device)
    return torch.zeros(1, 1, 1, dtype=torch.bool, device=device) if found is None else found[:, None]


def _padded(mask: Mask | None, start: int, length: int, device: torch.device) -> Tensor | None:
    """(B|1, length): padding among the rows `start`, `start + 1`, ...; None if the mask marks no padded rows."""
    if isinstance(mask, Padding) and mask.queries is not None:
        rows = torch.arange(start, start + length, device=device)
        items = torch.arange(mask.queries.batch, device=device)
        return ~mask.queries.contains(items[:, None], rows[None])
    if isinstance(mask, At):
        return _padded(mask.part, start, length, device)
    if isinstance(mask, Slice):
        return _padded(mask.part, start + mask.rows[0], length, device)
    found = [_padded(part, start, length, device) for part in mask.parts] if isinstance(mask, And) else []
    some = [rows for rows in found if rows is not None]
    return None if not some else some[0] if len(some) == 1 else torch.stack(torch.broadcast_tensors(*some)).any(0)
