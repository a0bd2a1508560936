"""Confusion matrices as a table and as a picture. Rows are true classes, columns predicted ones."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from ....support._tables import Table

Counts = Sequence[Sequence[int]]
WIDEST = 12  # classes in a terminal
NAMED = 40  # classes of a picture that have their counts written in
_NAME = 16  # letters of a class


def confusion_table(labels: Sequence[str], counts: Counts) -> str:
    """The matrix as aligned columns; "" if a terminal has no room for so many classes."""
    if len(labels) > WIDEST:
        return ""
    names = [label if len(label) <= _NAME else f"{label[: _NAME - 1]}…" for label in labels]
    rows = [[name, *(f"{count:,}" for count in row)] for name, row in zip(names, counts, strict=True)]
    return str(Table(["truth \\ predicted", *names], rows))


def confusion_picture(labels: Sequence[str], counts: Counts, kind: str) -> bytes:
    """A "png" or "svg" of `draw_confusion`."""
    from matplotlib.figure import Figure

    side = side_of(labels)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    draw_confusion(figure, labels, counts)
    return written(figure, kind)


def side_of(labels: Sequence[str]) -> float:
    """The side of the matrix in inches."""
    return min(max(3.0, 0.6 * len(labels) + 2), 16.0)


def draw_confusion(figure: Any, labels: Sequence[str], counts: Counts) -> None:
    """Draw into a matplotlib figure. Shades are shares of each row, so that rare classes show; numbers are counts."""
    axes = figure.subplots()
    shares = [[count / max(sum(row), 1) for count in row] for row in counts]
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="truth")
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    axes.set_yticks(range(len(labels)), labels)
    for row, line in enumerate(counts if len(labels) <= NAMED else []):
        for column, count in enumerate(line):
            color = "white" if shares[row][column] > 0.5 else "black"
            axes.text(column, row, f"{count:,}", ha="center", va="center", color=color)
    figure.colorbar(image, label="share of the row")


def draw_confusion_left(figure: Any, wide: float, labels: Sequence[str], counts: Counts) -> None:
    """Draw into the left part of a figure of `wide` inches."""
    side = side_of(labels) + 1
    draw_confusion(figure.subfigures(1, 2, width_ratios=[side, max(wide - side, 0.1)])[0], labels, counts)


def written(figure: Any, kind: str) -> bytes:
    """A figure of matplotlib's as a "png" or "svg"."""
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=144)
    return content.getvalue()
