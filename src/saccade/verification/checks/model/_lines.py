"""Which line of a whole model is to blame.

Shape legend: B batch, L length, S source length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...findings._finding import Inapplicable, Location, TargetError
from ...target._inputs import NamedInputs
from ...target._source import thrown_away
from ...target._subject import Subject
from ...tracing._positions import PositionFollower
from ...tracing._visible import masking_line, shaping_line, steps_of
from ._common import given


def pattern_line(subject: Subject, inputs: NamedInputs) -> Location | None:
    """Where the causal mask is made, else where it hides."""
    steps = steps_of(subject, inputs)
    return shaping_line(steps, inputs) or masking_line(steps, inputs)


def padding_line(subject: Subject, inputs: NamedInputs, real: Tensor) -> Location | None:
    """Where padding is thrown away, else where its mask over keys is made, else where scores are masked."""
    away = thrown_away(subject)
    if away is not None:
        return away
    steps = steps_of(subject, inputs, padding=real)
    shape = (inputs.batch, 1, 1, inputs.length)
    made = [step.location for step in steps if step.given == shape and step.location is not None]
    return made[-1] if made else masking_line(steps, inputs)


def lost_line(subject: Subject, inputs: NamedInputs, mask: Tensor, **more: Any) -> Location | None:
    """Where what a mask says is lost: it becomes the same everywhere."""
    data = [*inputs.tensors.values(), *(one for one in more.values() if isinstance(one, Tensor) and one is not mask)]
    return next(iter(_followed(subject, inputs, PositionFollower(data, mask.shape[-1], [mask]), more).found.lost), None)


def counting_line(subject: Subject, inputs: NamedInputs) -> Location | None:
    """Where a second step of decoding counts its positions."""
    reading = subject.reading.cache
    if reading is None or reading.kind != "passed":
        return None
    flag: dict[str, Any] = {} if reading.flag is None else {reading.flag: True}
    where: Any = reading.returned
    try:
        with torch.no_grad():
            first = given(subject, inputs.cut(slice(0, inputs.length - 1)), **flag)
    except TargetError:
        return None
    kept = getattr(first, where, None) if isinstance(where, str) else first[where]
    last = inputs.cut(slice(inputs.length - 1, inputs.length))
    follower = PositionFollower(last.tensors.values(), 1)
    return next(iter(_followed(subject, last, follower, {**flag, str(reading.argument): kept}).found.made), None)


def _followed(
    subject: Subject, inputs: NamedInputs, follower: PositionFollower, more: dict[str, Any]
) -> PositionFollower:
    try:
        with torch.no_grad(), follower:
            given(subject, inputs, **more)
    except (Inapplicable, TargetError):
        pass
    return follower
