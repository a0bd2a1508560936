"""Statistics of attention weights without the matrix of them.

Begin with `_compute.py`, which chooses between `_fused` (native kernels), `_tiled` and `_dense`. Imports the operator.
"""

from __future__ import annotations

from ._compute import statistics
from ._result import Statistics

__all__ = ["Statistics", "statistics"]
