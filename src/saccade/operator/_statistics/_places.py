"""The places of a call's rows among its keys, and the rows that are not tokens.

Shape legend: B items, Lq rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._biases import Placement
from .._call import CheckedCall, _stands_at
from .._masks import Mask, Padding
from .._masks._algebra import And
from .._masks._placement import At, Slice


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
