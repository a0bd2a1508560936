"""Which heads of a call an edit is for, and which items of the batch.

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
    """Numbers as an edit keeps them; None is all."""
    if given is None:
        return None
    if isinstance(given, Tensor) and given.dim() == 1 and not given.is_floating_point():
        given = given.tolist()
    if isinstance(given, (str, bytes)) or not (isinstance(given, Sequence) or hasattr(given, "__index__")):
        raise TypeError(f"{name} must be an int, a list of ints or None (all), got {given!r}")
    found = [given] if hasattr(given, "__index__") else list(given)
    return tuple(dict.fromkeys(from_zero(one, name) for one in found))


@dataclass(frozen=True)
class Choice:
    """Heads and items of a call; None is all."""

    heads: tuple[int, ...] | None
    items: tuple[int, ...] | None

    def check(self, call: AttentionCall, site: str) -> None:
        """ValueError where the call has no such head or item."""
        batch, heads = call.query.shape[:2]
        for name, chosen, size in (("heads", self.heads, heads), ("items", self.items, batch)):
            beyond = [one for one in chosen or () if one >= size]
            if beyond:
                what = "query heads" if name == "heads" else "items"
                raise ValueError(f"{name}: {site} has {what} 0 to {size - 1}, got {', '.join(map(str, beyond))}")

    def heads_of(self, call: AttentionCall) -> list[int]:
        return list(range(call.query.shape[1])) if self.heads is None else list(self.heads)

    def covered(self, call: AttentionCall) -> Tensor:
        """(B or 1, Hq, 1, 1) bool: where the edit is at work."""
        batch, heads = call.query.shape[:2]
        found = _marks(self.heads, heads, call.query)[None, :]
        if self.items is not None:
            found = found & _marks(self.items, batch, call.query)[:, None]
        return found[:, :, None, None]

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
    """A mask that shows nothing where `hidden` (B or 1, Hq, 1, 1) is, everything elsewhere; None: it is nowhere.

    Kernels do not visit what shows nothing.
    """
    found = hidden[:, :, 0, 0]
    if not bool(found.any()):
        return None

    def of_head(items: Tensor) -> Mask:
        if bool(items.all()):
            return NOTHING
        return Padding((~items)[:, None].expand(-1, keys)) if bool(items.any()) else EVERYTHING

    return PerHead([of_head(items) for items in found.unbind(1)])
