"""Masks of a whole sequence, restricted to the few rows of a call and to keys in storage order.

Shape legend: B batch, Lq / Lk rows and keys of the call, T tokens of the sequence.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from ..._masks import FromTensor, Mask
from ..._masks._data import OwnedTensor
from ..._masks._intervals import Kind, Region, Span
from ..._masks._mask import MaskProblem
from ..._masks._placement import _placed


class RowsAtPositions(Mask):
    """A mask of `reach` tokens in which the query at position p is row p, whichever row of the call it is.

    A mask given as a tensor counts rows; the rows of a call that continues a sequence are not its first rows. Positions
    outside of the sequence, which only padded rows have, are moved to its ends.
    """

    part: Mask
    reach: int

    def __init__(self, part: Mask, reach: int):
        self._set(part=part, reach=reach)

    def _children(self) -> tuple[Mask, ...]:
        return (self.part,)

    def placement(self) -> Hashable:
        return "open"

    def _value(self) -> tuple[Hashable, ...]:
        return self.part, self.reach

    def moved(self, device: torch.device | str) -> Mask:
        return RowsAtPositions(self.part.to(device), self.reach)

    def _check_fit(self, problem: MaskProblem) -> None:
        keys = min(problem.keys, self.reach)
        self.part._check_fit(MaskProblem(self.reach, keys, (0, self.reach), exact=False))

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        last = max(self.reach - 1, 0)
        place = position.clamp(0, last)
        return self.part.allows(b, h, place, place, key.clamp(max=last))

    def region_kind(self, region: Region) -> Kind:
        positions, keys = self._within(region.positions), self._within(region.keys)
        return self.part.region_kind(Region(positions, positions, keys, region.item, region.head))

    def _within(self, span: Span) -> Span:
        first, last = (min(max(place, 0), max(self.reach - 1, 0)) for place in (span[0], span[1] - 1))
        return first, last + 1

    def __repr__(self) -> str:
        return repr(self.part)


class KeysAtPositions(Mask):
    """A mask on keys in any order: key j of item b is the token at `positions[b, j]`, or no token if it is -1.

    Args:
        part: the mask of the sequence, not placed; it is asked about positions only.
        positions: int64 (1 or B, Lk) on the host.
    """

    part: Mask
    positions: OwnedTensor

    def __init__(self, part: Mask, positions: np.ndarray | OwnedTensor):
        table = (
            positions if isinstance(positions, OwnedTensor) else OwnedTensor(torch.from_numpy(positions), portable=True)
        )
        self._set(part=part, positions=table)

    def _children(self) -> tuple[Mask, ...]:
        return (self.part,)

    def _own_batch_and_heads(self) -> tuple[int, int]:
        return self.positions.shape[0], 1

    def tables(self) -> tuple[OwnedTensor, ...]:
        return (self.positions,)

    def _value(self) -> tuple[Hashable, ...]:
        return self.part, self.positions

    def moved(self, device: torch.device | str) -> Mask:
        return KeysAtPositions(self.part.to(device), self.positions)

    def _check_fit(self, problem: MaskProblem) -> None:
        reach = int(self.positions.host.max(initial=-1)) + 1
        self.part._check_fit(MaskProblem(problem.rows, reach, problem.positions, exact=False))

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        places = self.positions.on(key.device)
        place = places[b if places.shape[0] > 1 else torch.zeros_like(b), key]
        return self.part.allows(b, h, row, position, place.clamp(min=0)) & (place >= 0)

    def region_kind(self, region: Region) -> Kind:
        places: np.ndarray = self.positions.host
        if region.item is not None and places.shape[0] > 1:
            places = places[region.item : region.item + 1]
        places = places[:, region.keys[0] : region.keys[1]]
        held = places[places >= 0]
        if not held.size:
            return "empty"
        kind = self.part.region_kind(region._replace(keys=(int(held.min()), int(held.max()) + 1)))
        return "partial" if kind == "full" and held.size < places.size else kind

    def __repr__(self) -> str:
        return f"Stored({self.part!r}, {self.positions!r})"


def standing(mask: Mask | None, reach: int) -> Mask | None:
    """The mask of a sequence of `reach` tokens so far, as a function of positions only.

    Raises:
        ValueError: it is placed already.
    """
    if mask is None or mask._throughout("endless"):
        return mask
    refuse_placed(mask)
    return RowsAtPositions(mask, reach)


def refuse_placed(mask: Mask | None) -> None:
    """ValueError if the mask is placed by `.at` or `.slice`."""
    if mask is not None and _placed(mask):
        raise ValueError(f"mask: with a cache it must not be placed by .at or .slice, the cache does that: {mask!r}")


def check_reach(mask: Mask, reach: int, batch: int) -> None:
    """ValueError unless the mask fits a sequence of `reach` tokens."""
    if not torch.compiler.is_compiling():
        mask.check(batch, None, reach, reach, None)
        return
    # Other masks look at host arrays, which cannot be traced, and answer for places that they do not have.
    if isinstance(mask, FromTensor):
        mask.fits(MaskProblem(reach, reach, (0, reach), exact=False))
    for part in mask._children():
        check_reach(part, reach, batch)


def both(first: Mask | None, second: Mask | None) -> Mask | None:
    """The intersection of two masks; None shows everything."""
    if first is None or second is None:
        return first if second is None else second
    return first & second
