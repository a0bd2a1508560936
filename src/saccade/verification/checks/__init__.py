"""The checks, a file for each family, in the order in which they are run and told."""

from __future__ import annotations

from .._finding import Check
from . import (
    cache,
    causal_blindness,
    causal_leak,
    compile,
    dropout,
    gradients,
    mask_meaning,
    mixing,
    model,
    order,
    padding,
    placement,
    precision,
    robustness,
    scale,
    softmax,
    weights,
)

CHECKS: tuple[Check, ...] = (
    scale.CHECK, softmax.CHECK, causal_leak.CHECK, causal_blindness.CHECK, mask_meaning.CHECK, padding.CHECK,
    mixing.CHECK, order.CHECK, cache.CHECK, precision.CHECK, gradients.CHECK, dropout.CHECK, robustness.CHECK,
    placement.CHECK, compile.CHECK, weights.CHECK, model.CHECK,
)  # fmt: skip
