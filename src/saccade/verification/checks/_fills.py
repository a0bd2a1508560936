"""Fill values of hidden scores: numbers that logits reach in training, and rows that hold nothing else.

Shape legend: B batch, H heads, Lq / Lk lengths.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...support._numbers import rounded
from ..findings._finding import Finding
from ..tracing._trace import TracedAttention
from ..tracing._visible import attends

_REACHED = -1e5  # logits of trained models come near -1e4, and never near -1e9
_EXPONENT = 87.0  # exp(-87) is the smallest number of float32 that is not rounded off


def weak_fill(check: str, calls: Iterable[TracedAttention]) -> list[Finding]:
    """A warning if hidden scores hold a finite number that large logits can fall below; otherwise []."""
    for attention in calls:
        if (
            attention.logits is None
            or attention.logits.shape != attention.weights.shape
            or attention.normalised != "key"
        ):
            continue
        visible = attends(attention)
        hidden, others = attention.logits[~visible & attention.logits.isfinite()], attention.logits[visible]
        if not hidden.numel() or not others.numel() or float(fill := hidden.max()) < _REACHED:
            continue
        if float(fill) > float(others.min()) - _EXPONENT:
            continue  # the weights themselves are hidden, or a bias falls with the distance: there is no fill
        leaks = float(fill) + _EXPONENT
        return [
            Finding(
                check,
                check,
                "warning",
                f"Hidden scores are about {float(fill):.5g} in place of -inf: a row whose largest visible logit is "
                f"below {leaks:.5g} gives weight to hidden keys.",
                "Training can drive logits there: hidden positions are then attended to, and nothing raises.",
                'scores = scores.masked_fill(~mask, float("-inf"))  # or torch.finfo(scores.dtype).min',
                {"fill": rounded(float(fill)), "leaks_below": rounded(leaks)},
                attention.line("mask", "scores", "softmax"),
            )
        ]
    return []


def averages_all(traced: TracedAttention, rows: Tensor) -> bool:
    """Whether all keys have equal weight in these rows, (B, Lq) True = all keys are hidden."""
    weights = traced.weights.detach().double()
    if weights.shape[0] != rows.shape[0] or weights.shape[2] != rows.shape[1] or not rows.any():
        return False
    own = weights.transpose(1, 2)[rows.to(weights.device)]
    return bool((own > 0).all()) and bool(torch.allclose(own, torch.full_like(own, 1 / own.shape[-1]), atol=1e-6))


def averaging(check: str, what: str, traced: TracedAttention) -> Finding:
    """A note about rows for which `averages_all` holds."""
    return Finding(
        check,
        check,
        "note",
        f"{what} averages all keys, the hidden ones included: the number that fills hidden scores is the same "
        "in the whole row, and a softmax of equal scores is a mean.",
        "Outputs of such rows look like others, and change with what is hidden.",
        "weights = scores.softmax(-1).masked_fill(~mask.any(-1, keepdim=True), 0.0)",
        {"averages": True},
        traced.line("mask", "softmax"),
    )
