"""Heads as figures for a paper: a map of layers x heads for each number, drawn by matplotlib (the ``plot`` extra).

Shape legend: C calls, H heads of a call, R rows, K columns.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ....support._numbers import decimals_for, signed_cell
from ...attribution import Attribution, HeadImportance, Patching, WhyAttends
from .._axes import INK, colour_bar, paint_map
from .._figure import saved
from ._sentences import legend, rises
from ._terminal import layer_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CELL = 0.42  # inches, so that a number of four digits fits at 6 points
LEAST_WIDTH, MARGIN = 4.4, 1.6  # inches, of a panel and of the space beside its map
LINE, LETTER = 0.15, 0.053  # inches, of a title at 8 points
SIDE_BY_SIDE = 12  # columns up to which two maps stand beside each other
LARGEST = 7  # components of a side with their own lines


class _Panel(NamedTuple):
    """One map, (R, K), with its labels."""

    title: str
    values: np.ndarray
    rows: list[str]
    columns: list[str]
    sides: tuple[str, str] = ("layer", "head")
    most: float | None = None  # the number with the full colour; None is the largest of this map


def draw_importance(
    importance: HeadImportance, kind: str, measured: str, attributed: Attribution | None = None
) -> bytes:
    """The rise of the loss without each head, as ``kind`` "png" (300 dots an inch), "svg" or "pdf"; with `attributed`,
    beside it the contribution of each head to a token's logit."""
    how = ", first-order estimate" if importance.by == "gradient" else ""
    labels = layer_labels(importance.values.calls)
    panels = [
        _panel(f"rise of the loss without each head{how} (nats)\n{measured}", rises(importance).grid().numpy(), labels)
    ]
    if attributed is not None:
        panels.append(_of_attribution(attributed))
    return _drawn(panels, kind)


def draw_patching(patching: Patching, kind: str, measured: str) -> bytes:
    """The effects of each head, exactly and by gradient."""
    labels = layer_labels(patching.effects.calls)
    maps = [(patching.exact, "exact"), (patching.gradient, "by gradient")]
    panels = [
        _panel(f"share of the metric that each head restores, {way}\n{measured}", effects.grid().numpy(), labels)
        for effects, way in maps
        if effects is not None
    ]
    most = max(_most(panel.values) for panel in panels)
    return _drawn([panel._replace(most=most) for panel in panels], kind)


def draw_why(answer: WhyAttends, kind: str) -> bytes:
    """The logit over pairs of components: the largest of each side, and the others as one."""
    matrix, names = answer.matrix.numpy(), [str(component) for component in answer.components]
    rows, row_names = _largest(matrix, names)
    columns, column_names = _largest(matrix.T, names)
    values = rows @ matrix @ columns.T
    rather = "" if answer.against is None else f" rather than {answer.labels[answer.against]}"
    terms = "".join(
        f", {name} {value:+.2f}" for name, value in (("bias", answer.bias), ("softcap", answer.softcap)) if value
    )
    title = (
        f"head {answer.layer}.{answer.head}, "
        f"{answer.labels[answer.query]} attends to {answer.labels[answer.key]}{rather}\n"
        f"logit{rather and 's differ by'} {answer.logit:+.2f}{terms}, weight {answer.weight:.2f}"
    )
    sides = "contribution to the query", "contribution to the key"
    return _drawn([_Panel(title, values, row_names, column_names, sides)], kind)


def _of_attribution(attribution: Attribution) -> _Panel:
    values = attribution.head_map().numpy()
    rather = "" if attribution.against_text is None else f" rather than {attribution.against_text!r}"
    place = attribution.labels[attribution.position]
    title = f"contribution to the logit of {attribution.target_text!r}{rather}\nafter {place}"
    return _panel(title, values, [str(layer) for layer in range(len(values))])


def _panel(title: str, values: np.ndarray, layers: list[str]) -> _Panel:
    return _Panel(title, values, layers, [str(head) for head in range(values.shape[1])])


def _largest(matrix: np.ndarray, names: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """(R, C) the components of the matrix's rows that make up each line, and the lines' names."""
    count = len(names)
    if count <= LARGEST + 1:
        return np.eye(count), list(names)
    chosen = sorted(np.argsort(-np.abs(matrix).max(1), kind="stable")[:LARGEST].tolist())
    lines = np.eye(count)[chosen]
    return np.vstack([lines, 1 - lines.sum(0)]), [*(names[i] for i in chosen), f"{count - LARGEST} others"]


def _drawn(panels: Sequence[_Panel], kind: str) -> bytes:
    """All panels in one figure, each with white at 0."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = len(panels) > 1 and max(panel.values.shape[1] for panel in panels) <= SIDE_BY_SIDE
    widths = [max(LEAST_WIDTH, CELL * panel.values.shape[1] + MARGIN) for panel in panels]
    titles = [_wrapped(panel.title, width) for panel, width in zip(panels, widths, strict=True)]
    heights = [
        CELL * panel.values.shape[0] + 0.8 + LINE * len(title) for panel, title in zip(panels, titles, strict=True)
    ]
    size = (sum(widths), max(heights)) if across else (max(widths), sum(heights))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1 if across else len(panels), len(panels) if across else 1, squeeze=False)
    for axes, panel, title in zip(grid.flat, panels, titles, strict=True):
        _paint(axes, panel)
        axes.set_title("\n".join(title), fontsize=8, loc="left", parse_math=False)
    return saved(figure, kind)


def _paint(axes: Axes, panel: _Panel) -> None:
    most = panel.most or _most(panel.values) or 1.0
    image = paint_map(axes, panel.values, (panel.rows, panel.columns), most, numbers=False)
    axes.set_aspect("auto")  # a map of few heads is as wide as its title
    digits = decimals_for(most)
    for (row, column), value in np.ndenumerate(panel.values):
        ink = _ink(image.cmap(image.norm(value))[:3])
        axes.text(column, row, signed_cell(value, digits), ha="center", va="center", fontsize=6, color=ink)
    if max(map(len, panel.columns)) <= 2:
        axes.tick_params(axis="x", rotation=0)
    axes.set_ylabel(panel.sides[0], fontsize=8)
    meaning = legend(panel.values.flat, digits)
    axes.set_xlabel(panel.sides[1] + (f"  ({meaning})" if meaning else ""), fontsize=8)
    colour_bar([axes], image)


def _wrapped(title: str, width: float) -> list[str]:
    """The lines of a title above a map of so many inches, margins included."""
    letters = int((width - MARGIN) / LETTER)
    return [line for part in title.split("\n") for line in textwrap.wrap(part, letters)]


def _most(values: np.ndarray) -> float:
    return float(np.nanmax(np.abs(values), initial=0.0))


def _ink(ground: Sequence[float]) -> str:
    """Black or white, whichever has more contrast on a colour (relative luminance: WCAG 2.2)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in ground]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return INK if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "white"
