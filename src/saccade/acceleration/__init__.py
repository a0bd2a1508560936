"""Models as they are, on Saccade's kernels: what they ask of F.scaled_dot_product_attention is answered by them.

Begin with `_acceleration.py`, the switch, then `_answers.py`. Imports the operator and `_hooks`.
"""

from __future__ import annotations

from ._acceleration import Acceleration, accelerate

__all__ = ["Acceleration", "accelerate"]
