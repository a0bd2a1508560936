"""Rotations of queries and keys: the axis that their angles follow.

Shape legend: those of the rotated tensors, their last axis the width; tables are as they were broadcast to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from ..findings._finding import Location
from ..target._inputs import NamedInputs
from ..target._subject import Subject
from ..tracing._mode import ElementwiseFactor
from ..tracing._shadow import UNKNOWN, varying
from ..tracing._trace import traced
from ..tracing._units import TokenOwners


@dataclass(frozen=True)
class RotatedRows:
    """Rows that are multiplied by cosines and sines, or by complex numbers of size 1."""

    by_position: bool  # whether the angles differ between positions
    otherwise: bool  # whether they differ along another axis, that of the heads or of the batch
    location: Location | None


def rotations(subject: Subject, inputs: NamedInputs) -> tuple[RotatedRows, ...]:
    """Those of one call whose angles differ from 0 and whose rows' positions are known."""
    looked = traced(subject, inputs)
    assert looked.tokens is not None
    return tuple(
        _rotation(one, looked.tokens) for one in _turning(looked.factors) if _positions(one, looked.tokens) is not None
    )


def _turning(factors: tuple[ElementwiseFactor, ...]) -> Iterator[ElementwiseFactor]:
    """Complex numbers of size 1, and cosines that have sines beside them."""
    for one in factors:
        if one.numbers.is_complex() and _is_one(one.numbers.abs()) and not _is_trivial(one.numbers.imag):
            yield one
    real = [one for one in factors if one.numbers.is_floating_point() and not _is_trivial(one.numbers)]
    for one, other in permutations(real, 2):
        fits = one.numbers.shape == other.numbers.shape
        if fits and _is_one(one.numbers.double() ** 2 + other.numbers.double() ** 2):
            yield one


def _is_one(numbers: Tensor) -> bool:
    return bool(((numbers - 1).abs() < 1e-2).all())


def _is_trivial(numbers: Tensor) -> bool:
    """Whether these are zeros and ones: a mask and its opposite."""
    return bool(((numbers == 0) | (numbers.abs() == 1)).all())


def _rotation(factor: ElementwiseFactor, tokens: TokenOwners) -> RotatedRows:
    positions = _positions(factor, tokens)
    assert positions is not None
    axes = range(factor.numbers.dim() - 1)
    along = [axis for axis in axes if varying(positions, axis)]
    turned = [axis for axis in axes if varying(factor.numbers, axis)]
    return RotatedRows(bool(set(along) & set(turned)), bool(set(turned) - set(along)), factor.location)


def _positions(factor: ElementwiseFactor, tokens: TokenOwners) -> Tensor | None:
    """The position of each row, None where it is not known."""
    known = bool((factor.tokens != UNKNOWN).all()) and factor.tokens.shape == factor.numbers.shape
    positions = tokens.position[factor.tokens] if known else torch.zeros(0)
    return positions if known and bool((positions != positions.flatten()[0]).any()) else None
