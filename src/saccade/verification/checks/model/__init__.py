"""The parts of the check `model`: causality, padding, batches, caches, and the two halves of an encoder-decoder."""

from __future__ import annotations

from ._check import CHECK

__all__ = ["CHECK"]
