"""Recall against the size of the state, as a figure (the `plot` extra)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._figures import MARKS, new_figure, rendered, style
from .records import FinishedRun
from .tables import TaskLine, lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(rows: Sequence[FinishedRun], task: str, kind: str) -> bytes:
    """Accuracy on a task against the number of stored values, with a panel for each group; `kind` "png" or "svg".

    Raises:
        ValueError: no run of the task has a state of fixed size.
    """
    own = [line for line in lines(rows) if line.task == task]
    if all(line.grows for line in own):
        raise ValueError(f"a plot needs runs of {task} by something with a state of fixed size")
    groups = own[0].rows[0].groups
    figure = new_figure(figsize=(3.4 * len(groups) + 0.4, 3.9), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for place, (axes, group) in enumerate(zip(panels, groups, strict=True)):
        _panel(axes, own, place)
        axes.set_title(group if len(groups) > 1 else task, fontsize=9)
    panels[0].set_ylabel("right answers", fontsize=8)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, frameon=False, loc="outside lower center", ncols=4)
    return rendered(figure, kind)


def _panel(axes: Axes, own: Sequence[TaskLine], place: int) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    families: dict[str, list[TaskLine]] = {}
    for line in own:
        if not line.grows:
            families.setdefault(family(line.mechanism), []).append(line)
    for number, (name, members) in enumerate(families.items()):
        members = sorted(members, key=lambda line: line.kept)
        shares = [_median(line, place) for line in members]
        mark = MARKS[number % len(MARKS)]
        axes.plot([line.kept for line in members], shares, label=name, marker=mark, markersize=4, lw=1.2)
    whole = [line for line in own if line.mechanism == "exact"]
    if whole:
        axes.axhline(_median(whole[0], place), color="black", lw=0.9, ls="--", label="exact, keeps every token")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda kept, _: f"{kept:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(-0.02, 1.04)
    axes.set_xlabel("numbers kept", fontsize=8)
    style(axes)


def _median(line: TaskLine, place: int) -> float:
    return statistics.median(row.outcome.by_group[place] for row in line.rows)


def family(mechanism: str) -> str:
    """The name without settings of the state's size: `linear:feature_map=taylor,head=8` becomes `linear, taylor`."""
    name, _, settings = mechanism.partition(":")
    parts = [part.partition("=") for part in settings.split(",") if part]
    return ", ".join([name, *(value for key, _, value in parts if key == "feature_map")])
