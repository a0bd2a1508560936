"""Whether heads, projections and batch items are kept apart and joined as promised."""

from __future__ import annotations

from ._check import CHECK

__all__ = ["CHECK"]
