"""Whether decoding with a cache gives what one pass gives, and what a wrong cache has kept."""

from __future__ import annotations

from ._check import CHECK

__all__ = ["CHECK"]
