"""Models as they are, on Saccade's kernels: what they ask of F.scaled_dot_product_attention is answered by them."""

from __future__ import annotations

from ._acceleration import Acceleration, accelerate

__all__ = ["Acceleration", "accelerate"]
