"""One map of numbers on matplotlib's axes, with legible labels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ...support._numbers import hundredths, short_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACCENT, AGAINST, UNSEEN, INK = "#1c4ed8", "#b45309", "#e3e5e9", "#15171c"
LEAST_POINTS, MOST_POINTS = 5.0, 8.0  # of a label


def paint_map(
    axes: Axes,
    values: np.ndarray,
    labels: tuple[list[str] | None, list[str] | None],
    most: float,
    *,
    numbers: bool,
) -> Any:
    """(R, K) as cells of 0 or -most to most, with labels of rows and of keys. Returns the image, for a colour bar."""
    from matplotlib.ticker import MaxNLocator

    least = -most if np.nanmin(values, initial=0.0) < 0 else 0.0
    rows, columns = values.shape
    image = axes.imshow(
        np.ma.masked_invalid(values),
        cmap=colours(values),
        vmin=least,
        vmax=most or 1.0,
        interpolation="nearest",
        aspect="equal" if max(rows, columns) <= 6 * min(rows, columns) else "auto",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    label_axes(axes, *labels)
    if numbers:
        _write_numbers(axes, values, most or 1.0, signed=least < 0)
    return image


def colour_bar(axes: list[Any], image: Any) -> None:
    """A colour bar for these axes."""
    made = axes[0].figure.colorbar(image, ax=axes, shrink=0.5, aspect=18, pad=0.02)
    made.outline.set_visible(False)
    made.ax.tick_params(length=0, labelsize=7)


def colours(values: np.ndarray) -> Any:
    """White to blue; orange to white to blue for values of both signs. Hidden cells are grey."""
    from matplotlib.colors import LinearSegmentedColormap

    sides = [AGAINST, "#ffffff", ACCENT] if np.nanmin(values, initial=0.0) < 0 else ["#ffffff", ACCENT]
    return LinearSegmentedColormap.from_list("saccade", sides).with_extremes(bad=UNSEEN)


def label_axes(axes: Axes, queries: list[str] | None, keys: list[str] | None) -> None:
    """Put labels at the places 0, 1, ..., thinned until they are legible; dollar signs stay text. Without labels, put
    numbers."""
    axes.tick_params(length=0, labelsize=MOST_POINTS)
    axes.spines[:].set_visible(False)
    box = axes.get_position()
    width, height = axes.figure.get_size_inches() if hasattr(axes.figure, "get_size_inches") else (5.0, 5.0)
    if keys is not None:
        places, points = _thinned(len(keys), 72 * width * box.width)
        axes.set_xticks(places, [keys[i] for i in places], rotation=90, fontsize=points)
    if queries is not None:
        places, points = _thinned(len(queries), 72 * height * box.height)
        axes.set_yticks(places, [queries[i] for i in places], fontsize=points)
    for text in [*axes.get_xticklabels(), *axes.get_yticklabels()]:
        text.set_parse_math(False)


def _thinned(count: int, room: float) -> tuple[list[int], float]:
    """The indices of the labels that fit so many points, and their size."""
    pitch = room / max(1, count)
    step = max(1, math.ceil(1.1 * LEAST_POINTS / pitch))
    return list(range(0, count, step)), min(MOST_POINTS, max(LEAST_POINTS, pitch * step / 1.1))


def _write_numbers(axes: Axes, values: np.ndarray, most: float, *, signed: bool) -> None:
    for (q, k), value in np.ndenumerate(values):
        if np.isnan(value) or abs(value) < 0.05 * most:
            continue
        text = short_number(value) if 0 <= value <= 1 and not signed and hundredths(value) else f"{value:.2g}"
        colour = "white" if abs(value) > 0.5 * most else INK
        axes.text(k, q, text, ha="center", va="center", fontsize=6, color=colour)
