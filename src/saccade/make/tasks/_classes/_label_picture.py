"""How well each label is found, where texts have several: a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def label_height(count: int) -> float:
    """Inches of so many labels."""
    return min(1.5 + 0.3 * count, 16.0)


def draw_labels(figure: Any, classes: Mapping[str, Mapping[str, float]]) -> None:
    """Into a figure of matplotlib's."""
    axes = figure.subplots()
    rows = sorted(classes.items(), key=lambda pair: pair[1]["count"])
    places = range(len(rows))
    ends = [sorted((row["precision"], row["recall"])) for _, row in rows]
    axes.hlines(places, [low for low, _ in ends], [high for _, high in ends], color="silver")
    axes.scatter([row["precision"] for _, row in rows], places, label="precision", zorder=2)
    hollow = {"facecolors": "none", "edgecolors": "tab:orange", "linewidths": 1.6}  # a precision as high shows inside
    axes.scatter([row["recall"] for _, row in rows], places, s=90, marker="s", label="recall", zorder=3, **hollow)
    axes.set_yticks(places, [f"{label} ({row['count']:,.0f})" for label, row in rows])
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.6, len(rows) - 0.4), xlabel="precision, recall", ylabel="label (texts)")
    axes.grid(axis="x", color="whitesmoke")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize="small")
