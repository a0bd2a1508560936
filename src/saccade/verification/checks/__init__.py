"""The checks, a file for each family, in the order in which they are run and told."""

from __future__ import annotations

from typing import Any

from ..target._check import Check
from . import _causal_blindness as causal_blindness
from . import _causal_leak as causal_leak
from . import _compile as compile
from . import _dropout as dropout
from . import _gradients as gradients
from . import _order as order
from . import _padding as padding
from . import _placement as placement
from . import _precision as precision
from . import _robustness as robustness
from . import _scale as scale
from . import _softmax as softmax
from . import _weights as weights
from . import cache, mask_meaning, mixing, model

_IN_ORDER: tuple[Any, ...] = (
    *(scale, softmax, causal_leak, causal_blindness, mask_meaning, padding, mixing, order, cache, precision, gradients),
    *(dropout, robustness, placement, compile, weights, model),
)
CHECKS: tuple[Check, ...] = tuple(one.CHECK for one in _IN_ORDER)
