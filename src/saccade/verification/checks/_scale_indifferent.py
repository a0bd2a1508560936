"""Weights that do not depend on queries, on keys, or on either: averages that only look like attention.

Shape legend: B batch, H heads, Lq / Lk lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..findings._finding import Inapplicable, Location, TargetError
from ..subject._inputs import NamedInputs
from ..subject._source import function_line
from ..subject._steady import exact, steady
from ..subject._subject import Subject
from ..tracing._flow import FlowStep, followed
from ..tracing._trace import TracedAttention, measured

Side = Literal["query", "key", "both"]
# Scores below this are a mask's, not a product's.
_HIDDEN = -5e3
# Of the largest logit, by how much those of other inputs differ where it is rounding alone.
_SAME = 1e-9
_MAKING = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
_MEETING = tuple("softmax matmul rmatmul bmm einsum mean cumsum sum fft fft_fft2".split())


@dataclass(frozen=True)
class ScaleIndifference:
    """Attention weights that do not depend on queries, keys or both."""

    of: Side
    line: Location | None
    multiplied: bool = False  # whether scores are multiplied by 0 on that line
    rows: tuple[int, ...] = ()  # the queries of which it is true; empty: all
    heads: tuple[int, ...] = ()  # the heads; empty: all
    pairs: bool = False  # whether single scores of these queries are meant
    length: int = 0  # of the queries
    of_heads: int = 0

    @property
    def partly(self) -> bool:
        return bool(self.rows or self.heads)


def indifferent(subject: Subject) -> ScaleIndifference | None:
    """The first attention of a target whose weights are the same for other queries, other keys or both; None if
    there is none, or where it cannot be determined."""
    try:
        subject = exact(subject)
        inputs = _inputs(subject)
        indifference = _by_sides(subject, inputs) or _by_logits(subject, inputs)
    except (Inapplicable, TargetError):
        return None
    return indifference


def _inputs(subject: Subject) -> NamedInputs:
    length = min(7, subject.reading.max_length or 7)
    return subject.inputs(2, length)


# By the sides: queries or keys that are given by themselves, and whose change changes nothing


def _by_sides(subject: Subject, inputs: NamedInputs) -> ScaleIndifference | None:
    sides: dict[Side, list[str]] = {"query": ["query", "x"], "key": ["key", "context"]}
    if subject.form not in ("attention", "qkv", "cross"):
        return None
    attentions = _attentions(subject, inputs)
    if len(attentions) != 1 or not bool(((attentions[0].weights > 0).sum(-1) > 1).any()):
        return None  # of several attentions one may rightly be of one side alone
    still: list[Side] = []
    for side, names in sides.items():
        other = _redrawn(inputs, names)
        if other is not None and _is_unchanged(subject, inputs, other, attentions[0], side):
            still.append(side)
    if not still:
        return None
    other = _redrawn(inputs, [name for name_side in still for name in sides[name_side]])
    zeroed = attentions[0].lines.get("zeroed") if len(still) == 2 else None
    line = zeroed or _losing_line(subject, inputs, other) or attentions[0].line("scores", "softmax")
    return ScaleIndifference(
        "both" if len(still) == 2 else still[0],
        line or _meeting_line(subject, inputs) or _first_line(subject),
        multiplied=zeroed is not None,
    )


def _is_unchanged(
    subject: Subject, inputs: NamedInputs, other: NamedInputs, traced: TracedAttention, side: Side
) -> bool:
    """Whether the traced weights are bit-identical after queries or keys are replaced. With inputs (x, context), a part
    of the target that is not traced may use them: another x must not change the output, and another context must change
    the values."""
    again = _attentions(subject, other)
    if len(again) != 1 or not _same(again[0].weights, traced.weights):
        return False
    if subject.form != "cross":
        return True
    if side == "query":
        return _same(steady(subject, inputs).out, steady(subject, other).out)
    new, two = again[0].value, traced.value
    return new is not None and two is not None and not _same(new, two)


def _same(tensor: Tensor, other: Tensor) -> bool:
    return torch.equal(tensor.nan_to_num(), other.nan_to_num())


def _attentions(subject: Subject, inputs: NamedInputs) -> tuple[TracedAttention, ...]:
    try:
        return measured(subject, inputs)
    except Inapplicable:
        return ()


def _redrawn(inputs: NamedInputs, names: Sequence[str]) -> NamedInputs | None:
    """The inputs with new random numbers in the tensors named; None if no such tensor is among them."""
    own = [name for name in names if name in inputs.tensors]
    generator = torch.Generator().manual_seed(3)

    def other(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)

    return inputs.map(other, own) if own else None


# By logits: they differ between two batch items of other numbers, in every row that has a choice


def _by_logits(subject: Subject, inputs: NamedInputs) -> ScaleIndifference | None:
    try:
        attentions = measured(subject, inputs)
    except Inapplicable:
        return _by_sums(subject, inputs)
    return next(filter(None, (_of_one(subject, inputs, attention) for attention in attentions)), None)


def _of_one(subject: Subject, inputs: NamedInputs, traced: TracedAttention) -> ScaleIndifference | None:
    if traced.logits is None or traced.normalised != "key":
        return None
    if not bool(traced.query.any()) or not bool(traced.key.any()):
        return None  # projections of zeros: the check of gradients names where they begin
    logits = traced.logits.detach().double()
    visible = (logits.isfinite() & (logits > _HIDDEN)).all(0)
    mean = torch.where(visible, logits, 0.0).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp_min(1)
    centred = torch.where(visible, logits - mean, 0.0)
    same = (centred - centred[:1]).abs() <= _SAME * centred.abs().amax().clamp_min(1.0)
    choosing = visible.sum(-1) > 1  # (H, Lq)
    still = same.all(-1).all(0) & choosing
    if not still.any():
        return _of_pairs(traced, logits)
    heads = still.any(-1)
    whole = bool((still == choosing)[heads].all())
    zeroed = traced.lines.get("zeroed")
    line = zeroed or (_losing_line(subject, inputs) if whole else None)
    return ScaleIndifference(
        "both",
        line or traced.line("scores", "softmax"),
        zeroed is not None,
        () if whole else _numbers(still.any(0)),
        () if bool(heads.all()) else _numbers(heads),
        length=logits.shape[-2],
        of_heads=len(heads),
    )


def _of_pairs(traced: TracedAttention, logits: Tensor) -> ScaleIndifference | None:
    """Single scores that are multiplied by 0 in every item and head, and keep their weight. Scores of later keys are
    left to the check of causal leaks."""
    if traced.zeroed is None:
        return None
    kept = traced.zeroed.all(0).all(0) & (logits == 0).all(0).all(0) & (traced.weights > 0).all(0).all(0)
    square = kept.shape[0] == kept.shape[1]
    if not kept.any() or (square and torch.equal(kept, kept.triu(1)) and bool(kept[0, 1:].all())):
        return None
    return ScaleIndifference(
        "both", traced.lines.get("zeroed"), True, _numbers(kept.any(-1)), pairs=True, length=logits.shape[-2]
    )


def _numbers(chosen: Tensor) -> tuple[int, ...]:
    return tuple(chosen.nonzero().flatten().tolist())


# By sums, where no scores are seen: what weighs values by fixed numbers is linear in its inputs


def _by_sums(subject: Subject, inputs: NamedInputs) -> ScaleIndifference | None:
    if subject.form not in ("self", "cross", "qkv"):
        return None
    other = _redrawn(inputs, list(inputs.tensors))
    assert other is not None
    both = replace(inputs, tensors={name: tensor + other[name] for name, tensor in inputs.tensors.items()})
    outs = [steady(subject, given).out.double() for given in (inputs, other, both, inputs.map(torch.zeros_like))]
    rest = (outs[2] - outs[0] - outs[1] + outs[3]).abs().max()
    near = 1e-9 if subject.dtype == torch.float64 else 1e-5
    if not bool(rest <= near * outs[2].abs().max()) or not _mixes(subject, inputs, outs[0]):
        return None
    return ScaleIndifference(
        "both", _losing_line(subject, inputs) or _meeting_line(subject, inputs) or _first_line(subject)
    )


def _mixes(subject: Subject, inputs: NamedInputs, out: Tensor) -> bool:
    moved = steady(subject, inputs.changed([0], "key")).out.double() != out
    return bool(moved[..., 1:, :].any())


def _meeting_line(subject: Subject, inputs: NamedInputs) -> Location | None:
    """The first line at which positions meet."""
    steps = followed(subject.fresh(), inputs, every=True).steps
    return next((step.location for step in steps if step.name in _MEETING and step.location is not None), None)


# The line


def _losing_line(subject: Subject, inputs: NamedInputs, other: NamedInputs | None = None) -> Location | None:
    """The first line whose arguments differ between these inputs, while its result does not."""
    other = other or _redrawn(inputs, list(inputs.tensors))
    assert other is not None
    try:
        steps, two = (followed(subject.fresh(), each, every=True).steps for each in (inputs, other))
    except (Inapplicable, TargetError):
        return None
    differing = {-1 - at for at, name in enumerate(inputs.tensors) if not torch.equal(inputs[name], other[name])}
    lost: list[FlowStep] = []
    for at, (first, second) in enumerate(zip(steps, two, strict=False)):
        if first.out.shape != second.out.shape or not torch.equal(first.out.nan_to_num(), second.out.nan_to_num()):
            differing.add(at)
        elif first.given & differing and first.location is not None:
            lost.append(first)
    lost.sort(key=lambda step: step.name in _MAKING)  # tensors that are made like another one come last
    return lost[0].location if lost else None


def _first_line(subject: Subject) -> Location | None:
    return function_line(subject.target if subject.module is None else type(subject.module).forward)
