"""Whether the mask says what its argument promises, and which other mask explains what is seen."""

from __future__ import annotations

from ._check import CHECK

__all__ = ["CHECK"]
