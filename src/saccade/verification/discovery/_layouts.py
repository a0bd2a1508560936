"""Which axis of a target's input is the batch, which the sequence: the values are changed in one place, and where the
output moves is the sequence. A softmax over a wrong axis cannot hide it, because values only move along the product.

Letters: B batch, H heads, L length, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._calling import Given, arguments_of, entered, picked
from .._finding import Inapplicable, TargetError
from .._reading import Reading
from ._trials import Trials, differs


def mixing_axes(trials: Trials, reading: Reading) -> list[int]:
    """The axes of the output along which a change at one index of the last input (the values) moves other indices."""
    places, keywords = arguments_of(reading, Given(trials.inputs(reading)))
    where: Any = reading.names[-1] if reading.names else len(places) - 1
    value: Tensor = keywords[where] if reading.names else places[where]
    before = _out(trials, reading, places, keywords)
    moving = []
    for axis in range(len(reading.layout) - 1):
        for at in (0, value.shape[axis] - 1):
            new = _changed(value, axis, at)
            if reading.names:
                after = _out(trials, reading, places, keywords | {where: new})
            else:
                after = _out(trials, reading, (*places[:where], new), keywords)
            if _elsewhere(before, after, axis, at):
                moving.append(axis)
                break
    return moving


def _changed(value: Tensor, axis: int, at: int) -> Tensor:
    new = value.clone()
    part = new.select(axis, at)
    part.copy_(2 * torch.randn(part.shape, generator=torch.Generator().manual_seed(5)))
    return new


def _elsewhere(before: Tensor | None, after: Tensor | None, axis: int, at: int) -> bool:
    if before is None or after is None or before.shape != after.shape or axis >= before.dim():
        return False
    changed = differs(before, after).movedim(axis, 0)
    return bool(changed[:at].any() or changed[at + 1 :].any())


def _out(trials: Trials, reading: Reading, places: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor | None:
    try:
        found = picked(entered(trials.target, reading, places, keywords), reading.out)
    except (Inapplicable, TargetError):
        return None
    return found if isinstance(found, Tensor) else None
