"""Which keys each query gives weight to, inside the target: exact, for each head, its own position included.

Shape legend: B batch, H heads, L length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...support._restored import seeded
from ..findings._finding import Inapplicable, Location, TargetError
from ..subject._influence import SEED
from ..subject._inputs import NamedInputs
from ..subject._subject import Subject
from ._trace import TracedAttention, TraceStep, measured, traced

_UNDERFLOW = 80.0  # exp(-88) is the smallest normal number of float32
_HIDDEN = -5e3  # masks fill with -1e4 or less, or add it
_HIDING = ("masked_fill", "masked_fill_", "where")
_USED = (*_HIDING, "add", "add_", "mul", "mul_")
_MADE = ("tril", "tril_", "triu", "triu_")
# what makes a mask of positions, for a kernel that hides by itself
_COMPARING = frozenset("le lt ge gt eq ne and or bitwise_and bitwise_or logical_and logical_or".split())
_ORDERING = ("le", "lt", "ge", "gt")
_JOINING = frozenset(
    """conv1d mean sum std var amax max amin min norm flip roll cumsum cumprod batch_norm layer_norm softmax median
    logsumexp""".split()
)


@dataclass(frozen=True, eq=False)
class VisibleAttention:
    """One attention over a sequence of its own."""

    traced: TracedAttention
    number: int  # among those of the call

    @property
    def weights(self) -> Tensor:
        """(B, H, L, L) that multiplied the values."""
        return self.traced.weights.double()

    @property
    def attends(self) -> Tensor:
        """(B, H, L, L) booleans: see `attends`."""
        return attends(self.traced)


def attends(traced: TracedAttention) -> Tensor:
    """(B, H, Lq, Lk) booleans: whether a weight is not 0 (or NaN), or is 0 only because its logit, which no mask hides,
    is far below the largest of its row."""
    if traced.logits is None or traced.logits.shape != traced.weights.shape:
        return traced.weights != 0
    below = traced.logits.amax(-1, keepdim=True) - traced.logits
    return (traced.weights != 0) | ((below > _UNDERFLOW) & (traced.logits > _HIDDEN))


def attentions_of(subject: Subject, inputs: NamedInputs, **masks: Tensor) -> tuple[TracedAttention, ...]:
    """The traced attention of one call; empty if none could be traced."""
    try:
        with seeded(SEED), torch.no_grad():
            # on a copy: what a target keeps of a call with gradients cannot be copied afterwards
            return measured(subject.fresh(), inputs, **masks)
    except (Inapplicable, TargetError):
        return ()


def self_attentions(subject: Subject, inputs: NamedInputs, **masks: Tensor) -> tuple[VisibleAttention, ...]:
    """The traced attention of one call with as many queries and keys as the sequence has positions."""
    shape = (inputs.length, inputs.length)
    attentions = enumerate(attentions_of(subject, inputs, **masks))
    return tuple(
        VisibleAttention(attention, at) for at, attention in attentions if attention.weights.shape[-2:] == shape
    )


def steps_of(
    subject: Subject, inputs: NamedInputs, *, pairs: Tensor | None = None, padding: Tensor | None = None
) -> tuple[TraceStep, ...]:
    """The PyTorch calls of the target, in order; empty if it could not be traced."""
    try:
        with seeded(SEED), torch.no_grad():
            return traced(subject.fresh(), inputs, pairs=pairs, padding=padding).steps
    except (Inapplicable, TargetError):
        return ()


def masking_line(
    steps: Sequence[TraceStep], inputs: NamedInputs, *, shape_first: bool = False, argument: str = ""
) -> Location | None:
    """The line that hides keys, by the name of its call; with `shape_first` the line that makes the mask. A line that
    names the `argument` comes before the target's other masks."""
    shape = (inputs.length, inputs.key_length)
    here = [step for step in steps if step.location is not None and step.given[-2:] == shape]
    made = [step for step in here if step.name in _MADE]
    # a product or sum of two tensors; with a number it is the scale
    used = [
        step for name in _USED for step in here if step.name == name and (step.name in _HIDING or len(step.taken) > 1)
    ]
    used.sort(key=lambda step: not re.search(rf"\b{re.escape(argument)}\b", step.location.code))  # type: ignore[union-attr]
    compared = [step for step in here if step.name in _COMPARING][-1:]
    anywhere = [step for step in steps if step.name in _HIDING and step.location is not None]
    fused = [step for step in steps if step.name == "scaled_dot_product_attention" and step.location is not None]
    order = (made, used) if shape_first else (used, made)
    for candidates in (*order, compared, anywhere, fused):
        if candidates:
            return candidates[0].location
    return None


def shaping_line(steps: Sequence[TraceStep], inputs: NamedInputs) -> Location | None:
    """The line that makes the pattern of a mask over a sequence: the last triangle, else the last comparison of
    positions."""
    shape = (inputs.length, inputs.key_length)
    here = [step for step in steps if step.location is not None and step.given[-2:] == shape]
    for names in (_MADE, _ORDERING):
        lines = [step.location for step in here if step.name in names]
        if lines:
            return lines[-1]
    return None


def line_over_sequence(steps: Sequence[TraceStep], length: int) -> Location | None:
    """The line where something other than attention joins positions: a mean, a deviation, a flip along the sequence."""
    for step in steps:
        if step.location is None or not step.taken or step.name not in _JOINING:
            continue
        before, after = step.taken[0], step.given
        if step.name == "conv1d" and before[-1] == length and len(step.taken) > 1 and step.taken[1][-1] > 1:
            return step.location
        if before[-2:] == (length, length):  # scores
            continue
        lost = length in before and (length not in after or (len(after) == len(before) and after != before))
        if lost or (length in before and step.name in ("flip", "roll", "cumsum", "cumprod", "batch_norm")):
            return step.location
    return None


def one_sequence(subject: Subject, batch: int, length: int) -> NamedInputs:
    """Inputs of one sequence; a context of another length, so that the two cannot be taken for each other."""
    context = length + 3 if subject.form == "cross" else None
    return subject.one_sequence(subject.inputs(batch, length, context))
