"""Showing what was seen: in a terminal, as one offline page, as a figure for a paper, as numbers.

Begin with `_report.py`. Imports `inspection`.
"""

from __future__ import annotations

from ._draw import draw
from ._figure import draw_figure
from ._files import check_target, write_whole
from ._json import as_json
from ._notebook import framed
from ._report import render_report
from ._terminal import print_look

__all__ = ["as_json", "check_target", "draw", "draw_figure", "framed", "print_look", "render_report", "write_whole"]
