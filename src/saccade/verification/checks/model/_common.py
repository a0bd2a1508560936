"""Shared parts of the model check: calls of a whole model, the difference of two of its outputs, and the line that
causes it.

Shape legend: B batch, L length, S source length, V the width of an output.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...findings._finding import Finding, Inapplicable, Location, TargetError
from ...subject._calling import entered, picked
from ...subject._decoder import CachedDecoder, pieces
from ...subject._inputs import NamedInputs
from ...subject._source import thrown_away
from ...subject._subject import Subject
from ...subject._token_models import EncoderDecoderModel
from ...tracing._positions import PositionFollower
from ...tracing._visible import masking_line, shaping_line, steps_of

NAME = "model"
# Of the effect that a change has where it may have one. Bits may differ where rows are grouped by content (mixtures of
# experts) or shapes differ; a leak is far above that.
NOISE = 1e-6
# Of the largest output, in float64: models take softmax, norms and rotary angles in float32 whatever their type.
APART = 1e-5
# The same, where a model cannot be brought to float64.
APART_FLOAT32 = 1e-3


class LargestDifference(NamedTuple):
    """The largest difference of two outputs, and where."""

    size: float
    item: int
    position: int
    relative: float  # to the largest output


def largest(tensor: Tensor, other: Tensor, rows: Tensor | None = None) -> LargestDifference:
    """The largest difference of outputs (B, L, V), at the `rows` (B, L) if given. NaN counts as infinite."""
    apart = (tensor.double() - other.double()).abs().nan_to_num(nan=float("inf"))
    apart = apart.masked_fill(tensor.isnan() & other.isnan(), 0.0).amax(-1)
    if rows is not None:
        apart = apart.masked_fill(~rows, 0.0)
    at = int(apart.argmax())
    size = float(apart.max())
    scale = float(other.double().nan_to_num().abs().max()) or 1.0
    return LargestDifference(size, at // apart.shape[1], at % apart.shape[1], size / scale)


def exact(subject: Subject) -> tuple[Subject, float]:
    """(a copy in float64, or the model itself if float64 fails; the relative difference from which outputs differ)."""
    double = subject.to(torch.float64)
    try:
        with torch.no_grad():
            double(double.inputs(1, 2))
    except TargetError:
        return subject, APART_FLOAT32
    return double, APART


def judged(subject: Subject, measure: Callable[[Subject], LargestDifference]) -> tuple[LargestDifference, float]:
    """(the measured difference, the relative difference that counts), in float64 if possible.

    If float64 gives NaN, the model's own dtype is used: some models make masks of the least float64, which becomes -inf
    in a softmax in float32, and a row without visible keys is then NaN.
    """
    double, counts = exact(subject)
    gap = measure(double)
    if isfinite(gap.size) or double is subject:
        return gap, counts
    return measure(subject), APART_FLOAT32


def given(subject: Subject, inputs: NamedInputs, **more: Any) -> Any:
    """The outputs of a call with further arguments."""
    tokens = inputs["tokens"].contiguous()
    constants = {**subject.reading.constants, **more}
    if subject.reading.names:
        return entered(subject.target, subject.reading, (), {subject.reading.names[0]: tokens, **constants})
    return entered(subject.target, subject.reading, (tokens,), constants)


def output(subject: Subject, returned: Any) -> Tensor:
    """(B, L, V) of what `given` returned."""
    out = picked(returned, subject.reading.out)
    if not isinstance(out, Tensor):
        raise TargetError(f"it returned {type(out).__name__} where a tensor was expected", None)
    return out


def fitting(subject: Subject, length: int) -> int:
    """`length`, or the longest that the model takes."""
    return min(length, subject.reading.max_length or length)


def whose(subject: Subject) -> str:
    """The word for the tokens in messages."""
    return "decoder token" if isinstance(subject.target, EncoderDecoderModel) else "token"


def error(message: str, effect: str, fix: str, evidence: dict[str, Any], location: Location | None = None) -> Finding:
    return Finding(NAME, NAME, "error", message, effect, fix, evidence, location)


# Which line is to blame


def pattern_line(subject: Subject, inputs: NamedInputs) -> Location | None:
    """The line that makes the causal mask, else the line that applies it."""
    steps = steps_of(subject, inputs)
    return shaping_line(steps, inputs) or masking_line(steps, inputs)


def padding_line(subject: Subject, inputs: NamedInputs, real: Tensor) -> Location | None:
    """The line that drops the padding mask, or else the line that makes it, or else the line that masks scores."""
    away = thrown_away(subject)
    if away is not None:
        return away
    steps = steps_of(subject, inputs, padding=real)
    shape = (inputs.batch, 1, 1, inputs.length)
    made = [step.location for step in steps if step.given == shape and step.location is not None]
    return made[-1] if made else masking_line(steps, inputs)


def lost_line(subject: Subject, inputs: NamedInputs, mask: Tensor, **more: Any) -> Location | None:
    """The line after which a mask is the same everywhere."""
    data = [
        *inputs.tensors.values(),
        *(tensor for tensor in more.values() if isinstance(tensor, Tensor) and tensor is not mask),
    ]
    return next(iter(_followed(subject, inputs, PositionFollower(data, mask.shape[-1], [mask]), more).found.lost), None)


def counting_line(subject: Subject, inputs: NamedInputs) -> Location | None:
    """The line that counts positions in a second step of decoding."""
    if subject.reading.cache is None or subject.reading.cache.kind != "passed":
        return None
    decoder = CachedDecoder(subject)
    first, last = pieces(inputs, (inputs.length - 1, 1))
    try:
        with torch.no_grad():
            decoder(first)
    except TargetError:
        return None
    follower = PositionFollower(last.tensors.values(), 1)
    return next(iter(_followed(decoder.next_call(last), last, follower, {}).found.made), None)


def _followed(
    subject: Subject, inputs: NamedInputs, follower: PositionFollower, more: dict[str, Any]
) -> PositionFollower:
    try:
        with torch.no_grad(), follower:
            given(subject, inputs, **more)
    except (Inapplicable, TargetError):
        pass
    return follower
