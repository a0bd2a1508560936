"""The map of one head as a figure for a paper: PNG or SVG, drawn by matplotlib (the ``plot`` extra)."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

import numpy as np

from ..looking import hundredths, short_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..looking import Look

MOST_WORDS = 60
_ACCENT = "#1c4ed8"


def draw_figure(look: Look, kind: str) -> bytes:
    """The map of ``look.layer``, ``look.head`` as ``kind`` "png" (300 dots an inch) or "svg".

    A text of more than 60 words is cut to the stretch in which the head is most telling. Needs matplotlib.
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
    colours = LinearSegmentedColormap.from_list("saccade", ["#ffffff", _ACCENT])
    shown = np.ma.masked_where(look.seen.causal & np.less.outer(rows, columns), weights)
    image = axes.imshow(shown, cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    _label(axes, labels, [look.seen.words[i].label for i in rows], points)
    if len(labels) <= 20:
        _write_numbers(axes, weights)
    bar = figure.colorbar(image, ax=axes, shrink=0.5, aspect=18, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=7)
    axes.set_title(f"layer {look.layer} head {look.head}", fontsize=9, loc="left")
    return _saved(figure, kind)


def _label(axes: Axes, keys: list[str], queries: list[str], points: float) -> None:
    axes.set_xticks(range(len(keys)), keys, rotation=90, fontsize=points)
    axes.set_yticks(range(len(queries)), queries, fontsize=points)
    for text in [*axes.get_xticklabels(), *axes.get_yticklabels()]:
        text.set_parse_math(False)  # a dollar in the text is a dollar
    axes.tick_params(length=0)
    axes.set_xlabel("looked at (key)", fontsize=8)
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
