"""Attention step by step, shown: as text in a terminal, and as one offline page with switches.

Begin with `_text.py`; the page's script is `client/src/step.ts`. Imports `inspection`.
"""

from __future__ import annotations

from ._page import framed_page, render_page
from ._text import as_text, print_steps

__all__ = ["as_text", "framed_page", "print_steps", "render_page"]
