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
    """An element that any page can hold: the report's styles and its script cannot leave it, nor reach the page."""
    page = render_report(look, "in a notebook", most=MOST_WEIGHTS)
    title = f"What {look.model} attends to"
    return (
        f'<iframe title="{escape(title)}" sandbox="allow-scripts" srcdoc="{escape(page)}" '
        f'style="width:100%;height:{HEIGHT}px;border:0"></iframe>'
    )
