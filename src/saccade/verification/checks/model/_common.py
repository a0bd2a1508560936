"""What the parts of the check share: calls of a whole model, and how far two of its outputs are apart.

Shape legend: B batch, L length, V the width of an output.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...findings._finding import Finding, Location, TargetError
from ...target._calling import entered
from ...target._inputs import NamedInputs
from ...target._models import EncoderDecoderModel
from ...target._subject import Subject

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


def largest(one: Tensor, other: Tensor, rows: Tensor | None = None) -> LargestDifference:
    """Of outputs (B, L, V), at the `rows` (B, L) alone where given. NaN in one of them is infinitely far."""
    apart = (one.double() - other.double()).abs().nan_to_num(nan=float("inf"))
    apart = apart.masked_fill(one.isnan() & other.isnan(), 0.0).amax(-1)
    if rows is not None:
        apart = apart.masked_fill(~rows, 0.0)
    at = int(apart.argmax())
    size = float(apart.max())
    scale = float(other.double().nan_to_num().abs().max()) or 1.0
    return LargestDifference(size, at // apart.shape[1], at % apart.shape[1], size / scale)


def exact(subject: Subject) -> tuple[Subject, float]:
    """(a copy in float64, the relative difference that counts), or the model itself where float64 fails."""
    double = subject.to(torch.float64)
    try:
        with torch.no_grad():
            double(double.inputs(1, 2))
    except TargetError:
        return subject, APART_FLOAT32
    return double, APART


def judged(subject: Subject, measure: Callable[[Subject], LargestDifference]) -> tuple[LargestDifference, float]:
    """(what was measured, the relative difference that counts): in float64 where that can be.

    Where float64 gives NaN the model's own type judges: some form masks of the least float64, which is -inf as soon
    as a softmax is taken in float32, and a row that sees nothing is then NaN.
    """
    double, counts = exact(subject)
    found = measure(double)
    if isfinite(found.size) or double is subject:
        return found, counts
    return measure(subject), APART_FLOAT32


def given(subject: Subject, inputs: NamedInputs, **more: Any) -> Any:
    """What the model returns when it is called with further arguments of its own."""
    tokens = inputs["tokens"].contiguous()
    constants = {**subject.reading.constants, **more}
    if subject.reading.names:
        return entered(subject.target, subject.reading, (), {subject.reading.names[0]: tokens, **constants})
    return entered(subject.target, subject.reading, (tokens,), constants)


def output(subject: Subject, returned: Any) -> Tensor:
    """(B, L, V) of what `given` returned."""
    where = subject.reading.out
    if where is None:
        out = returned
    else:
        out = getattr(returned, where) if isinstance(where, str) and not isinstance(returned, dict) else returned[where]
    if not isinstance(out, Tensor):
        raise TargetError(f"it returned {type(out).__name__} where a tensor was expected", None)
    return out


def fitting(subject: Subject, length: int) -> int:
    """`length`, or the longest that the model takes."""
    return min(length, subject.reading.max_length or length)


def whose(subject: Subject) -> str:
    """How a finding calls the tokens."""
    return "decoder token" if isinstance(subject.target, EncoderDecoderModel) else "token"


def error(message: str, effect: str, mend: str, evidence: dict[str, Any], location: Location | None = None) -> Finding:
    return Finding(NAME, NAME, "error", message, effect, mend, evidence, location)
