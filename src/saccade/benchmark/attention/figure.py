"""Time against length, both axes logarithmic, with the exponents that fit (the `plot` extra)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...support import _numbers
from .._figures import MARKS, new_figure, rendered, style, without_zeros
from .results import BenchmarkReport, Series, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(report: BenchmarkReport, kind: str) -> bytes:
    """A figure, `kind` "png" or "svg".

    Raises:
        ValueError: no contender was measured at two lengths or more.
    """
    curves = series(report)
    if not curves:
        raise ValueError("a plot needs measurements at two lengths or more")
    figure = new_figure(figsize=(5.2, 4.2 + 0.16 * len(curves)), layout="constrained")
    _panel(figure.subplots(), curves)
    figure.suptitle(_title(curves, report), fontsize=9)
    return rendered(figure, kind)


def _panel(axes: Axes, series: list[Series]) -> None:
    common = _common(series)
    for number, curve in enumerate(series):
        own = " ".join(word for word in curve.name.split() if word not in common)
        mark, label = MARKS[number % len(MARKS)], f"{own}  ~ L^{curve.exponent:.2f}"
        axes.plot(curve.lengths, curve.times, marker=mark, markersize=4, lw=1.2, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    ticks = sorted({length for curve in series for length in curve.lengths})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30, fontsize=7)
    axes.set_xlabel("length (tokens)", fontsize=8)
    axes.set_ylabel("time of a call", fontsize=8)
    _mark_times(axes)
    style(axes)
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _mark_times(axes: Axes) -> None:
    """Ticks in readable units; their number suits narrow and wide ranges."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axes.get_ylim()
    subs = (1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=subs, numticks=24))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: without_zeros(_numbers.duration(seconds))))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())


def _common(series: list[Series]) -> set[str]:
    """Words common to all series, which are shown in the title."""
    names = [set(curve.name.split()) - {curve.contender} for curve in series]
    return set.intersection(*names)


def _title(series: list[Series], report: BenchmarkReport) -> str:
    common = _common(series)
    shared = [word for word in series[0].name.split() if word in common]
    threads = report.machine["threads"]
    where = f"{report.machine['processor']}, {_numbers.counted(threads, 'thread')}"
    return f"{' '.join(shared)}\n{where}"
