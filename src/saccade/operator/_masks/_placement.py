"""`.at` and `.slice`: the positions of the queries of a mask."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ._algebra import bracketed
from ._data import OwnedTensor, bounded, extent, numbers, per_item
from ._intervals import Kind, Region, Span, throughout
from ._mask import Lengths, Mask, MaskProblem, Where, span
from ._program import Opcode, ProgramScope, ProgramWriter


def shared(masks: Sequence[Mask]) -> Hashable:
    """The one placement of masks that are combined. ValueError if their placements differ."""
    found = {mask.placement() for mask in masks} - {None}
    if len(found) <= 1:
        return found.pop() if found else None
    if "open" in found:
        raise ValueError(
            "a mask placed by .at or .slice cannot be combined with one that is not and depends on positions: "
            "place the whole expression, (a & b).at(n)"
        )
    longest = max((place for place in found if isinstance(place, tuple)), key=len)
    # A slice of a mask without positions (three entries) goes with any slice of the same rows and keys.
    if all(place == longest[: len(place)] for place in found if isinstance(place, tuple)):
        return longest
    raise ValueError(
        "masks placed at different positions cannot be combined: place the whole expression, (a & b).at(n)"
    )


class At(Mask):
    """A mask whose query row i is at position `i + offset`. Made by `Mask.at`."""

    fields = ("part", "offset")

    part: Mask
    offset: int | OwnedTensor

    def __init__(self, part: Mask, offset: int | OwnedTensor):
        self._set(part=part, offset=offset)

    @classmethod
    def of(cls, mask: Mask, offset: Any) -> Mask:
        if _placed(mask):
            raise ValueError(f"this mask is placed already, .at once for the whole expression: {mask!r}")
        placed = cls(mask, numbers(offset, "offset"))
        placed._batch_and_heads()
        return placed

    def _children(self) -> tuple[Mask, ...]:
        return (self.part,)

    def _own_batch_and_heads(self) -> tuple[int, int]:
        return (1, 1) if isinstance(self.offset, int) else (self.offset.shape[0], 1)

    def tables(self) -> tuple[OwnedTensor, ...]:
        return () if isinstance(self.offset, int) else (self.offset,)

    def placement(self) -> Hashable:
        return "at", self.offset

    def moved(self, device: torch.device | str) -> Mask:
        return At(self.part.to(device), self.offset if isinstance(self.offset, int) else self.offset.to(device))

    def _check_fit(self, problem: MaskProblem) -> None:
        unknown = torch.compiler.is_compiling() and not isinstance(self.offset, int)
        low, high = (0, -problem.rows) if unknown else extent(self.offset, None)
        self.part._check_fit(problem.standing((low, high + problem.rows)))

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        return self.part.allows(b, h, row, row + per_item(self.offset, b), key)

    def region_kind(self, region: Region) -> Kind:
        if isinstance(self.offset, int):
            return self._standing(region, self.offset)
        offsets = self.offset.host
        if len(offsets) == 1:
            return self._standing(region, int(offsets[0]))
        if region.item is not None:
            return self._standing(region, int(offsets[region.item]))
        if self.part._batch_and_heads()[0] == 1:
            return throughout(self._standing(region, int(offset)) for offset in sorted(set(offsets.tolist())))
        return throughout(self._standing(region._replace(item=b), int(offset)) for b, offset in enumerate(offsets))

    def _standing(self, region: Region, offset: int) -> Kind:
        start, stop = region.rows
        return self.part.region_kind(region._replace(positions=(start + offset, stop + offset)))

    @classmethod
    def _from_fields(cls, **fields: Any) -> Mask:
        return cls.of(fields["part"], fields["offset"])

    @property
    def widens(self) -> bool:
        return self.part.widens

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        program.write(Opcode.AT, *program.number(self.offset))
        program.part(self.part, scope._replace(offset=self.offset))

    def __repr__(self) -> str:
        return f"{bracketed(self.part)}.at({self.offset!r})"


class Slice(Mask):
    """The mask of some rows and keys of a larger problem. Made by `Mask.slice`."""

    fields = ("part", "rows", "keys", "lengths")

    part: Mask
    rows: Span
    keys: Span
    lengths: Lengths | None

    def __init__(self, part: Mask, rows: Span, keys: Span, lengths: Lengths | None):
        self._set(part=part, rows=rows, keys=keys, lengths=lengths)

    @classmethod
    def of(cls, mask: Mask, rows: Where, keys: Where, lengths: Lengths | None) -> Mask:
        if lengths is not None:
            lengths = _sizes(lengths)
        known = mask._required_lengths()
        if known is not None:
            if lengths not in (None, known):
                raise ValueError(f"lengths {lengths} are not those of this slice, {known}")
            lengths = known
        if lengths is None and mask.placement() == "open":
            raise ValueError(
                "slice: this mask depends on positions; give lengths=(Lq, Lk) of the whole problem, or use .at"
            )
        Lq, Lk = lengths or (None, None)
        row_span, key_span = span(rows, Lq, "rows"), span(keys, Lk, "keys")
        if isinstance(mask, Slice):
            return cls(mask.part, _shifted(row_span, mask.rows[0]), _shifted(key_span, mask.keys[0]), mask.lengths)
        return cls(mask, row_span, key_span, lengths)

    @property
    def sizes(self) -> Lengths:
        """(rows, keys) of the smaller problem: the only one this mask may be evaluated on."""
        return self.rows[1] - self.rows[0], self.keys[1] - self.keys[0]

    def _children(self) -> tuple[Mask, ...]:
        return (self.part,)

    def placement(self) -> Hashable:
        inner = self.part.placement()
        return ("slice", self.rows, self.keys, *(() if inner is None else (self._offset(inner), inner)))

    def _origin(self) -> tuple[int, int]:
        row, key = self.part._origin()
        return row + self.rows[0], key + self.keys[0]

    def _required_lengths(self) -> Lengths | None:
        return self.sizes

    def moved(self, device: torch.device | str) -> Mask:
        return Slice(self.part.to(device), self.rows, self.keys, self.lengths)

    def _offset(self, inner: Hashable = "open") -> int:
        return 0 if self.lengths is None or inner != "open" else self.lengths[1] - self.lengths[0]

    def _check_fit(self, problem: MaskProblem) -> None:
        rows, keys = self.lengths or (self.rows[1], self.keys[1])
        inner = replace(
            problem, rows=rows, keys=keys, positions=_shifted((0, rows), self._offset()), exact=self.lengths is not None
        )
        self.part._check_fit(inner)

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        row = row + self.rows[0]
        return self.part.allows(b, h, row, row + self._offset(), key + self.keys[0])

    def region_kind(self, region: Region) -> Kind:
        rows, keys = _shifted(region.rows, self.rows[0]), _shifted(region.keys, self.keys[0])
        return self.part.region_kind(Region(rows, _shifted(rows, self._offset()), keys, region.item, region.head))

    @classmethod
    def _from_fields(cls, **fields: Any) -> Mask:
        return cls.of(fields["part"], fields["rows"], fields["keys"], fields["lengths"])

    @property
    def by_key(self) -> bool:
        return self.part.by_key

    @property
    def widens(self) -> bool:
        return self.part.widens

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        lengths = self.lengths
        program.write(Opcode.SLICE, self.rows[0], self.keys[0], *(lengths or (0, 0)), int(lengths is not None))
        rows, keys = _shifted(scope.rows, self.rows[0]), _shifted(scope.keys, self.keys[0])
        program.part(self.part, scope._replace(rows=rows, keys=keys, offset=self._offset()))

    def __repr__(self) -> str:
        lengths = "" if self.lengths is None else f", lengths={self.lengths}"
        return f"{bracketed(self.part)}.slice({self.rows}, {self.keys}{lengths})"


def _placed(mask: Mask) -> bool:
    return isinstance(mask, At | Slice) or any(_placed(part) for part in mask._children())


def _sizes(lengths: Lengths) -> Lengths:
    if not isinstance(lengths, Sequence) or len(lengths) != 2:
        raise TypeError(f"lengths must be (Lq, Lk), got {lengths!r}")
    return bounded(lengths[0], "Lq", least=0), bounded(lengths[1], "Lk", least=0)


def _shifted(where: Span, by: int) -> Span:
    return where[0] + by, where[1] + by
