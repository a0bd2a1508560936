"""The factor between queries times keys and the logits, measured.

Shape legend: B batch, H heads, Lq / Lk lengths, D / Dv head widths, E model width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..findings._finding import Finding, Unmeasured
from ..findings._words import spans
from ..subject._check import Check
from ..subject._inputs import NamedInputs
from ..subject._steady import first_taken
from ..subject._subject import Subject
from ..tracing._trace import TracedAttention, measured
from ..tracing._visible import attentions_of
from ._scale_indifferent import ScaleIndifference, indifferent

_error = partial(Finding, "scale", "scale", "error")
_warning = partial(Finding, "scale", "scale", "warning")

_LENGTHS = (11, 13, 17, 19, 23)
# Of the logits' variance, what may be left when the factor counts as known. Rounding leaves 1e-10.
_LEFT = 1e-3
_BENT = 1e-7
_WRONG = 0.01  # relative; a float32 product is right to 1e-6
_SATURATING = 2.0  # times too large: what is less than that is felt, and no more
# Scores below this are a mask's, not a product's.
_HIDDEN = -5e3
_FIX = "scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])"
_MEND_FUSED = "out = F.scaled_dot_product_attention(q, k, v)  # it divides by sqrt(q.shape[-1]) itself"


@dataclass(frozen=True)
class _ScaleFactors:
    """The factor of one attention computation, for each head."""

    attention: TracedAttention
    slopes: tuple[float, ...]  # of each head
    left: tuple[float, ...]  # share of the logits' variance that the factor does not explain
    by_query: tuple[float, float] | None  # smallest and largest, where each query has a factor of its own
    expected: float

    @property
    def known(self) -> list[int]:
        return [head for head, left in enumerate(self.left) if left < _LEFT]

    @property
    def straight(self) -> bool:
        """Whether logits are the product times a number to rounding, in every head."""
        return max(self.left) < _BENT

    @property
    def wrong(self) -> list[int]:
        return [head for head in self.known if abs(self.slopes[head] - self.expected) > _WRONG * abs(self.expected)]


def _run(subject: Subject) -> Iterator[Finding]:
    still = indifferent(subject)
    if still is not None and (subject.promise.scale != 0 or still.partly or still.of != "both"):
        yield _indifference(still)
    if still is not None:
        return
    subject, inputs = _test_inputs(subject)
    factors = [_factors(subject, attention) for attention in measured(subject, inputs)]
    if not all(factor.straight for factor in factors) and subject.form != "tokens":
        # a soft cap bends large logits; small ones it leaves straight
        small = [
            _factors(subject, attention) for attention in measured(subject, inputs.map(lambda tensor: tensor * 0.05))
        ]
        factors = small if any(factor.known for factor in small) else factors
    wrong = [factor for factor in factors if factor.wrong]
    if wrong:
        yield _finding(subject, inputs, wrong, factors)
    elif not any(factor.known for factor in factors):
        moving = next((factor for factor in factors if factor.by_query is not None), None)
        if moving is None:
            raise Unmeasured("its logits are not proportional to q.k, so they have no single scale")
        yield _varying(moving)


def _indifference(still: ScaleIndifference) -> Finding:
    """The finding about weights that do not depend on queries or keys."""
    names = {
        "query": "do not depend on the queries",
        "key": "do not depend on the keys",
        "both": "depend on neither queries nor keys",
    }
    whose = f" of queries {spans(still.rows)} (of {still.length})" if still.rows else ""
    whose += f" in heads {spans(still.heads)} (of {still.of_heads})" if still.heads else ""
    if still.pairs:
        message = f"Scores{whose} are multiplied by 0 and not hidden: these keys keep a weight, whatever they are."
    else:
        message = f"The weights{whose} {names[still.of]}: with others they are the same."
        message += " The scores are multiplied by 0, a mask that is False." if still.multiplied else ""
    fix = 'scores = scores.masked_fill(~mask, float("-inf"))  # before the softmax, in place of scores * mask'
    if not still.multiplied:
        fix = _FIX
        if still.of == "both":
            fix += "; if a plain average is intended, pass --scale 0, in Python Promise(scale=0)"
    return _error(
        message,
        "exp(0) is 1: a score of 0 does not hide a key, it only discards the product of query and key."
        if still.multiplied
        else "Each output is an average with weights that do not depend on it; the projections of queries or keys are "
        "never trained.",
        fix,
        {"depends_not_on": still.of, "multiplied": still.multiplied, "queries": still.rows, "heads": still.heads},
        still.line,
    )


def _test_inputs(subject: Subject) -> tuple[Subject, NamedInputs]:
    """Sizes that differ from one another and from all widths, as far as the target takes them."""
    reading = subject.reading
    heads = reading.heads
    taken = {reading.width, heads, reading.value_width, reading.context_width, reading.width // (heads or 1)}
    lengths = [length for length in _LENGTHS if length not in taken and length <= (reading.max_length or length)]
    length, other = (lengths + [reading.max_length or 2] * 2)[:2]
    tries: list[tuple[Subject, int, int | None]] = [(subject, length, other), (subject, length, None)]
    if reading.form == "attention" and reading.value_width is None:
        wider = replace(subject, reading=replace(reading, value_width=reading.width + 3))
        tries = [(wider, length, other), *tries]
    return first_taken([*tries, (subject, 7, None)])


def _factors(subject: Subject, traced: TracedAttention) -> _ScaleFactors:
    width = traced.query.shape[-1]
    expected = width**-0.5 if subject.promise.scale is None else subject.promise.scale
    heads = traced.query.shape[1]
    nothing = _ScaleFactors(traced, (math.nan,) * heads, (math.inf,) * heads, None, expected)
    if traced.logits is None or not traced.scaled > 0 or traced.logits.shape[-1] < 2:
        return nothing
    product = traced.query.detach().double() @ traced.key.detach().double().mT / traced.scaled
    logits = traced.logits.detach().double()
    visible = _visible(logits)
    slopes, left = _slopes(_centred(product, visible), _centred(logits, visible), (0, 2, 3))
    by_query = None if min(left) < _LEFT else _by_query(product, logits, visible)
    return _ScaleFactors(traced, tuple(slopes), tuple(left), by_query, expected)


def _visible(logits: Tensor) -> Tensor:
    """(1 or B, H, Lq, Lk) bool: finite scores that differ between items. Scores that a mask sets are the same in all
    items, or very low."""
    visible = logits.isfinite() & (logits > _HIDDEN)
    if len(logits) > 1:
        visible = visible.all(0, keepdim=True) & (logits != logits[:1]).any(0, keepdim=True)
    return visible


def _centred(scores: Tensor, visible: Tensor) -> Tensor:
    """The scores minus their mean over items (a bias) and over each row, which the softmax ignores."""
    scores = torch.where(visible, scores, 0.0)
    if len(scores) > 1:
        scores = scores - scores.mean(0, keepdim=True)
    return _without_rows(scores, visible)


def _without_rows(scores: Tensor, visible: Tensor) -> Tensor:
    """Subtract each row's mean over visible entries; 0 elsewhere."""
    scores = torch.where(visible, scores, 0.0)
    mean = scores.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(visible, scores - mean, 0.0)


