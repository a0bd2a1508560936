"""`&`, `|` and `~`."""

from __future__ import annotations

from collections.abc import Hashable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ._intervals import Kind, Region, both, either, inverted
from ._mask import Lengths, Mask, fixed_lengths
from ._program import Opcode, ProgramScope, ProgramWriter


class _Several(Mask):
    """An associative combination, kept flat so that (a & b) & c equals a & (b & c)."""

    parts: tuple[Mask, ...]
    shape: tuple[int, int]
    fixed: Lengths | None
    fields = ("parts",)
    pairwise = True
    sign = ""

    def __init__(self, parts: tuple[Mask, ...]):
        self._set(parts=parts)
        self.placement()  # refuses parts that stand in different places
        self._set(shape=super()._batch_and_heads(), fixed=fixed_lengths(parts))

    @classmethod
    def of(cls, *masks: Mask) -> Mask:
        flat: list[Mask] = []
        for mask in masks:
            flat.extend(mask.parts if isinstance(mask, cls) else (mask,))
        return cls(tuple(flat))

    def _children(self) -> tuple[Mask, ...]:
        return self.parts

    def _batch_and_heads(self) -> tuple[int, int]:
        return self.shape

    def _required_lengths(self) -> Lengths | None:
        return self.fixed

    def _value(self) -> tuple[Hashable, ...]:
        return self.parts

    def _write_parts(self, operation: Opcode, program: ProgramWriter, scope: ProgramScope) -> None:
        program.write(operation, len(self.parts))
        for part in self.parts:
            program.part(part, scope)

    @property
    def widens(self) -> bool:
        return all(part.widens for part in self.parts)

    def moved(self, device: torch.device | str) -> Mask:
        return type(self)(tuple(part.to(device) for part in self.parts))

    def _answers(self, *where: Any) -> list[Tensor]:
        return [part.allows(*where) for part in self.parts]

    def __repr__(self) -> str:
        return f" {self.sign} ".join(f"({p!r})" if isinstance(p, _Several) else repr(p) for p in self.parts)


class And(_Several):
    """The pairs that every part keeps."""

    sign = "&"

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        return reduce(torch.logical_and, self._answers(b, h, row, position, key))

    def region_kind(self, region: Region) -> Kind:
        return both(part.region_kind(region) for part in self.parts)

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        self._write_parts(Opcode.ALL, program, scope)

    @property
    def sees_itself(self) -> bool:
        return all(part.sees_itself for part in self.parts)


class Or(_Several):
    """The pairs that some part keeps."""

    sign = "|"

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        return reduce(torch.logical_or, self._answers(b, h, row, position, key))

    def region_kind(self, region: Region) -> Kind:
        return either(part.region_kind(region) for part in self.parts)

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        self._write_parts(Opcode.ANY, program, scope)

    @property
    def sees_itself(self) -> bool:
        return any(part.sees_itself for part in self.parts)


class Not(Mask):
    """The pairs that a mask does not keep."""

    fields = ("part",)
    pairwise = True

    part: Mask

    def __init__(self, part: Mask):
        self._set(part=part)

    @classmethod
    def of(cls, mask: Mask) -> Mask:
        return mask.part if isinstance(mask, Not) else cls(mask)

    def _children(self) -> tuple[Mask, ...]:
        return (self.part,)

    def _required_lengths(self) -> Lengths | None:
        return self.part._required_lengths()

    def moved(self, device: torch.device | str) -> Mask:
        return Not(self.part.to(device))

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        return ~self.part.allows(b, h, row, position, key)

    def region_kind(self, region: Region) -> Kind:
        return inverted(self.part.region_kind(region))

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        program.write(Opcode.INVERT)
        program.part(self.part, scope)

    def __repr__(self) -> str:
        return f"~({self.part!r})" if isinstance(self.part, _Several) else f"~{self.part!r}"


def bracketed(mask: Mask) -> str:
    """The mask's repr, in brackets where a method call that follows would bind tighter than its operators."""
    return f"({mask!r})" if isinstance(mask, _Several | Not) else repr(mask)
