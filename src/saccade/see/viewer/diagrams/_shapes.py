"""Shapes of all pictures: boxes, arrows, pills, matrices of numbers, heat maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ....support._numbers import typeset
from ._canvas import Canvas
from ._fonts import fitted

HEAD = 8.0  # length of an arrow's head
NUMBER = 14.0  # size of numbers and of the words beside them
HEAT = 0.62  # opacity of a weight of 1: text on it stays legible
Point = tuple[float, float]


class Box(NamedTuple):
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> Point:
        return self.x + self.width / 2, self.y + self.height / 2


def arrow(
    canvas: Canvas,
    points: Sequence[Point],
    *,
    stroke: str = "line",
    line: float = 1.5,
    radius: float = 10,
    head: bool = True,
) -> None:
    """A line through ``points`` with rounded corners, and a head at its end."""
    *_, before, end = points
    away = math.dist(before, end)
    toward = ((end[0] - before[0]) / away, (end[1] - before[1]) / away)
    stop = (end[0] - toward[0] * (HEAD - 1), end[1] - toward[1] * (HEAD - 1)) if head else end
    canvas.path(points, _rounded([*points[:-1], stop], radius), stroke=stroke, line=line)
    if head:
        base = (end[0] - toward[0] * HEAD, end[1] - toward[1] * HEAD)
        side = (-toward[1] * HEAD * 0.46, toward[0] * HEAD * 0.46)
        corners = [end, (base[0] + side[0], base[1] + side[1]), (base[0] - side[0], base[1] - side[1])]
        data = "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in corners) + "Z"
        canvas.path(corners, data, fill=stroke)


def _rounded(points: Sequence[Point], radius: float) -> str:
    data = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        r = min(radius, math.dist(before, corner) / 2, math.dist(corner, after) / 2)
        a, b = _toward(corner, before, r), _toward(corner, after, r)
        data += f"L{a[0]:.1f} {a[1]:.1f}Q{corner[0]:.1f} {corner[1]:.1f} {b[0]:.1f} {b[1]:.1f}"
    return data + f"L{points[-1][0]:.1f} {points[-1][1]:.1f}"


def _toward(a: Point, b: Point, distance: float) -> Point:
    share = distance / (math.dist(a, b) or 1)
    return a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share


def node(canvas: Canvas, x: float, y: float, sign: str, *, radius: float = 13, stroke: str = "line") -> None:
    """A small circle with the sign of an operation: a plus, a times, a dot."""
    canvas.circle(x, y, radius, fill="paper", stroke=stroke, line=1.5)
    arm = radius * 0.46
    if sign == "dot":
        canvas.circle(x, y, 2.6, fill=stroke)
        return
    turned = arm * 0.8
    ends = (
        [((x - arm, y), (x + arm, y)), ((x, y - arm), (x, y + arm))]
        if sign == "plus"
        else [
            ((x - turned, y - turned), (x + turned, y + turned)),
            ((x - turned, y + turned), (x + turned, y - turned)),
        ]
    )
    data = "".join(f"M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}" for a, b in ends)
    canvas.path([], data, stroke=stroke, line=1.5)


def vectors(
    canvas: Canvas,
    x: float,
    y: float,
    values: np.ndarray,
    *,
    shown: int,
    role: str,
    cell: tuple[float, float] = (46, 28),
) -> Box:
    """Rows of numbers, the first ``shown`` of each vector and an ellipsis for the rest: (L, width)."""
    rows, width = values.shape
    rest = 22 if width > shown else 0
    across, down = cell
    where = Box(x, y, shown * across + rest, rows * down)
    fill, stroke = ("wash", "edge") if role == "plain" else (f"{role}-wash", role)
    canvas.rect(*where, fill=fill, stroke=stroke, radius=6)
    for i in range(rows):
        baseline = y + (i + 0.5) * down + 0.35 * NUMBER
        for j in range(shown):
            canvas.text(x + (j + 0.5) * across, baseline, typeset(values[i, j]), size=NUMBER, anchor="middle")
        if rest:
            canvas.text(x + shown * across + rest / 2 - 3, baseline, "…", size=NUMBER, fill="soft", anchor="middle")
    return where


def heat(
    canvas: Canvas,
    x: float,
    y: float,
    values: np.ndarray,
    visible: np.ndarray,
    *,
    cell: tuple[float, float],
    largest: float | None = None,
    numbers: bool = True,
    role: str = "heat",
) -> Box:
    """A matrix as cells, darker where a number is larger; hidden pairs are grey and empty."""
    rows, columns = values.shape
    across, down = cell
    where = Box(x, y, columns * across, rows * down)
    canvas.rect(*where, fill="paper", radius=4)
    hidden = "".join(
        f"M{x + start * across:g} {y + i * down:g}h{(stop - start) * across:g}v{down:g}h{(start - stop) * across:g}z"
        for i, start, stop in runs(~visible)
    )
    if hidden:
        canvas.path([], hidden, fill="hidden")
    most = largest or float(np.abs(values[visible]).max(initial=0)) or 1.0
    for i, j in np.argwhere(visible):
        share = min(1.0, max(0.0, float(values[i, j]) / most))
        if share * HEAT >= 0.005:
            canvas.rect(x + j * across, y + i * down, across, down, fill=role, opacity=share * HEAT)
    for i, j in np.argwhere(visible) if numbers else ():
        at = x + (j + 0.5) * across, y + (i + 0.5) * down + 0.35 * NUMBER
        canvas.text(*at, typeset(values[i, j]), size=NUMBER, anchor="middle")
    canvas.rect(*where, stroke="edge", radius=4)
    return where


def runs(chosen: np.ndarray) -> list[tuple[int, int, int]]:
    """(row, start, stop) of each run of True."""
    out = []
    for i, row in enumerate(chosen):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], row.astype(int), [0]))))
        out += [(i, int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    return out


def row_labels(canvas: Canvas, where: Box, labels: Sequence[str], *, fill: str, room: float) -> None:
    """Words to the left of a matrix, one a row."""
    step = where.height / len(labels)
    for i, label in enumerate(labels):
        text = fitted(label, NUMBER, room)
        canvas.text(where.x - 9, where.y + (i + 0.5) * step + NUMBER * 0.35, text, size=NUMBER, fill=fill, anchor="end")


def column_labels(canvas: Canvas, where: Box, labels: Sequence[str], *, fill: str) -> None:
    """Words above a matrix, one a column, cut to its width."""
    step = where.width / len(labels)
    for i, label in enumerate(labels):
        text = fitted(label, NUMBER, step - 6)
        canvas.text(where.x + (i + 0.5) * step, where.y - 8, text, size=NUMBER, fill=fill, anchor="middle")
