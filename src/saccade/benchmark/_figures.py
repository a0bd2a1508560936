"""Shared by the figures of all benchmarks (the `plot` extra)."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKS = "osD^vP*X"


def new_figure(**settings: Any) -> Figure:
    """A figure for rendering without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(**settings)
    FigureCanvasAgg(figure)
    return figure


def rendered(figure: Figure, kind: str) -> bytes:
    """The figure as "png" or "svg", without a date: equal results give equal files."""
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "saccade"}):
        figure.savefig(out, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else {})
    return out.getvalue()


def style(axes: Axes) -> None:
    """Apply the common style: small numbers, a thin grid, no frame at the top and on the right."""
    axes.tick_params(labelsize=7)
    axes.grid(True, which="major", lw=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def without_zeros(text: str) -> str:
    """Remove trailing zeros: `2.00 ms` becomes `2 ms`."""
    return text.replace(".00 ", " ").replace(".0 ", " ")
