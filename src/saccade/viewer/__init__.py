"""Showing what was seen: in a terminal, as one offline page, as a figure for a paper, as numbers, step by step.

Begin with `_report.py`; `_draw.py` draws numbers one has, `diagrams` models and their numbers, `steps` shows one head
for one word. Imports `inspection`. Names are imported when they are first used, as those of `saccade` are.
"""

from __future__ import annotations

__all__ = [
    "as_json",
    "check_target",
    "draw",
    "draw_figure",
    "framed",
    "framed_steps",
    "print_look",
    "print_steps",
    "render_report",
    "render_steps",
    "step",
    "steps_as_text",
    "write_whole",
]

_HOMES = {
    "as_json": "_json",
    "check_target": "_files",
    "draw": "_draw",
    "draw_figure": "_figure",
    "framed": "_notebook",
    "framed_steps": "steps._page",
    "print_look": "_terminal",
    "print_steps": "steps._text",
    "render_report": "_report",
    "render_steps": "steps._page",
    "step": "steps._step",
    "steps_as_text": "steps._text",
    "write_whole": "_files",
}

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._draw import draw
    from ._figure import draw_figure
    from ._files import check_target, write_whole
    from ._json import as_json
    from ._notebook import framed
    from ._report import render_report
    from ._terminal import print_look
    from .steps._page import framed_steps, render_steps
    from .steps._step import step
    from .steps._text import print_steps, steps_as_text
else:

    def __getattr__(name: str) -> object:
        """A public name, imported now and kept."""
        from importlib import import_module

        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
