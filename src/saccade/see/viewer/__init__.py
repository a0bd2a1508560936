"""Showing results: in a terminal, as an offline page, as a figure for a paper, as numbers, in a viewer.

Begin with `_report.py`; `maps` and `server` make up the viewer, `diagrams` draws models, `_draw.py` draws numbers that
are passed to it, `steps` shows one head for one word. Imports `inspection` and `monitoring`. Names are imported when
they are first used, as those of `saccade` are.
"""

from __future__ import annotations

__all__ = [
    "Viewer",
    "as_json",
    "draw",
    "draw_figure",
    "render_report",
    "render_steps",
    "step",
    "steps_as_text",
    "view",
]

_HOMES = {
    "Viewer": "server",
    "as_json": "_json",
    "check_target": "_files",
    "draw": "_draw",
    "draw_figure": "_figure",
    "framed": "_report",
    "framed_steps": "steps._page",
    "print_look": "_terminal",
    "print_steps": "steps._text",
    "render_report": "_report",
    "render_steps": "steps._page",
    "step": "steps._step",
    "steps_as_text": "steps._text",
    "view": "server",
    "write_whole": "_files",
}

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._draw import draw
    from ._figure import draw_figure
    from ._files import check_target as check_target, write_whole as write_whole
    from ._json import as_json
    from ._report import framed as framed, render_report
    from ._terminal import print_look as print_look
    from .server import Viewer, view
    from .steps._page import framed_steps as framed_steps, render_steps
    from .steps._step import step
    from .steps._text import print_steps as print_steps, steps_as_text
else:
    from ...support._lazy_names import lazy_names

    __getattr__ = lazy_names(__name__, _HOMES)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