def _slopes(product: Tensor, logits: Tensor, axes: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """The factor that explains most of the logits, and the share of their variance that it does not explain."""
    own, both, all_of_it = (
        (scores * other).sum(axes).flatten()
        for scores, other in ((product, product), (product, logits), (logits, logits))
    )
    slopes = both / own
    left = torch.where(all_of_it > 0, 1 - both**2 / (own * all_of_it), math.inf).clamp_min(0.0)
    return slopes.tolist(), left.nan_to_num(math.inf).tolist()


def _by_query(product: Tensor, logits: Tensor, visible: Tensor) -> tuple[float, float] | None:
    """The smallest and the largest factor of a query, where each query has one."""
    enough = (visible.sum(-1) > 2).expand(logits.shape[:-1]).flatten()
    both = _slopes(_without_rows(product, visible), _without_rows(logits, visible), (-1,))
    slopes, left = (torch.tensor(numbers)[enough] for numbers in both)
    if not len(slopes) or not bool((left < _LEFT).all()) or slopes.min() <= 0:
        return None
    return slopes.min().item(), slopes.max().item()


def _finding(
    subject: Subject, inputs: NamedInputs, wrong: Sequence[_ScaleFactors], factors: Sequence[_ScaleFactors]
) -> Finding:
    first = wrong[0]
    attention, heads = first.attention, first.wrong
    factor = first.slopes[heads[0]]
    designed = _by_design(attention)
    words = "" if designed else _explanation(factor, _known_mistakes(subject, inputs, attention))
    times = factor / (first.expected or math.nan)
    if not first.expected:
        words = "they should have no weight, but do"
    message = (
        f"Logits are {factor:.3g} times q.k, where {first.expected:.3g} is expected"
        f"{_expected(subject, attention)}{_wrong_heads(first)}{_computations(wrong, factors)}: "
        f"{words or f'{times:.3g} times the right factor'}."
    )
    return Finding(
        "scale",
        "scale",
        "note" if designed else "error",
        message + (f" {designed}" if designed else ""),
        "" if designed or not first.expected else _effect(times),
        "" if designed else _fix(attention),
        {
            "factor": factor,
            "expected": first.expected,
            "head_width": attention.query.shape[-1],
            "heads": heads,
            "of_heads": len(first.slopes),
            "times_too_large": times,
            "unexplained": first.left[heads[0]],
        },
        attention.line("scale", "scores"),
    )


def _by_design(traced: TracedAttention) -> str:
    """Why an unusual factor is intended; "" without evidence that it is."""
    if traced.mixed:
        return "A map mixes the scores of its heads (talking heads), and has a part in the factor."
    if traced.learned:
        return "It is multiplied by a parameter: a learned temperature."
    lengths = [side.detach().double().norm(dim=-1) for side in (traced.query / traced.scaled, traced.key)]
    if all(torch.allclose(length, torch.ones_like(length), rtol=0, atol=1e-3) for length in lengths):
        return "Queries and keys have length 1: cosine attention, which has a factor of its own."
    return ""


def _known_mistakes(subject: Subject, inputs: NamedInputs, traced: TracedAttention) -> list[tuple[float, str]]:
    """Factors that are written by mistake, and the meaning of each."""
    width, heads = traced.query.shape[-1], traced.query.shape[1]
    model = subject.reading.width if subject.form not in ("attention", "tokens") else heads * width
    named = [
        (1.0, "they are not scaled at all"),
        (width**0.5, f"they are multiplied by sqrt({width}) where they should be divided"),
        (1 / width, f"the scale is applied twice, or its square root is missing: 1/{width}"),
        (model**-0.5, f"they are divided by the root of the model width, {model}, not of the head width, {width}"),
    ]
    if traced.value is not None and traced.value.shape[-1] != width:
        values = traced.value.shape[-1]
        named.append((values**-0.5, f"they are divided by the root of the values' width, {values}"))
    named += [
        (heads**-0.5, f"they are divided by the root of the number of heads, {heads}"),
        (inputs.key_length**-0.5, f"they are divided by the root of the number of keys, {inputs.key_length}"),
        (inputs.length**-0.5, f"they are divided by the root of the number of queries, {inputs.length}"),
        (_batch_factor(subject, inputs), f"they are divided by the root of the batch size, {inputs.batch}"),
        ((width / 2) ** -0.5, f"sqrt(2) too large, as for half the head width, {width}"),
        ((2 * width) ** -0.5, f"sqrt(2) too small, as for twice the head width, {width}"),
        (1 / model, f"they are divided by the model width, {model}"),
        (width**-0.25, f"they are divided by the fourth root of the head width, {width}"),
    ]
    return named


def _batch_factor(subject: Subject, inputs: NamedInputs) -> float:
    """1 / sqrt(batch size) if the target's scale changes with the batch size, otherwise NaN. Two batch sizes are
    compared, because a factor in one batch may have another cause."""
    more = subject.inputs(inputs.batch + 1, inputs.length, inputs.key_length)
    factors = [_factors(subject, attention) for attention in attentions_of(subject, more)]
    moved = (abs(slope * more.batch**0.5 - 1) < _WRONG for factor in factors for slope in factor.slopes)
    return inputs.batch**-0.5 if any(moved) else math.nan


def _explanation(factor: float, named: Sequence[tuple[float, str]]) -> str:
    fits = [words for value, words in named if abs(factor / value - 1) < 5e-3 and not words.endswith(", 1")]
    if not fits and abs(factor / 0.125 - 1) < 5e-3:
        fits = ["they are always divided by 8, which is right for a head width of 64 alone"]
    return " (or ".join(fits[:2]) + (")" if len(fits) > 1 else "")


def _expected(subject: Subject, traced: TracedAttention) -> str:
    if subject.promise.scale is not None:
        return " (the declared scale)"
    return f", one over the root of the head width, {traced.query.shape[-1]}"


def _wrong_heads(factors: _ScaleFactors) -> str:
    wrong, heads = factors.wrong, len(factors.slopes)
    if heads == 1 or len(wrong) == len(factors.known) == heads:
        return ""
    listed = ", ".join(str(head) for head in wrong[:8])
    return f", in head{'s' if len(wrong) > 1 else ''} {listed} of {heads}"


def _computations(wrong: Sequence[_ScaleFactors], factors: Sequence[_ScaleFactors]) -> str:
    if len(factors) == 1:
        return ""
    if len({len(factor.slopes) for factor in factors}) > 1 or len(factors[0].slopes) == 1:  # heads that are modules
        heads = sum(len(factor.slopes) for factor in factors)
        return f", in {sum(len(factor.wrong) for factor in wrong)} of {heads} heads"
    return f", in {len(wrong)} of {len(factors)} attention computations"


def _effect(times: float) -> str:
    if times >= _SATURATING:
        return (
            f"Logits are {times:.3g} times too large: the softmax saturates on one key for most queries, "
            "hardly any gradient reaches these, and training is slow or stalls."
        )
    if times > 1:
        return (
            f"Logits are {times:.3g} times too large: attention is sharper than intended, by a factor that depends on "
            "the size, and weights of another implementation do not fit."
        )
    if times > 1 / _SATURATING:
        return (
            f"Logits are {1 / times:.3g} times too small: attention is flatter than intended, by a factor that depends "
            "on the size, and weights of another implementation do not fit."
        )
    return (
        f"Logits are {1 / times:.3g} times too small: all keys get nearly the same weight, and the projections must "
        "become large before attention can select keys."
    )


def _fix(traced: TracedAttention) -> str:
    line = traced.lines.get("scores")
    fused = line is not None and line == traced.lines.get("softmax") and "scaled_dot_product" in line.code
    return _MEND_FUSED if fused or traced.source == "F.scaled_dot_product_attention" else _FIX


def _varying(factors: _ScaleFactors) -> Finding:
    low, high = factors.by_query or (math.nan, math.nan)
    return _warning(
        f"The factor between q.k and the logits differs from query to query, from {low:.3g} to "
        f"{high:.3g}; one over the root of the head width is {factors.expected:.3g}.",
        "The weights depend on something besides queries and keys: the input's length or size. If "
        "this is not intended, a model trained at one length behaves differently at another.",
        _FIX,
        {"smallest": low, "largest": high, "expected": factors.expected},
        factors.attention.line("scale", "scores"),
    )


CHECK = Check(
    "scale",
    "scale",
    "In every head, logits are q.k over the square root of the head width.",
    "The logits that enter the softmax (or the logarithms of the weights that the outputs show) are compared with "
    "queries times keys, head by head, over a batch of random inputs; other queries and keys must give other weights.",
    "Without the right factor the softmax starts saturated or flat, and gradients to queries and keys vanish.",
    _run,
)
