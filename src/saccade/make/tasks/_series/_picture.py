"""Errors of forecasts by step and by series as a table, and a picture of some windows.

Shape legend: F steps of the forecast, C series.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....support._tables import Table
from ._table import SeriesWindow, Windows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LISTED = 12  # series in a terminal
DRAWN = 3  # series of a picture
BEFORE = 2  # horizons of the past that are drawn
STYLES: tuple[dict[str, Any], ...] = (  # of the model and its baselines
    {"color": "tab:blue", "lw": 1.8},
    {"color": "tab:orange", "lw": 1.2, "ls": "--"},
    {"color": "tab:green", "lw": 1.2, "ls": "--"},
)
Scale = tuple[np.ndarray, np.ndarray]
"""Means and deviations (C,)."""


def forecast_table(steps: Mapping[str, Sequence[float]], series: Mapping[str, Mapping[str, float]]) -> str:
    """Errors at five steps, and of the first series."""
    count = len(steps["MSE"])
    chosen = sorted({max(1, round(count * part / 4)) for part in range(5)})
    at_steps = [[name, *(f"{errors[step - 1]:.4f}" for step in chosen)] for name, errors in steps.items()]
    of_series = {
        name: {title: f"{value:.4g}" for title, value in series[name].items()} for name in list(series)[:LISTED]
    }
    more = [f"and {len(series) - LISTED} more"] if len(series) > LISTED else []
    tables = Table(["step", *(f"{step:,}" for step in chosen)], at_steps), Table.of_named(of_series, "series")
    return "\n".join([*tables[0].lines(), "", *tables[1].lines(), *more])


def forecast_picture(
    data: Windows, forecasts: Mapping[str, Sequence[np.ndarray]], errors: Sequence[float], scale: Scale, kind: str
) -> bytes:
    """A "png" or "svg": truth and forecasts of the last windows that do not overlap, in the units of the series.

    Args:
        forecasts: scaled (F, C) of each window, by whose they are; the model's first.
        errors: of each series, (C,): the series with the least, the middle and the largest are drawn.
    """
    from matplotlib.figure import Figure

    numbers = [n for n in (len(data) - 1 - data.horizon, len(data) - 1) if n >= 0]
    chosen = _spread(errors)
    figure = Figure(figsize=(5.5 * len(numbers), 1.4 + 2.4 * len(chosen)), layout="constrained")
    grid = figure.subplots(len(chosen), len(numbers), squeeze=False)
    for row, series in enumerate(chosen):
        for column, number in enumerate(numbers):
            axes = grid[row][column]
            _draw(axes, data[number], series, {name: found[number] for name, found in forecasts.items()}, scale)
            axes.set_title(f"{data.table.names[series]}: MSE {errors[series]:.3f}", fontsize="medium", parse_math=False)
    which = "The last two windows that do not overlap" if len(numbers) > 1 else "The last window"
    told = f"{which}, of {len(data):,}\nMSE: this model's, of scaled values, over all windows"
    figure.suptitle(told, fontsize="medium")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    written = io.BytesIO()
    figure.savefig(written, format=kind, dpi=144)
    return written.getvalue()


def _spread(errors: Sequence[float]) -> list[int]:
    order = np.argsort(errors, kind="stable").tolist()
    places = np.linspace(0, len(order) - 1, min(DRAWN, len(order))).round().astype(int)
    return [order[place] for place in places]


def _draw(axes: Axes, window: SeriesWindow, series: int, forecasts: Mapping[str, np.ndarray], scale: Scale) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    table, (means, deviations) = window.table, scale
    dates: Any = table.dates.tz_localize(None).to_numpy()
    begin = max(window.start, window.now - BEFORE * window.horizon)
    axes.plot(dates[begin : window.end], table.values[begin : window.end, series], color="black", lw=1, label="truth")
    for (name, forecast), style in zip(forecasts.items(), STYLES, strict=False):
        values = forecast[:, series] * deviations[series] + means[series]
        axes.plot(dates[window.now : window.end], values, label=name, **style)
    axes.axvline(dates[window.now - 1], color="gray", lw=0.8, ls=":")
    locator = AutoDateLocator(maxticks=7)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.tick_params(axis="x", labelsize="small")
