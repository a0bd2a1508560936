"""Self-attention for PyTorch: compute it, see it, verify it, choose the right variant, build with it."""

from __future__ import annotations

from . import _masks
from ._attention import attention, attention_with_lse, merge
from ._biases import ALiBi, RelativeBias
from ._dropout import Dropout
from ._masks import *  # noqa: F403

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "Dropout",
    "RelativeBias",
    "attention",
    "attention_with_lse",
    "merge",
    *_masks.__all__,
]
