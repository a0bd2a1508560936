"""Statistics of attention weights without the matrix of them."""

from __future__ import annotations

from ._compute import statistics
from ._result import Statistics

__all__ = ["Statistics", "statistics"]
