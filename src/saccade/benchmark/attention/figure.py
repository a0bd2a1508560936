"""Time and peak memory against length, both axes logarithmic, with the exponents that fit (the `plot` extra)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...support import _numbers
from .._figures import MARKS, new_figure, rendered, style, without_zeros
from .growth import Series, series
from .results import BenchmarkReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {"time": "time of a call", "memory": "extra memory at the peak"}


def draw(report: BenchmarkReport, kind: str) -> bytes:
    """A figure, `kind` "png" or "svg".

    Raises:
        ValueError: no contender was measured at two lengths or more.
    """
    found = series(report)
    if not found:
        raise ValueError("a plot needs measurements at two lengths or more")
    panels = [what for what in LABELS if any(one.points(what)[0] for one in found)]
    figure = new_figure(figsize=(5.2 * len(panels), 4.2 + 0.16 * len(found)), layout="constrained")
    for axes, what in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _panel(axes, found, what)
    figure.suptitle(_title(found, report), fontsize=9)
    return rendered(figure, kind)


def _panel(axes: Axes, found: list[Series], what: str) -> None:
    common = _common(found)
    for number, one in enumerate(found):
        lengths, amounts = one.points(what)
        if not lengths:
            continue
        grown = one.exponent(what)
        fitted = "" if grown is None else f"  ~ L^{grown:.2f}"
        own = " ".join(word for word in one.name.split() if word not in common)
        mark = MARKS[number % len(MARKS)]
        axes.plot(lengths, amounts, marker=mark, markersize=4, lw=1.2, label=f"{own}{fitted}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2 if what == "memory" else 10)
    ticks = sorted({length for one in found for length in one.points(what)[0]})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30, fontsize=7)
    axes.set_xlabel("length (tokens)", fontsize=8)
    axes.set_ylabel(LABELS[what], fontsize=8)
    _mark_amounts(axes, what)
    style(axes)
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _mark_amounts(axes: Axes, what: str) -> None:
    """Ticks in units that are read aloud, so many that a narrow range has some and a wide one not too many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axes.get_ylim()
    if what == "memory":
        locator = LogLocator(base=4 if high / low > 64 else 2, numticks=24)
    else:
        locator = LogLocator(base=10, subs=(1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,), numticks=24)
    told = _numbers.size if what == "memory" else _numbers.duration
    axes.yaxis.set_major_locator(locator)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda amount, _: without_zeros(told(amount))))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())


def _common(found: list[Series]) -> set[str]:
    """Words that every series has: they stand once, in the title."""
    names = [set(one.name.split()) - {one.contender} for one in found]
    return set.intersection(*names)


def _title(found: list[Series], report: BenchmarkReport) -> str:
    common = _common(found)
    shared = [word for word in found[0].name.split() if word in common]
    threads = report.machine["threads"]
    where = f"{report.machine['processor']}, {threads} thread{'s' * (threads != 1)}"
    return f"{' '.join(shared)}\n{where}"
