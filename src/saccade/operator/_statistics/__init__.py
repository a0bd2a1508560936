"""Statistics of attention weights without the matrix of them.

Begin with `_compute.py`, which chooses between `_fused` (native kernels), `_tiled` and `_dense`; `_steps` joins steps
of decoding. Imports the operator.
"""

from __future__ import annotations

from ._compute import statistics
from ._result import Statistics
from ._steps import StepNumbers, step_numbers, together

__all__ = ["Statistics", "StepNumbers", "statistics", "step_numbers", "together"]
