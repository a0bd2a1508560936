"""Measurements of heads, shown: maps with a number for each head, bars, and sentences.

`_terminal.py` prints results of `saccade.attribution`, `_sentences.py` summarises them, `_figure.py` draws them.
"""

from __future__ import annotations

from ._figure import draw_importance, draw_patching, draw_why
from ._sentences import importance_sentences, patching_sentences, rises
from ._terminal import print_attributed, print_importance, print_patching, print_roles, print_why

__all__ = [
    "draw_importance",
    "draw_patching",
    "draw_why",
    "importance_sentences",
    "patching_sentences",
    "print_attributed",
    "print_importance",
    "print_patching",
    "print_roles",
    "print_why",
    "rises",
]
