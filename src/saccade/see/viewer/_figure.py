"""The map of one head as a figure for a paper: PNG or SVG, drawn by matplotlib (the ``plot`` extra)."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

import numpy as np

from ._axes import INK
from ._draw import draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..inspection import Look

MOST_WORDS = 60


def draw_figure(look: Look, kind: str) -> bytes:
    r"""Draw the map of ``look.layer``, ``look.head`` as a file of ``kind`` "png" (300 dots an inch) or "svg".

    A text of more than 60 words is cut to the most surprising ones and the words around them. The title gives their
    numbers, and lines separate the passages. Needs matplotlib.

    Example:
        >>> from saccade.inspection import look, open_model
        >>> from saccade.viewer import draw_figure
        >>> picture = draw_figure(look(open_model(), "The cat sat on the mat."), "png")
        >>> picture[:4]
        b'\x89PNG'
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = look.columns(MOST_WORDS)
    rows = look.looking(columns)
    labels = [look.seen.words[i].label for i in columns]
    weights = look.seen.weights[look.layer, look.head][np.ix_(rows, columns)]
    side = min(7.0, max(2.2, 0.24 * len(labels) + 0.9))  # inches; no wider than a page
    figure = Figure(figsize=(side + 0.9, side), layout="constrained")
    FigureCanvasAgg(figure)
    words = f"all {look.words:,} words" if look.is_all(columns) else look.part(columns)
    axes = draw(
        weights,
        queries=[look.seen.words[i].label for i in rows],
        keys=labels,
        title=f"layer {look.layer} head {look.head}\n{words}",
        ax=figure.add_subplot(),
        mask=~(look.seen.causal & np.less.outer(rows, columns)),
        limit=1.0,
    )
    later = look.seen.causal and len(rows) > 1
    axes.set_xlabel("looked at (key)" + "; grey: comes later, not seen" * later, fontsize=8)
    axes.set_ylabel("looks (query)", fontsize=8)
    _draw_breaks(axes, look.breaks(columns), [i for i in look.breaks(rows) if i])
    return saved(figure, kind)


def _draw_breaks(axes: Axes, keys: list[int], queries: list[int]) -> None:
    """Lines between the passages of the text."""
    for line, places in ((axes.axvline, keys), (axes.axhline, queries)):
        for place in places:
            line(place - 0.5, color=INK, linewidth=0.8, linestyle=(0, (4, 2)))


def saved(figure: Figure, kind: str) -> bytes:
    """A figure as the bytes of a "png", "svg" or "pdf": equal for equal figures, and marked as Saccade's."""
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # drawn as a box
        if kind == "svg":
            import matplotlib

            with matplotlib.rc_context({"svg.hashsalt": "saccade"}):
                figure.savefig(out, format="svg", metadata={"Title": "Saccade", "Creator": "Saccade", "Date": None})
        elif kind == "pdf":
            figure.savefig(out, format="pdf", metadata={"Creator": "Saccade", "CreationDate": None})
        else:
            figure.savefig(out, format="png", dpi=300, metadata={"Software": "Saccade"})
    return out.getvalue()
