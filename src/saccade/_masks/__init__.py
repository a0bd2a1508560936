"""Masks: small values that say which keys a query may attend to. They compose with & | ~."""

from __future__ import annotations

from ._arbitrary import FromTensor, Predicate, as_mask
from ._documents import Documents
from ._mask import Mask, Tile
from ._padding import Padding
from ._relative import Causal, Fixed, Prefix, Strided, Window

__all__ = [
    "Causal",
    "Documents",
    "Fixed",
    "FromTensor",
    "Mask",
    "Padding",
    "Predicate",
    "Prefix",
    "Strided",
    "Tile",
    "Window",
    "as_mask",
]
