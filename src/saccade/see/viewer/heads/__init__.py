"""What heads are for, shown: maps of a number a head, bars, and sentences about both.

`_terminal.py` prints what `saccade.attribution` measured, `_sentences.py` says what stands out, `_figure.py` draws.
"""

from __future__ import annotations

from ._figure import draw_importance, draw_patching, draw_why
from ._sentences import importance_sentences, patching_sentences, rises
from ._terminal import print_attributed, print_importance, print_patching, print_why

__all__ = [
    "draw_importance",
    "draw_patching",
    "draw_why",
    "importance_sentences",
    "patching_sentences",
    "print_attributed",
    "print_importance",
    "print_patching",
    "print_why",
    "rises",
]
