"""Dropout: on the weights, scaled, in training and only there.

Every rate that the target declares is set to `RATE` and one call is followed through all its operations, so that a
dropout is found by what it does and not by what it is called.

Shape legend: (..., Lq, Lk) of weights, as they enter the product with the values.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..findings._finding import Finding, Inapplicable, TargetError
from ..subject._check import Check
from ..subject._source import DropoutRate, attribute_line, rates_of, with_rates
from ..subject._subject import Subject
from ..tracing._randomness import FollowedCall, RandomDraw, WeightedValues, drops, follow_randomness

_error = partial(Finding, "dropout", "dropout", "error")

# Not a half: there p and 1 - p, kept and dropped, could not be told apart.
RATE = 0.25
LENGTH = 7
DRAWS = 16
# Standard deviations of the share that is kept; beyond this by chance once in 10^9 verifications.
FAR = 6.0
_TRAINING = ("training", "train", "is_training")


def _run(subject: Subject) -> Iterator[Finding]:
    rates = rates_of(subject)
    inputs = subject.inputs(2, LENGTH)
    unasked = _with_default(subject)
    if unasked is not None:
        findings = list(_in_eval(unasked, follow_randomness(unasked, inputs)))
        if findings:
            yield from findings
            return
    findings = list(_under_a_mask(subject))
    if findings:
        yield from findings
        return
    quiet = follow_randomness(subject, inputs)
    on, off = _on_and_off(subject, rates)
    if on is None:
        if not drops(quiet.draws):
            raise Inapplicable("it has no dropout")
        on = off = subject
    still = follow_randomness(off, inputs)
    findings = list(_in_eval(off, still))
    if findings:
        yield from findings
        return
    with on.training():
        runs = [follow_randomness(on, inputs, seed=seed) for seed in range(DRAWS)]
    findings = list(_wrong_place(runs)) or list(_on_weights(runs, still, bool(rates)))
    yield from findings or _inactive(subject, rates, runs)


def _on_and_off(subject: Subject, rates: tuple[DropoutRate, ...]) -> tuple[Subject | None, Subject]:
    """The subject with dropout on (None if it has no dropout), and the subject with the same rates in a call that must
    not drop: a module in eval mode, a function with training=False."""
    if subject.module is not None:
        with subject.training():
            drawn = follow_randomness(subject, subject.inputs(2, LENGTH)).draws
        on = with_rates(subject, rates, RATE) if rates else subject if drawn else None
        return on, on or subject
    return _by_argument(subject)


def _under_a_mask(subject: Subject) -> Iterator[Finding]:
    """Dropout in eval mode in calls with a mask, which may take another path."""
    inputs = subject.inputs(2, LENGTH)
    masks: dict[str, Any] | None = next(subject.masks(inputs), None)
    if masks is None:
        return
    try:
        if not drops(follow_randomness(subject, inputs).draws):
            yield from _in_eval(subject, follow_randomness(subject, inputs, **masks), " and a mask", **masks)
    except (Inapplicable, TargetError):
        return  # what masks it takes is another promise


def _with_default(subject: Subject) -> Subject | None:
    """The subject with the default of its rate argument, if it has no argument for train mode."""
    rate, training, default = _arguments(subject)
    if rate is None or training is not None:
        return None
    return subject.with_constants(**{rate: default}) if isinstance(default, float) and default > 0 else None


def _arguments(subject: Subject) -> tuple[str | None, str | None, Any]:
    """The arguments for the dropout rate and for train mode, and the default of the rate."""
    try:
        parameters = inspect.signature(subject.reading.call or subject.target).parameters
    except (TypeError, ValueError):
        return None, None, None
    rate = next((name for name in parameters if "drop" in name.lower() or name == "p"), None)
    training = next((name for name in parameters if name in _TRAINING), None)
    return rate, training, None if rate is None else parameters[rate].default


def _by_argument(subject: Subject) -> tuple[Subject | None, Subject]:
    rate, training, _ = _arguments(subject)
    if rate is None:
        return None, subject
    for value in (RATE, nn.Dropout(RATE)):
        on = subject.with_constants(**{rate: value, **({training: True} if training else {})})
        try:
            drawn = follow_randomness(on, subject.inputs(2, LENGTH)).draws
        except TargetError:
            continue
        off = {rate: value, training: False} if training else {rate: type(value)(0.0)}
        return (on if drawn else None), subject.with_constants(**off)
    return None, subject


def _in_eval(off: Subject, still: FollowedCall, given: str = "", **masks: Any) -> Iterator[Finding]:
    if not drops(still.draws):
        return  # noise is told by robustness
    again = follow_randomness(off, off.inputs(2, LENGTH), seed=1, **masks).out
    if torch.equal(still.out, again):
        return
    draw = next(drawn for drawn in still.draws if drops((drawn,)))
    change = float((still.out - again).abs().max())
    where = "in eval mode" if off.module is not None else "without dropout being asked for"
    yield _error(
        f"Two calls {where} with the same input{given} differ by up to {change:.3g}: dropout stays active.",
        "Predictions are random and worse than they should be, validation losses too high.",
        "Pass the mode on: F.dropout(weights, self.p, training=self.training), or for F.scaled_dot_product_attention"
        " dropout_p=self.p if self.training else 0.0.",
        {"largest_difference": change, "draws": len(still.draws)},
        draw.location,
    )


def _wrong_place(runs: list[FollowedCall]) -> Iterator[Finding]:
    run = runs[0]
    if run.before_softmax:
        draw, how = run.before_softmax[0]
        what = "the queries or keys, before their product" if how == "product" else "the scores, before the softmax"
        yield _error(
            f"In training, dropout acts on {what}, not on the weights: no weight is dropped, all are disturbed.",
            "A dropped score becomes 0, which is a logit like any other: the key is still attended.",
            "Drop after the softmax: weights = self.dropout(scores.softmax(dim=-1)).",
            {"acts_on": how},
            draw.location,
        )
    elif any(product.on_values is not None and product.draw is None for product in run.products):
        draw_on_values = next(product.on_values for product in run.products if product.on_values is not None)
        yield _error(
            "In training, dropout acts on the values and not on the weights.",
            "Every query loses the same entries, which adds far more noise than dropping single weights.",
            "Drop the weights: self.dropout(weights) @ v.",
            {"acts_on": "values"},
            draw_on_values.location,
        )


def _on_weights(runs: list[FollowedCall], still: FollowedCall, declared: bool) -> Iterator[Finding]:
    for at, product in enumerate(runs[0].products):
        if product.draw is None:
            continue
        base = still.products[at] if len(still.products) == len(runs[0].products) else None
        factors = [_factors(run.products[at], base) for run in runs if len(run.products) > at]
        there = [factor for factor in factors if factor is not None]
        # a layer that is left out at random (layerdrop) moves all products after it to another place
        there = [tensor for tensor in there if tensor.shape == there[0].shape]
        finding = _finding_of(torch.stack(there), product.draw, declared) if there else None
        if finding is not None:
            yield finding
            return


def _factors(product: WeightedValues, base: WeightedValues | None) -> Tensor | None:
    """The factor of dropout for each weight, (..., Lq, Lk); NaN where the weight is negligible."""
    factor = _ratio(product)
    usual = None if base is None else _ratio(base)
    if factor is None or usual is None or usual.shape != factor.shape:
        return factor
    # what happens to weights without dropout, too (a mask after the softmax), is no dropout
    return torch.where(usual == 0, torch.nan, factor / usual)


def _ratio(product: WeightedValues) -> Tensor | None:
    weights, clean = product.weights, product.clean
    if clean is None or clean.shape != weights.shape:
        return None
    weights, clean = weights.double(), clean.double()
    return torch.where(clean > 1e-6, weights / clean, torch.nan)


def _finding_of(factors: Tensor, draw: RandomDraw, declared: bool) -> Finding | None:
    """The finding about factors of dropout (draws, ..., Lq, Lk); None without a fault."""
    there = ~factors.isnan()
    dropped = there & (factors.abs() < 1e-9)
    kept = factors[there & ~dropped]
    if not dropped.any() or not kept.numel():
        return None
    lowest, highest = float(kept.min()), float(kept.max())
    share = float(dropped.sum() / there.sum())
    if highest - lowest > 0.02 * highest:
        return _renormalised(lowest, highest, draw)
    whole = _dropped_together(dropped, there)
    if whole is not None:
        return _error(
            f"In training, dropout removes {whole}, not weights one by one.",
            "Removing them together adds far more noise than the rate suggests.",
            "Draw for each weight: weights = nn.functional.dropout(weights, p, self.training) on (B, H, Lq, Lk).",
            {"removes": whole, "share_dropped": round(share, 4)},
            draw.location,
        )
    factor = float(kept.mean())
    if declared and abs(share - (1 - RATE)) <= FAR * (RATE * (1 - RATE) / int(there.sum())) ** 0.5:
        return _error(
            f"In training, {share:.3g} of the weights are dropped, where the declared rate is {RATE}: p and 1 - p are"
            " swapped.",
            "At a rate of 0.1, nine of ten weights are dropped.",
            "PyTorch's p is the share to drop: F.dropout(weights, p=self.p), not 1 - self.p.",
            {"share_dropped": round(share, 4), "rate": RATE},
            draw.location,
        )
    expected = 1 - 1 / factor if factor >= 1 else -1.0
    deviation = (max(expected, 0.0) * (1 - max(expected, 0.0)) / int(there.sum())) ** 0.5
    if abs(share - expected) <= FAR * deviation:
        return None
    return _error(
        f"In training, {share:.3g} of the weights are dropped and the others multiplied by {factor:.3g}, where"
        f" 1 / (1 - {share:.3g}) = {1 / (1 - share):.3g} keeps what they sum to on average.",
        f"In eval mode the outputs are {1 / (factor * (1 - share)):.3g} times what training saw on average.",
        "Scale what is kept: weights * keep / (1 - p), with keep drawn with probability 1 - p, or nn.Dropout(p).",
        {"share_dropped": round(share, 4), "factor": round(factor, 4), "expected_factor": round(1 / (1 - share), 4)},
        draw.location,
    )


def _renormalised(lowest: float, highest: float, draw: RandomDraw) -> Finding:
    return _error(
        f"In training, the weights that dropout keeps are multiplied by {lowest:.3g} to {highest:.3g}, by another"
        " factor in each row, where one over the share that is kept is right for all of them.",
        "Rows are brought back to a sum of 1 after dropout: their average is no longer what eval mode computes.",
        "Leave the weights as nn.Dropout gives them: do not normalise after it.",
        {"smallest_factor": round(lowest, 4), "largest_factor": round(highest, 4)},
        draw.location,
    )


def _dropped_together(dropped: Tensor, there: Tensor) -> str | None:
    """Which weights are only dropped together, in words. dropped (draws, ..., Lq, Lk)"""

    def together(axis: int) -> bool:
        """Whether, along an axis, either all entries are dropped or none."""
        some = dropped.any(axis)
        none = (there & ~dropped).any(axis)
        return dropped.shape[axis] > 1 and bool((there.sum(axis) > 1).any()) and not bool((some & none).any())

    rows, keys = together(-1), together(-2)
    if rows and keys:
        return "whole heads"
    if rows:
        return "all weights of a query together"
    return "whole keys, for all queries together" if keys else None


def _inactive(subject: Subject, rates: tuple[DropoutRate, ...], runs: list[FollowedCall]) -> Iterator[Finding]:
    active = any(not torch.equal(runs[0].out, run.out) for run in runs[1:])
    on_weights = not runs[0].products or any(product.draw is not None for product in runs[0].products)
    modules = [rate for rate in rates if not rate.name]
    if not active:
        declared = modules or [rate for rate in rates if rate.value > 0]
        if declared:
            yield _unused(subject, declared[0], "Nothing is ever dropped.")
        return
    if on_weights:
        return
    for rate in modules:
        if not _has_effect(subject, rates, rate):
            yield _unused(subject, rate, "The weights are never dropped.")
            return


def _has_effect(subject: Subject, rates: tuple[DropoutRate, ...], rate: DropoutRate) -> bool:
    alone = with_rates(with_rates(subject, rates, 0.0), (rate,), RATE)
    with alone.training():
        return bool(follow_randomness(alone, alone.inputs(2, LENGTH)).draws)


def _unused(subject: Subject, rate: DropoutRate, then: str) -> Finding:
    owner = None if subject.module is None else subject.module.get_submodule(rate.owner.rpartition(".")[0])
    name = rate.name or rate.owner.rpartition(".")[2]
    return _error(
        f"`{rate}` is declared, but in train mode at a rate of {RATE} it changes nothing. {then}",
        "Training runs without the declared regularisation.",
        f"Apply it to the weights: weights = self.{name}(weights).",
        {"declared": str(rate), "rate": rate.value},
        attribute_line(owner, name),
    )


CHECK = Check(
    "dropout",
    "dropout",
    "Dropout drops and rescales single weights in training, and none in eval.",
    f"Every declared rate is set to {RATE}; calls in both modes are followed through all their operations, and the"
    " weights compared before and after dropout.",
    "Dropout in eval mode makes predictions random; dropout missing or unscaled in training makes them worse.",
    _run,
)
