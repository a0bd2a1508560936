"""What the figures of a benchmark share (the `plot` extra)."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKS = "osD^vP*X"


def new_figure(**settings: Any) -> Figure:
    """A figure that is drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(**settings)
    FigureCanvasAgg(figure)
    return figure


def rendered(figure: Figure, kind: str) -> bytes:
    """The figure as "png" or "svg". It holds no date: the same results are drawn as the same file."""
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "saccade"}):
        figure.savefig(out, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else {})
    return out.getvalue()


def style(axes: Axes) -> None:
    """Small numbers, a thin grid, no frame above and on the right."""
    axes.tick_params(labelsize=7)
    axes.grid(True, which="major", lw=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def without_zeros(text: str) -> str:
    """`2.00 ms` as `2 ms`."""
    return text.replace(".00 ", " ").replace(".0 ", " ")
