"""Where the rows of a call stand among its keys, and which of its rows and keys are real.

Shape legend: B items, H heads, Lq / Lk lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._biases import Placement, TensorBias
from .._call import Call, _stands_at
from .._masks import Mask, Padding, keys_seen
from .._masks._algebra import And
from .._masks._placement import At, Slice


def standing(call: Call) -> Placement:
    """Row i stands at key index `i + standing`: by the mask's placement, else the bias's, else bottom-right."""
    unplaced: Placement | None = call.length_k - call.length_q
    if call.bias is not None and call.bias.offset is not None and _stands_at(call.mask, None, call.device) is None:
        return call.bias.offset
    assert isinstance(unplaced, int)
    found = _stands_at(call.mask, unplaced, call.device)
    if found is None:
        raise ValueError(
            "mask: the mask is a slice that does not say where its queries stand; give mask.slice(..., lengths=(Lq, Lk))"
        )
    return found


def positions(rows: Tensor, placement: Placement) -> Tensor:
    """Key index of each row (r,) of each item: int64 (B|1, r)."""
    return rows[None] + (placement if isinstance(placement, int) else placement.to(rows.device)[:, None])


def padded_rows(mask: Mask | None, length: int, device: torch.device) -> Tensor:
    """Rows that a `Padding(queries=...)` says are no tokens, bool (B|1, 1, Lq)."""
    found = _padded(mask, 0, length, device)
    return torch.zeros(1, 1, length, dtype=torch.bool, device=device) if found is None else found[:, None]


def _padded(mask: Mask | None, start: int, length: int, device: torch.device) -> Tensor | None:
    """(B|1, length) of rows `start`, `start + 1`, ...; None where no part of the intersection speaks of rows."""
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


def real_keys(call: Call) -> Tensor | None:
    """Keys that some row sees, bool (B|1, H|1, Lk); None where that is every key.

    A bias tensor's -inf hides what it hides from all rows.
    """
    by_mask = keys_seen(call.mask, call.length_q, call.length_k, device=call.device)
    bias = call.bias.parameter if isinstance(call.bias, TensorBias) else None
    if bias is None or not call.length_q:
        return by_mask
    allowed = (bias.detach() != float("-inf")).any(2).expand(-1, -1, call.length_k)
    return allowed if by_mask is None else by_mask & allowed


def first_key(call: Call, keys: Tensor | None) -> Tensor:
    """The first key of each item that some row of it sees, int64 (B|1,); 0 where there is none."""
    if keys is None or not call.length_k:
        return torch.zeros(1, dtype=torch.int64, device=call.device)
    return keys.any(1).to(torch.uint8).argmax(1)
