"""Self-attention for PyTorch: compute it, see it, verify it, choose the right variant, build with it."""

from __future__ import annotations

from ._attention import attention

__all__ = ["attention"]
__version__ = "0.1.0"
