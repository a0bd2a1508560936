"""Which keys any query may see, without forming Lq x Lk, and which queries see none."""

from __future__ import annotations

from collections.abc import Hashable
from functools import reduce

import torch
from torch import Tensor

from ._algebra import And
from ._data import Subset
from ._intervals import Kind, Region, Span
from ._mask import Mask
from ._padding import Padding
from ._placement import At, Slice

_DIRECT = 1 << 18  # pairs that are simply looked at, all at once
_ROWS, _KEYS = 256, 1024
_COUNTED = 1 << 22  # pairs that are looked at for rows without keys: a few milliseconds


def keys_seen(mask: Mask | None, Lq: int, Lk: int, *, device: torch.device | str | None = None) -> Tensor | None:
    """The keys that some query may attend to: bool (B or 1, H or 1, Lk), or None where that is every key.

    Answered from the structure for causal, padding and their combinations with anything that lets a position see
    itself; otherwise tile by tile, skipping what is empty or full.
    """
    if Lk == 0 or (mask is None and Lq):
        return None
    if mask is None:
        return torch.zeros(1, 1, Lk, dtype=torch.bool, device=device)
    mask, place = mask._settled(Lq, Lk, device)
    if isinstance(mask, Padding):
        return mask.sides(Lq, Lk, place).keys
    parts = _factors(mask)
    by_key = [part for part in parts if part.by_key]
    rest = [part for part in parts if not part.by_key]
    if Lq == Lk and all(part.sees_itself or _repeats(part, by_key) for part in rest):
        rest = []
    found = [_one_row(part, 0, Lq, Lk, place) for part in by_key] if Lq else []
    if rest or not Lq:
        seen = _seen(And.of(*rest) if rest else mask, Lq, Lk, place)
        found += [] if seen is None else [seen]
    return reduce(torch.logical_and, found) if found else None


def empty_rows(mask: Mask, Lq: int, Lk: int) -> tuple[int, int]:
    """The number of rows that see no key, and the number of all rows, over the batch items and heads for which the mask
    differs.

    (0, 0) if counting them would take long.
    """
    batch, heads = mask._batch_and_heads()
    rows = batch * heads * Lq
    if mask.kind((0, Lq), (0, Lk), Lq, Lk) == "empty":
        return rows, rows
    if rows * Lk > _COUNTED:
        return 0, 0
    seen = mask.dense(Lq, Lk).any(-1).expand(batch, heads, Lq)
    return rows - int(seen.sum()), rows


def _factors(mask: Mask) -> list[Mask]:
    """Masks whose intersection is `mask`, with .at and .slice carried into them."""
    if isinstance(mask, And):
        return [factor for part in mask.parts for factor in _factors(part)]
    if isinstance(mask, At):
        return [
            part if isinstance(part, _RealRows) or part.by_key else At(part, mask.offset)
            for part in _factors(mask.part)
        ]
    if isinstance(mask, Slice):
        return [Slice(part, mask.rows, mask.keys, mask.lengths) for part in _factors(mask.part)]
    if isinstance(mask, Padding) and mask.queries is not None:
        return [mask.replaced(queries=None), _RealRows(mask.queries)]
    return [mask]


class _RealRows(Mask):
    """The rows that `Padding(queries=...)` marks as real."""

    queries: Subset
    positional = False

    def __init__(self, queries: Subset):
        self._set(queries=queries)

    def _own_batch_and_heads(self) -> tuple[int, int]:
        return self.queries.batch, 1

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        return self.queries.contains(b, row)

    def region_kind(self, region: Region) -> Kind:
        return self.queries.kind(region.rows, region.item)

    def _value(self) -> tuple[Hashable, ...]:
        return (self.queries,)


def _repeats(mask: Mask, by_key: list[Mask]) -> bool:
    """Whether the mask keeps the same tokens as rows and as keys: then each kept key has a kept row."""
    return isinstance(mask, _RealRows) and any(
        isinstance(part, Padding) and part.keys == mask.queries for part in by_key
    )


def _seen(mask: Mask, Lq: int, Lk: int, place: torch.device) -> Tensor | None:
    if (0 < Lk <= Lq and mask.sees_itself) or mask.kind((max(Lq - 1, 0), Lq), (0, Lk), Lq, Lk) == "full":
        return None
    if Lq and mask.widens:
        return _one_row(mask, Lq - 1, Lq, Lk, place)
    return _scan(mask, Lq, Lk, place)


def _one_row(mask: Mask, row: int, Lq: int, Lk: int, place: torch.device) -> Tensor:
    rows = torch.full((1,), row, device=place)
    return mask._grid(rows, torch.arange(Lk, device=place), Lq, Lk)[:, :, 0]


def _scan(mask: Mask, Lq: int, Lk: int, place: torch.device) -> Tensor:
    """Reduce the mask over its rows, tile by tile."""
    batch, heads = mask._batch_and_heads()
    found = torch.zeros(batch, heads, Lk, dtype=torch.bool, device=place)
    if batch * heads * Lq * Lk <= _DIRECT:
        bits = mask._grid(torch.arange(Lq, device=place), torch.arange(Lk, device=place), Lq, Lk)
        return found | bits.any(2)
    for start in range(0, Lk, _KEYS):
        _reduce(mask, found, (start, min(start + _KEYS, Lk)), Lq, Lk)
    return found


def _reduce(mask: Mask, tensor: Tensor, keys: Span, Lq: int, Lk: int) -> None:
    """Mark in `tensor[..., keys]` the keys that some row sees, in tiles from the diagonal outwards."""
    middle = keys[0] - (Lk - Lq)
    part = tensor[..., keys[0] : keys[1]]
    for start in sorted(range(0, Lq, _ROWS), key=lambda at: abs(at - middle)):
        rows = (start, min(start + _ROWS, Lq))
        kind = mask.kind(rows, keys, Lq, Lk)
        if kind == "full":
            part.fill_(True)
        elif kind == "partial":
            indices = (torch.arange(*rows, device=tensor.device), torch.arange(*keys, device=tensor.device))
            part |= mask._grid(*indices, Lq, Lk).any(2)
        # On an accelerator the question whether to stop would cost more than the work that it saves.
        if kind == "full" or (kind == "partial" and tensor.device.type == "cpu" and part.all()):
            return
