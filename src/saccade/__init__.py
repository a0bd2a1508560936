"""Self-attention for PyTorch: compute it, see it, verify it, choose the right variant, build with it."""

from __future__ import annotations

from . import _masks
from ._attention import attention, attention_with_lse, merge
from ._biases import ALiBi, RelativeBias
from ._dropout import Dropout
from ._explain import Plan, explain
from ._masks import *  # noqa: F403
from ._statistics import Statistics, statistics
from ._weights import attention_weights
from .accelerating import Acceleration, accelerate
from .verification import verify
from .watching import watch

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "Acceleration",
    "Dropout",
    "Plan",
    "RelativeBias",
    "Statistics",
    "accelerate",
    "attention",
    "attention_weights",
    "attention_with_lse",
    "explain",
    "merge",
    "statistics",
    "verify",
    "watch",
    *_masks.__all__,
]
