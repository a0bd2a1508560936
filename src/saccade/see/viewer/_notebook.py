"""A look in a notebook: the report, in a frame of its own."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ._report import render_report

if TYPE_CHECKING:
    from ..inspection import Look

MOST_WEIGHTS = 200_000  # a notebook keeps what it shows
HEIGHT = 720  # pixels; the report scrolls


def framed(look: Look) -> str:
    """An HTML element that shows a look in a notebook. Its styles and its script stay inside the frame.

    Example:
        >>> from saccade.inspection import look, open_model
        >>> from saccade.viewer import framed
        >>> framed(look(open_model(), "The cat sat on the mat.")).split(" srcdoc")[0]
        '<iframe title="What embedded model attends to" sandbox="allow-scripts"'
    """
    page = render_report(look, "in a notebook", most=MOST_WEIGHTS)
    title = f"What {look.model} attends to"
    return (
        f'<iframe title="{escape(title)}" sandbox="allow-scripts" srcdoc="{escape(page)}" '
        f'style="width:100%;height:{HEIGHT}px;border:0"></iframe>'
    )
