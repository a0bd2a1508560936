"""The map of one head as a figure for a paper: PNG or SVG, drawn by matplotlib (the ``plot`` extra)."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

import numpy as np

from ..inspection import hundredths, short_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..inspection import Look

MOST_WORDS = 60
_ACCENT, _UNSEEN = "#1c4ed8", "#e3e5e9"


def draw_figure(look: Look, kind: str) -> bytes:
    """The map of ``look.layer``, ``look.head`` as ``kind`` "png" (300 dots an inch) or "svg".

    A text of more than 60 words is cut to those around what tells most; the title says which words these are, and lines
    part the passages. Needs matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    columns = look.columns(MOST_WORDS)
    rows = look.looking(columns)
    labels = [look.seen.words[i].label for i in columns]
    weights = look.seen.weights[look.layer, look.head][np.ix_(rows, columns)]
    side = min(7.0, max(2.2, 0.24 * len(labels) + 0.9))  # inches; no wider than a page
    points = min(8.0, 72 * (side - 0.9) / len(labels))
    figure = Figure(figsize=(side + 0.9, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = LinearSegmentedColormap.from_list("saccade", ["#ffffff", _ACCENT]).with_extremes(bad=_UNSEEN)
    shown = np.ma.masked_where(look.seen.causal & np.less.outer(rows, columns), weights)
    image = axes.imshow(shown, cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    _label(axes, labels, [look.seen.words[i].label for i in rows], points, look.seen.causal)
    _draw_breaks(axes, look.breaks(columns), [i for i in look.breaks(rows) if i])
    if len(labels) <= 20:
        _write_numbers(axes, weights)
    bar = figure.colorbar(image, ax=axes, shrink=0.5, aspect=18, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=7)
    words = f"all {look.words:,} words" if look.is_all(columns) else look.part(columns)
    axes.set_title(f"layer {look.layer} head {look.head}\n{words}", fontsize=9, loc="left")
    return _saved(figure, kind)


def _draw_breaks(axes: Axes, keys: list[int], queries: list[int]) -> None:
    """A line where one passage of the text ends and another begins."""
    for draw, places in ((axes.axvline, keys), (axes.axhline, queries)):
        for place in places:
            draw(place - 0.5, color="#15171c", linewidth=0.8, linestyle=(0, (4, 2)))


def _label(axes: Axes, keys: list[str], queries: list[str], points: float, causal: bool) -> None:
    axes.set_xticks(range(len(keys)), keys, rotation=90, fontsize=points)
    axes.set_yticks(range(len(queries)), queries, fontsize=points)
    for text in [*axes.get_xticklabels(), *axes.get_yticklabels()]:
        text.set_parse_math(False)  # a dollar in the text is a dollar
    axes.tick_params(length=0)
    axes.set_xlabel("looked at (key)" + "; grey: comes later, not seen" * (causal and len(queries) > 1), fontsize=8)
    axes.set_ylabel("looks (query)", fontsize=8)
    axes.spines[:].set_visible(False)


def _write_numbers(axes: Axes, weights: np.ndarray) -> None:
    for (q, k), weight in np.ndenumerate(weights):
        if hundredths(weight) >= 5:
            axes.text(
                k,
                q,
                short_number(weight),
                ha="center",
                va="center",
                fontsize=6,
                color="white" if weight > 0.5 else "#15171c",
            )


def _saved(figure: Figure, kind: str) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # drawn as a box; no reason to fail
        if kind == "svg":
            import matplotlib

            with matplotlib.rc_context({"svg.hashsalt": "saccade"}):
                figure.savefig(out, format="svg", metadata={"Title": "Saccade", "Creator": "Saccade", "Date": None})
        else:
            figure.savefig(out, format="png", dpi=300, metadata={"Software": "Saccade"})
    return out.getvalue()
