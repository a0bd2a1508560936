"""The heads of a call and the items of the batch that an edit applies to.

Shape legend: B batch, Hq query heads, Lq / Lk lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...operator._call import AttentionCall
from ...operator._masks import Columns, Mask, Padding, PerHead
from ...operator._masks._data import from_zero

EVERYTHING: Mask = Columns(1)
NOTHING: Mask = ~EVERYTHING


def indices(given: int | Sequence[int] | None, name: str) -> tuple[int, ...] | None:
    """Numbers as a tuple; None is all."""
    if given is None:
        return None
    if isinstance(given, Tensor) and given.dim() == 1 and not given.is_floating_point():
        given = given.tolist()
    if isinstance(given, (str, bytes)) or not (isinstance(given, Sequence) or hasattr(given, "__index__")):
        raise TypeError(f"{name} must be an int, a list of ints or None (all), got {given!r}")
    numbers = [given] if hasattr(given, "__index__") else list(given)
    return tuple(dict.fromkeys(from_zero(number, name) for number in numbers))


@dataclass(frozen=True)
class Choice:
    """Heads and items of a call; None is all."""

    heads: tuple[int, ...] | None
    items: tuple[int, ...] | None

    def check(self, call: AttentionCall, site: str) -> None:
        """ValueError if the call has no such head or item."""
        batch, heads = call.query.shape[:2]
        for name, chosen, size in (("heads", self.heads, heads), ("items", self.items, batch)):
            beyond = [index for index in chosen or () if index >= size]
            if beyond:
                what = "query heads" if name == "heads" else "items"
                raise ValueError(f"{name}: {site} has {what} 0 to {size - 1}, got {', '.join(map(str, beyond))}")

    def heads_of(self, call: AttentionCall) -> list[int]:
        return list(range(call.query.shape[1])) if self.heads is None else list(self.heads)

    def covered(self, call: AttentionCall) -> Tensor:
        """(B or 1, Hq, 1, 1) bool: where the edit applies."""
        batch, heads = call.query.shape[:2]
        marks = _marks(self.heads, heads, call.query)[None, :]
        if self.items is not None:
            marks = marks & _marks(self.items, batch, call.query)[:, None]
        return marks[:, :, None, None]

    def mask(self, call: AttentionCall, mask: Mask) -> Mask:
        """`mask` for the chosen heads and items, everything for the others."""
        if self.items is not None:
            others = ~_marks(self.items, call.query.shape[0], call.query)
            mask = mask | Padding(others[:, None].expand(-1, call.key.shape[2]))
        if self.heads is None:
            return mask
        chosen = frozenset(self.heads)
        return PerHead([mask if head in chosen else EVERYTHING for head in range(call.query.shape[1])])


def _marks(chosen: tuple[int, ...] | None, size: int, like: Tensor) -> Tensor:
    """(size,) bool."""
    if chosen is None:
        return torch.ones(size, dtype=torch.bool, device=like.device)
    marks = torch.zeros(size, dtype=torch.bool, device=like.device)
    marks[list(chosen)] = True
    return marks


def hiding(hidden: Tensor, keys: int) -> Mask | None:
    """A mask that hides all keys where `hidden` (B or 1, Hq, 1, 1) is true; None if it is nowhere.

    Kernels skip what is hidden.
    """
    by_head = hidden[:, :, 0, 0]
    if not bool(by_head.any()):
        return None

    def of_head(items: Tensor) -> Mask:
        if bool(items.all()):
            return NOTHING
        return Padding((~items)[:, None].expand(-1, keys)) if bool(items.any()) else EVERYTHING

    return PerHead([of_head(items) for items in by_head.unbind(1)])
