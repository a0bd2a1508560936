"""The checks, a file for each family, in the order in which they are run and reported. Files that are not in
`_IN_ORDER` are helpers of a check."""

from __future__ import annotations

from typing import Any

from ..subject._check import Check
from . import (
    _causal_blindness as causal_blindness,
    _causal_leak as causal_leak,
    _compile as compile,
    _dropout as dropout,
    _gradients as gradients,
    _model as model,
    _order as order,
    _padding as padding,
    _placement as placement,
    _precision as precision,
    _robustness as robustness,
    _scale as scale,
    _softmax as softmax,
    _weights as weights,
)
from .cache import _check as cache
from .mask_meaning import _check as mask_meaning
from .mixing import _check as mixing

_IN_ORDER: tuple[Any, ...] = (
    *(scale, softmax, causal_leak, causal_blindness, mask_meaning, padding, mixing, order, cache, precision, gradients),
    *(dropout, robustness, placement, compile, weights, model),
)
CHECKS: tuple[Check, ...] = tuple(module.CHECK for module in _IN_ORDER)
