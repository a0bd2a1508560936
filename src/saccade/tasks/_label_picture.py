"""How well each label is found, where texts have several: a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def label_height(count: int) -> float:
    """Inches of so many labels."""
    return min(1.2 + 0.3 * count, 16.0)


def draw_labels(figure: Any, classes: Mapping[str, Mapping[str, float]]) -> None:
    """Into a figure of matplotlib's."""
    axes = figure.subplots()
    rows = sorted(classes.items(), key=lambda pair: pair[1]["count"])
    places = range(len(rows))
    ends = [sorted((row["precision"], row["recall"])) for _, row in rows]
    axes.hlines(places, [low for low, _ in ends], [high for _, high in ends], color="silver")
    for name, marker in (("precision", "o"), ("recall", "s")):
        axes.scatter([row[name] for _, row in rows], places, marker=marker, label=name, zorder=2)
    axes.set_yticks(places, [f"{label} ({row['count']:,.0f})" for label, row in rows])
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.6, len(rows) - 0.4))
    axes.grid(axis="x", color="whitesmoke")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1 - 0.3 / len(rows)), ncols=2, fontsize="small")
