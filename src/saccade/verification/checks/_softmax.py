"""Whether the weights of each query are a distribution over the keys: the right axis, sums of one, no overflow.

Shape legend: B batch, H heads, Lq / Lk lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..findings._finding import Finding, Inapplicable, Location, TargetError, Unmeasured
from ..subject._check import Check
from ..subject._inputs import NamedInputs
from ..subject._steady import first_taken
from ..subject._subject import Subject
from ..tracing._trace import TracedAttention, measured, traced
from ..tracing._visible import attentions_of

_error = partial(Finding, "softmax", "softmax", "error")
_note = partial(Finding, "softmax", "softmax", "note")
_LENGTH, _KEYS = 7, 11
_LINES = ("softmax", "values", "scores")  # the first of these that is known is named
# Rows sum to one within this: weights rounded to bfloat16 are off by 0.004, which is a matter of precision.
_OFF = 0.01
# exp of float32 overflows above 88.7; with logits beyond this it does, and a softmax over them does not.
_LARGE = 120.0
_SPREADS = (30.0, 300.0, 3000.0)
_FIX = "weights = torch.softmax(scores, dim=-1)"
_STABLE = "weights = torch.softmax(scores, dim=-1)  # or subtract scores.amax(dim=-1, keepdim=True) before torch.exp"
_NO_DISTRIBUTION = (
    "The output is not an average of the values: its size changes with the number "
    "of keys and with the logits, so later layers see different magnitudes for every sequence."
)


def _run(subject: Subject) -> Iterator[Finding]:
    subject, inputs = _test_inputs(subject)
    attentions: tuple[TracedAttention, ...] = ()
    try:
        attentions = measured(subject, inputs)
    except Inapplicable as reason:
        defect = _of_values(subject, inputs, str(reason))
    else:
        named = [defect for attention in attentions if (defect := _of_weights(attention)) is not None]
        named.sort(key=lambda finding: finding.severity != "error")
        defect = named[0] if named and _is_repeatable(subject, inputs, attentions) else None
    if attentions and (defect is None or defect.severity != "error"):
        defect = _under_a_mask(subject, inputs) or _overflow(subject, inputs, attentions) or defect
    if defect is not None:
        yield defect


def _test_inputs(subject: Subject) -> tuple[Subject, NamedInputs]:
    """Different lengths for queries and keys, if the target accepts them, so that axes cannot be confused."""
    length = min(_LENGTH, subject.reading.max_length or _LENGTH)
    return first_taken([(subject, length, _KEYS), (subject, length, None)])


def _under_a_mask(subject: Subject, inputs: NamedInputs) -> Finding | None:
    """The axis of the softmax in calls with a mask, which may take another path."""
    masks: dict[str, Tensor] = {}
    if subject.takes("Q"):
        masks["pairs"] = torch.ones(inputs.length, inputs.key_length, dtype=torch.bool)
        masks["pairs"][0, -1] = False
    elif subject.takes("B"):
        masks["padding"] = torch.ones(inputs.batch, inputs.key_length, dtype=torch.bool)
        masks["padding"][0, -1] = False
    else:
        return None
    try:
        with torch.no_grad():
            attentions = traced(subject.fresh(), inputs, **masks).attentions
    except (Inapplicable, TargetError):
        return None
    across = [attention for attention in attentions if attention.normalised in ("query", "head", "batch")]
    defects = [_wrong_axis(attention, attention.weights.detach().double().nan_to_num(0.0)) for attention in across]
    defect = next((finding for finding in defects if finding is not None), None)
    if defect is None:
        return None
    words = defect.message
    return replace(defect, message=f"Where a mask is given, {words[0].lower()}{words[1:]}")


def _is_repeatable(subject: Subject, inputs: NamedInputs, calls: tuple[TracedAttention, ...]) -> bool:
    """Whether a second call has the same weights. If not, dropout in eval mode changes them."""
    again = measured(subject, inputs)
    pairs = zip(calls, again, strict=True)
    return all(
        torch.equal(attention.weights.nan_to_num(-1.0), other.weights.nan_to_num(-1.0)) for attention, other in pairs
    )


def _of_weights(traced: TracedAttention) -> Finding | None:
    """Faults in the weights of one attention computation."""
    weights = traced.weights.detach().double()
    if traced.in_pieces:
        return None
    if traced.normalised in ("query", "head", "batch"):
        # over another axis than the keys, a causal mask hides whole slices, which then are NaN
        return _wrong_axis(traced, weights.nan_to_num(0.0))
    if not weights.isfinite().all():
        return None  # other checks tell of NaN at common magnitudes
    if _is_twice(traced, weights):
        return _error(
            f"The weights are the softmax of a softmax: they lie between {weights.min():.3g} and {weights.max():.3g} "
            f"over {weights.shape[-1]} keys.",
            "All keys get nearly the same weight, whatever the logits: attention cannot select keys.",
            _FIX,
            {"smallest": weights.min().item(), "largest": weights.max().item()},
            traced.line(*_LINES),
        )
    sums = weights.sum(-1)
    seeing = (weights != 0).any(-1)
    if bool(((sums - 1).abs() < _OFF)[seeing].all()):
        return None
    return _sink(traced, sums) or _wrong_sums(traced, weights, sums, seeing)


def _wrong_axis(traced: TracedAttention, weights: Tensor) -> Finding | None:
    sums, names = weights.sum(-1), {"query": "queries", "head": "heads", "batch": "batch items"}
    if bool(((sums - 1).abs() < _OFF).all()):
        return None  # normalised once more, or of one key
    axis, over = {"query": (2, "query"), "head": (1, "head"), "batch": (0, "item")}[traced.normalised]
    across = weights.sum(axis)
    return _error(
        f"The softmax runs over the {names[traced.normalised]}, not over the keys: the weights of query 0 (head 0, "
        f"item 0) sum to {sums[0, 0, 0]:.3g} over its {weights.shape[-1]} keys, and those of one key to "
        f"{across.flatten()[0]:.3g} over the {names[traced.normalised]}.",
        {
            "query": "Queries compete for keys, instead of keys for a query: an output's size depends on the other "
            "queries, and under a causal mask the past on the future.",
            "head": "Heads compete for each pair, instead of keys for a query: outputs are not averages of values.",
            "batch": "Batch items compete with one another: an output depends on what else is in the batch.",
        }[traced.normalised],
        _FIX,
        {"axis": traced.normalised, "row_sum": sums[0, 0, 0].item(), f"sum_over_{over}": across.flatten()[0].item()},
        traced.line(*_LINES),
    )


def _is_twice(traced: TracedAttention, weights: Tensor) -> bool:
    if traced.logits is None or weights.shape[-1] < 2 or traced.normalised != "key":
        return False
    once = traced.logits.detach().double().softmax(-1)
    apart = (once - once.softmax(-1)).abs().max()
    return bool(apart > _OFF) and bool(torch.allclose(weights, once.softmax(-1), rtol=0, atol=1e-5))


def _sink(traced: TracedAttention, sums: Tensor) -> Finding | None:
    """Rows that sum to less than one by design: a number for each head or query is added to the denominator."""
    if traced.logits is None or bool((sums > 1 + 1e-6).any()) or bool((sums <= 0).any()):
        return None
    logits = traced.logits.detach().double()
    if torch.equal(logits, traced.weights.log().double()):
        return None  # known up to a constant alone
    rest = ((1 - sums) / sums).log() + logits.logsumexp(-1)
    exact = torch.allclose(traced.weights.double(), logits.softmax(-1) * sums[..., None], rtol=1e-3, atol=1e-6)
    same = (rest - rest.mean((0, 2), keepdim=True)).abs().max() < _OFF * 10
    if not exact or not (bool(same) or traced.joined):
        return None
    added = f"exp({rest[0, 0].mean():.3g})" if same else "a number of each query's own, one more column of the softmax,"
    return _note(
        f"The weights of a query sum to less than 1, to {sums.min():.3g} and up: {added} is added "
        "to the denominator of every row, a sink.",
        "This is a design of its own (a learned sink, or softmax with one added), which lets a head attend to nothing.",
        "",
        {"smallest_sum": sums.min().item(), "sink": rest.mean((0, 2)).tolist()},
        traced.line(*_LINES),
    )


def _wrong_sums(traced: TracedAttention, weights: Tensor, sums: Tensor, seeing: Tensor) -> Finding:
    """Rows that sum to something else, and why, as far as it can be determined."""
    off = torch.where(seeing, (sums - 1).abs(), 0.0)
    item, head, row = (int(index) for index in torch.unravel_index(off.argmax(), off.shape))
    low, high = sums[seeing].min().item(), sums[seeing].max().item()
    why, fix, line = _explanation(traced, weights, sums)
    return _error(
        f"The weights of query {row} (head {head}, item {item}) sum to {sums[item, head, row]:.3g} over its "
        f"{weights.shape[-1]} keys, where 1 is expected; all sums lie between {low:.3g} and {high:.3g}. {why}".strip(),
        _NO_DISTRIBUTION,
        fix,
        {
            "query": row,
            "head": head,
            "item": item,
            "sum": sums[item, head, row].item(),
            "smallest": low,
            "largest": high,
        },
        line,
    )


def _explanation(traced: TracedAttention, weights: Tensor, sums: Tensor) -> tuple[str, str, Location | None]:
    before = traced.softened
    if before is None and traced.logits is None:
        line = traced.line("function", "values")
        return "No softmax was seen between the scores and their product with the values.", _FIX, line
    if before is not None and torch.allclose(before.double().sum(-1), torch.ones_like(sums), rtol=0, atol=_OFF):
        dropped = (weights == 0) & (before != 0)
        if dropped.any() and torch.allclose(weights[~dropped], before.double()[~dropped], rtol=1e-4, atol=1e-7):
            return (
                f"The softmax is right, and {int(dropped.sum())} of its weights are set to 0 after it: they have to be "
                "hidden before it.",
                'scores = scores.masked_fill(~mask, float("-inf"))  # before the softmax',
                traced.line("mask", *_LINES),
            )
        return (
            "The softmax gives rows that sum to 1, and they are changed after it.",
            _FIX,
            traced.line("after", *_LINES),
        )
    return "", _FIX, traced.line("sum", *_LINES)


def _of_values(subject: Subject, inputs: NamedInputs, reason: str) -> Finding | None:
    """Attention whose weights cannot be traced: with equal values the output must equal them."""
    if subject.form != "attention":
        raise Unmeasured(reason)
    equal = inputs.map(torch.ones_like, ["value"])
    with torch.no_grad():
        out = subject(equal).out.double()
    off = (out - 1).abs()
    if not out.isfinite().all() or bool((off < _OFF).all()):
        return None
    item, head, row, channel = (int(index) for index in torch.unravel_index(off.argmax(), off.shape))
    return _error(
        f"With every value equal to 1, output {row} (head {head}, item {item}) is "
        f"{out[item, head, row, channel]:.3g}: the weights of a query do not sum to 1.",
        _NO_DISTRIBUTION,
        _FIX,
        {"output": out[item, head, row, channel].item()},
    )


def _overflow(subject: Subject, inputs: NamedInputs, common: tuple[TracedAttention, ...]) -> Finding | None:
    """Weights that are not finite for logits that overflow exp, in rows that are finite for usual logits."""
    if subject.form == "tokens":
        return None
    for spread in _SPREADS:
        attentions = attentions_of(subject, inputs.map(lambda tensor, by=spread: tensor * by))  # type: ignore[misc]
        if len(attentions) != len(common):
            return None
        tops = [_largest_logit(attention) for attention in attentions]
        for attention, before, top in zip(attentions, common, tops, strict=True):
            lost = ~attention.weights.isfinite() & before.weights.isfinite().all(-1, keepdim=True)
            if lost.any() and math.isfinite(top):
                return _not_finite(attention, top, int(lost.sum()))
        if max(tops) > _LARGE:
            return None
    return None


def _largest_logit(traced: TracedAttention) -> float:
    """The largest logit of queries and keys; computed from their product if the logits were not traced."""
    if traced.logits is not None and traced.source != "probed":
        finite = traced.logits[traced.logits.isfinite()]
        return finite.max().item() if len(finite) else math.inf
    product = (traced.query.double() @ traced.key.double().mT).abs().max().item() * traced.query.shape[-1] ** -0.5
    return product if math.isfinite(product) else math.inf


def _not_finite(traced: TracedAttention, top: float, lost: int) -> Finding:
    if top <= 0:  # something was subtracted
        return _error(
            f"With large inputs {lost} of {traced.weights.numel()} weights are NaN or infinite: all exponentials of a "
            "row are 0, and 0 / 0 is NaN, because the subtracted number is not the row's own largest logit.",
            "One row with large logits makes others NaN, and with them the training.",
            _STABLE,
            {"largest_logit": top, "not_finite": lost},
            traced.line(*_LINES),
        )
    return _error(
        f"With logits up to {top:.3g}, {lost} of {traced.weights.numel()} weights are NaN or infinite: the exponential "
        "overflows, as the largest logit of a row is not subtracted before it.",
        "Training diverges to NaN as soon as one logit passes 88.7 in float32, or 11 in float16.",
        _STABLE,
        {"largest_logit": top, "not_finite": lost},
        traced.line(*_LINES),
    )


CHECK = Check(
    "softmax",
    "softmax",
    "The weights of a query are a softmax over its keys: they sum to 1.",
    "The weights that multiply the values are followed through the call (or read from the outputs of unit vectors as "
    "values) and summed along every axis, for common and for very large logits.",
    "Otherwise an output is not an average of values: its size drifts with length, batch or logits, or it is NaN.",
    _run,
)
