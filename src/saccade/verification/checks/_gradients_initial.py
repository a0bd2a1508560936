"""Initial weights that leave queries and keys without much gradient: one-hot softmaxes, logits of 0, outputs that
hardly depend on the input.

Shape legend: logits and weights (B, H, Lq, Lk).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ...support._restored import seeded
from ..findings._finding import Finding, Location
from ..subject._source import line_with
from ..subject._subject import Subject
from ..tracing._trace import measured
from ..tracing._visible import attentions_of

# For inputs of variance 1, logits of a usual initialisation have a standard deviation of 0.01 to 3. Above 12 the
# largest weight is 0.9 on average, and passes less than a tenth of the gradient: p (1 - p) < 0.1.
SATURATED_LOGITS, SATURATED = 12.0, 0.9
# A usual module's output differs between inputs by about its own size; with this share of it, gradients to the input
# are as small against those to the last bias.
VANISHING = 1e-4
_finding = partial(Finding, "gradients", "gradients")


def at_the_start(subject: Subject) -> Iterator[Finding]:
    """One finding or none about a module's initial weights: saturated softmax, zero logits or a vanishing output."""
    if subject.module is None or subject.form in ("attention", "tokens"):
        return
    finding = next(_of_logits(subject), None) or _vanishing(subject)
    if finding is not None:
        yield finding


def _of_logits(subject: Subject) -> Iterator[Finding]:
    """Softmaxes that are one-hot for inputs of variance 1, and logits that are all 0."""
    for attention in attentions_of(subject, subject.inputs(2, 7)):
        if attention.logits is None or attention.normalised != "key" or attention.source == "probed":
            continue
        weights = attention.weights.float()
        rows = (weights > 0).sum(-1) > 2
        finite = attention.logits[attention.logits.isfinite() & (attention.logits > -1e4)].float()
        if not rows.any() or finite.numel() < 2:
            continue
        top, spread = float(weights.amax(-1)[rows].mean()), float(finite.std())
        evidence = {"largest_weight": round(top, 5), "logits_std": round(spread, 5)}
        where = line_with(subject, r"init\.\w+_\(|\.(zero|fill|normal|uniform)_\(")
        where = where or attention.line("softmax", "scores")
        if top >= SATURATED and spread >= SATURATED_LOGITS:
            yield _finding(
                "error",
                f"For inputs of variance 1, logits have a standard deviation of {spread:.3g} and the largest weight of"
                f" a row is {top:.3g} on average: the softmax is saturated from the start.",
                "A saturated softmax passes almost no gradient to queries and keys: they are hardly trained.",
                "Scale the logits by D ** -0.5 and initialise the projections of queries and keys with a variance of"
                " 1 / embed_dim: nn.init.xavier_uniform_(self.q_proj.weight).",
                evidence,
                where,
            )
        elif float(finite.abs().max()) == 0:
            yield _no_logits(subject, evidence, where)


def _no_logits(subject: Subject, evidence: dict[str, Any], where: Location | None) -> Finding:
    """The finding for initial logits that are all 0. If only queries start at 0 (muP, arXiv 2203.03466), they change in
    the first step; if keys start at 0 as well, neither changes."""
    learns = _leaves_zero(subject)
    return _finding(
        "warning" if learns else "error",
        "All logits are 0 for random inputs: "
        + ("queries or keys are" if learns else "queries and keys are")
        + " 0 from the start, and "
        + ("the other of the two has no gradient." if learns else "neither has a gradient."),
        "Keys (or queries) do not learn until the other side is no longer 0."
        if learns
        else "The weights stay uniform: each output is always the mean of the values.",
        "Initialise both projections at random: nn.init.xavier_uniform_(self.q_proj.weight).",
        evidence,
        where,
    )


def _leaves_zero(subject: Subject) -> bool:
    """Whether a step against the gradient makes logits other than 0."""
    moved = subject.fresh()
    inputs = moved.inputs(2, 7)
    parameters = (
        [weight for weight in moved.module.parameters() if weight.requires_grad] if moved.module is not None else []
    )
    out = moved(inputs).out
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
    gradients = torch.autograd.grad((out * towards).sum(), parameters, allow_unused=True)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.sub_(gradient, alpha=0.01)
        after = measured(moved, inputs)
    return any(
        attention.logits is not None and bool(attention.logits[attention.logits.isfinite()].any())
        for attention in after
    )


def _vanishing(subject: Subject) -> Finding | None:
    """An output that hardly differs between inputs, in which the gradient must be as small."""
    with torch.no_grad(), seeded(0):
        before = subject(subject.inputs(2, 7)).out.double()
    with torch.no_grad(), seeded(0):
        other = subject(subject.inputs(2, 7, seed=5)).out.double()
    change, size = float((before - other).abs().mean()), float(before.abs().mean())
    if not 0 < change < VANISHING * size:
        return None
    return _finding(
        "error",
        f"The output hardly depends on the input: for other inputs of variance 1 it differs by {change / size:.3g} of"
        " its size.",
        "Gradients shrink by as much: what lies before this module, and its own queries, keys and values, are hardly"
        " trained.",
        "Initialise the projections with a variance of 1 / embed_dim: nn.init.xavier_uniform_(weight), with its gain"
        " of 1.",
        {"relative_change": change / size},
        line_with(subject, r"init\.\w+_\("),
    )
