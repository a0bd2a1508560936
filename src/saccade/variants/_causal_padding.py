"""What a mask says to a mechanism that never forms pairs: which tokens are real, and whether time has a direction.

Shape legend: B batch, Lq / Lk numbers of queries and keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._masks import Causal, Mask, Padding, as_mask
from .._masks._algebra import And
from .._masks._placement import At


class CausalPadding(NamedTuple):
    """A mask of `Causal()` and `Padding(...)` taken apart."""

    causal: bool
    rows: Tensor | None  # bool (B or 1, Lq), True = a real query; None: all are. The rows of others are 0.
    keys: Tensor | None  # bool (B or 1, Lk), True = a real key; None: all are


def causal_padding_of(
    mask: Mask | Tensor | None,
    batch: int,
    Lq: int,
    Lk: int,
    device: torch.device,
    name: str,
    reason: str,
    causal: bool | str = True,
) -> CausalPadding:
    """What `mask` shows, for a mechanism called `name` that can honour no other masks, for this `reason`.

    Queries stand bottom-right: query i at position `i + (Lk - Lq)`. Where it cannot be causal, `causal` says why.

    Raises:
        TypeError: not a mask.
        ValueError: a mask of another kind, or one that does not fit these sizes.
    """
    given = as_mask(mask)
    if given is None:
        return CausalPadding(False, None, None)
    taken = "Causal(), Padding(...) and both of them" if causal is True else "Padding(...)"
    directed, rows, keys = False, None, None
    for factor in given.parts if isinstance(given, And) else (given,):
        if isinstance(factor, Causal):
            if causal is not True:
                raise ValueError(f"mask: {name} cannot be causal, since {causal}; got {given!r}")
            directed = True
        elif isinstance(factor, Padding):
            factor.check(batch, 1, Lq, Lk, device)
            sides = factor.sides(Lq, Lk, device)
            rows, keys = _both(rows, sides.rows), _both(keys, sides.keys)
        else:
            raise ValueError(f"mask: {name} takes {taken}, since {reason}; got {factor!r}")
    return CausalPadding(directed, rows, keys)


def real_rows(mask: Mask | Tensor | None, Lq: int, Lk: int, device: torch.device) -> Tensor | None:
    """Which rows are queries, bool (B or 1, Lq), where a mask of any kind holds a `Padding(queries=...)`; None: all.

    For mechanisms on the exact operator, which may do something of their own with each row.
    """
    rows = None
    for factor in _factors(as_mask(mask)):
        if isinstance(factor, Padding) and factor.queries is not None:
            rows = _both(rows, factor.sides(Lq, Lk, device).rows)
    return rows


def _factors(mask: Mask | None) -> list[Mask]:
    if isinstance(mask, At):
        return _factors(mask.part)
    if isinstance(mask, And):
        return [factor for part in mask.parts for factor in _factors(part)]
    return [] if mask is None else [mask]


def zero_padding(features: Tensor, kept: Tensor | None) -> Tensor:
    """(B, H, L, n) with 0 wherever `kept` (B or 1, L) is False, whatever stood there: 0 * NaN would be NaN."""
    return features if kept is None else features.masked_fill(~kept[:, None, :, None], 0.0)


def _both(known: Tensor | None, side: Tensor | None) -> Tensor | None:
    if side is None:
        return known
    side = side[:, 0]
    return side if known is None else known & side
