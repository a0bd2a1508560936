"""The line of a model's source that causes a finding, where its calls can be traced; None elsewhere.

Shape legend: B batch, L length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..findings._finding import Inapplicable, Location, TargetError
from ..subject._decoder import CachedDecoder, pieces
from ..subject._source import thrown_away
from ..subject._subject import Subject
from ..tracing._flow import batch_mixing_line
from ..tracing._positions import PositionFollower
from ..tracing._visible import masking_line, shaping_line, steps_of
from ._pad_ids import pad_id
from ._stack import Stack


def pattern_line(stack: Stack, length: int) -> Location | None:
    """The line that makes the causal mask, else the line that applies it."""
    if stack.subject is None:
        return None
    inputs = stack.subject.inputs(2, length)
    steps = steps_of(stack.subject, inputs)
    return shaping_line(steps, inputs) or masking_line(steps, inputs)


def mixing_line(stack: Stack, length: int) -> Location | None:
    """The line where rows of a batch reach each other."""
    return None if stack.subject is None else batch_mixing_line(stack.subject, stack.subject.inputs(3, length))


def padding_line(stack: Stack, length: int) -> Location | None:
    """The line that drops the padding mask, else the line that makes it, else the line that masks scores."""
    subject = stack.subject
    if subject is None:
        return None
    if not subject.reading.masks:
        known = pad_id(subject)
        return None if known is None else known.location
    away = thrown_away(subject)
    if away is not None:
        return away
    inputs = subject.inputs(2, length)
    real = torch.arange(length) < torch.tensor([[length], [max(1, length - 3)]])
    steps = steps_of(subject, inputs, padding=real)
    made = [step.location for step in steps if step.given == (2, 1, 1, length) and step.location is not None]
    return made[-1] if made else masking_line(steps, inputs)


def lost_line(
    stack: Stack, inputs: Any, data: list[Tensor], source: Tensor, source_mask: Tensor | None = None
) -> Location | None:
    """The line after which the mask of a source is the same everywhere."""
    if source_mask is None:
        return None
    follower = PositionFollower(data, source_mask.shape[-1], [source_mask])
    try:
        with follower:
            stack.run(inputs, source=source, source_mask=source_mask)
    except (Inapplicable, TargetError):
        pass
    return next(iter(follower.found.lost), None)


def counting_line(stack: Stack, length: int) -> Location | None:
    """The line that counts positions in a second step of decoding."""
    subject: Subject | None = stack.subject
    if subject is None or subject.reading.cache is None or subject.reading.cache.kind != "passed":
        return None
    decoder = CachedDecoder(subject)
    first, last = pieces(subject.inputs(2, length), (length - 1, 1))
    follower = PositionFollower(last.tensors.values(), 1)
    try:
        with torch.no_grad():
            decoder(first)
            with follower:
                decoder.next_call(last)(last)
    except (Inapplicable, TargetError):
        pass
    return next(iter(follower.found.made), None)
