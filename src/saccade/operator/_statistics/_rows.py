"""The result of every backend: numbers per row (and per key) of one call, before they are combined.

Shape legend: B items, Hq query heads, Lq / Lk lengths, G named groups, p_ij weights, s_ij logits (bias included).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


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
