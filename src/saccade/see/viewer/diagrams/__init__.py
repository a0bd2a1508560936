"""Diagrams of attention, drawn from a real module with its real shapes, parameter counts and numbers.

Begin with `_make.py`; each kind is a file that uses `_shapes.py`, `_canvas.py` and `_theme.py`. Imports `inspection`.
"""

from __future__ import annotations

from ._diagram import Diagram
from ._make import KINDS, diagram

__all__ = ["KINDS", "Diagram", "diagram"]
