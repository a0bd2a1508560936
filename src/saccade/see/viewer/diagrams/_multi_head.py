"""All heads of one layer on a short text: split, attend, concatenate, project."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....support._numbers import typeset
from ._canvas import Canvas
from ._fonts import fitted, width_of
from ._head import LayerNumbers
from ._shapes import NUMBER, Box, arrow, heat, row_labels, vectors
from ._theme import head_role

MOST_TOKENS = 12
MOST_HEADS = 8  # columns of a picture; with more heads it shows the first ones and the last
_COLUMN, _GAP = 128.0, 16.0
_SHOWN = 6  # components of the input and of the output
_BAR = 26.0
_PROJECTION = (300.0, 62.0)


def draw_multi_head(canvas: Canvas, numbers: LayerNumbers, projection: tuple[int, int] | None, parameters: int) -> str:
    """Draw all heads; returns the description. ``projection`` is the last linear layer's (in, out), or None."""
    columns = columns_of(numbers.heads)
    wide = len(columns) * (_COLUMN + _GAP) - _GAP
    lefts = [i * (_COLUMN + _GAP) for i in range(len(columns))]
    bottom = _draw_tokens(canvas, numbers, numbers.inputs, "Input Embeddings", wide, 0)
    middle = wide / 2
    fork, split = bottom + 42, Box(0, bottom + 66, wide, _BAR)
    centres = [left + _COLUMN / 2 for left in lefts]
    arrow(canvas, [(middle, bottom + 6), (middle, fork)], head=False)
    if len(centres) > 1:
        arrow(canvas, [(centres[0], fork), (centres[-1], fork)], head=False)
    for x in centres:
        arrow(canvas, [(x, fork), (x, split.y - 2)])
    _draw_bar(canvas, split, columns, joined=False)
    canvas.text(middle - 18, bottom + 30, "Split to Heads", size=16, anchor="end", bold=True)
    width = numbers.query.shape[-1]
    per_head = "W_{Q}, W_{K}, W_{V} make each head its own queries, keys and values"
    canvas.formula(middle + 18, bottom + 30, f"{per_head}, {width} wide", size=13, fill="soft")
    top = split.bottom + 40
    high = max(
        _draw_head(canvas, numbers, head, left, split.bottom, top) for head, left in zip(columns, lefts, strict=True)
    )
    joined = Box(0, top + high + 40, wide, _BAR)
    for head, left in zip(columns, lefts, strict=True):
        if head is not None:
            x = left + _COLUMN / 2
            arrow(canvas, [(x, top + high + 2), (x, joined.y - 2)], stroke=head_role(head))
    _draw_bar(canvas, joined, columns, joined=True)
    together = numbers.heads * numbers.out.shape[-1]
    after = joined.bottom
    arrow(canvas, [(middle, after + 2), (middle, after + 42)])
    canvas.text(middle - 18, after + 28, "Concatenate", size=16, anchor="end", bold=True)
    canvas.text(middle + 18, after + 27, f"{len(numbers.labels)} × {together:,}", size=13, fill="soft")
    after += 44
    where = Box(middle - _PROJECTION[0] / 2, after, *_PROJECTION)
    canvas.rect(*where, fill="wash", stroke="ink", radius=10)
    canvas.text(middle, where.y + 27, "Linear Projection", size=16, anchor="middle", bold=True)
    shape = "none in this module" if projection is None else f"W_{{O}}: {projection[0]:,} × {projection[1]:,}"
    canvas.formula(middle, where.y + 47, shape, size=13, fill="soft", anchor="middle")
    arrow(canvas, [(middle, where.bottom + 2), (middle, where.bottom + 30)])
    end = _draw_tokens(canvas, numbers, numbers.outputs, "Output", wide, where.bottom + 36, below=True)
    facts = fitted(_facts(numbers, parameters), 13, max(wide, 900))
    canvas.text(middle, end + 34, facts, size=13, fill="soft", anchor="middle")
    canvas.text(middle, end + 54, first_head(numbers), size=13, fill="soft", anchor="middle")
    return describe_heads(numbers, projection, parameters)


def columns_of(heads: int) -> list[int | None]:
    """The heads in the picture; None replaces the heads between."""
    if heads <= MOST_HEADS:
        return list(range(heads))
    return [*range(MOST_HEADS - 2), None, heads - 1]


def first_head(numbers: LayerNumbers) -> str:
    """A note that commands count heads from 0, while the picture counts them from 1."""
    return f"Head 1 is {numbers.layer}.0 in look and step" if numbers.words else "Head 1 has index 0"


def _draw_tokens(
    canvas: Canvas,
    numbers: LayerNumbers,
    values: np.ndarray | None,
    name: str,
    wide: float,
    y: float,
    below: bool = False,
) -> float:
    """The words with their vectors, centred; returns the lower edge."""
    labels = numbers.labels
    if values is None:
        values = np.zeros((len(labels), 0))
    shown = min(_SHOWN, values.shape[1])
    room = min(90.0, max(width_of(label, NUMBER) for label in labels))
    across = shown * 50.0 + (22 if values.shape[1] > shown else 0)
    x = wide / 2 - across / 2
    side = x - 9 - room - 24
    top = y if below else 0.0
    with canvas.group(f"{name}: {values.shape[0]} x {values.shape[1]}"):
        where = vectors(canvas, x, top, values, shown=shown, role="plain", cell=(50, 27))
        row_labels(canvas, where, labels, fill="soft", room=room)
    middle = where.middle[1]
    canvas.text(side, middle, name, size=16, anchor="end", bold=True)
    canvas.text(side, middle + 20, f"{values.shape[0]} × {values.shape[1]:,}", size=13, fill="soft", anchor="end")
    if numbers.words and not below:
        canvas.text(side, middle + 37, f"as layer {numbers.layer} reads them", size=13, fill="soft", anchor="end")
    return where.bottom


def _draw_bar(canvas: Canvas, where: Box, columns: Sequence[int | None], *, joined: bool) -> None:
    """One piece for each head, side by side; joined: without gaps, one vector."""
    step = _COLUMN + _GAP
    for i, head in enumerate(columns):
        role = "edge" if head is None else head_role(head)
        wash = "wash" if head is None else f"{role}-wash"
        left = where.x + i * step
        if joined:
            canvas.rect(left - _GAP / 2, where.y, step, where.height, fill=wash, stroke=role)
        else:
            canvas.rect(left, where.y, _COLUMN, where.height, fill=wash, stroke=role, radius=6)


def _draw_head(canvas: Canvas, numbers: LayerNumbers, head: int | None, left: float, above: float, top: float) -> float:
    """One column; returns its height."""
    size = len(numbers.labels)
    cell = min(18.0, (_COLUMN - 28) / size)
    high = 62 + cell * size + 44
    x = left + _COLUMN / 2
    if head is None:
        canvas.text(x, top + high / 2, "…", size=26, fill="soft", anchor="middle")
        between = numbers.heads - (MOST_HEADS - 1)
        canvas.text(x, top + high / 2 + 24, f"{between} more", size=13, fill="soft", anchor="middle")
        return high
    role = head_role(head)
    arrow(canvas, [(x, above + 2), (x, top - 2)], stroke=role)
    with canvas.group(f"Self-Attention (Head {head + 1})"):
        canvas.rect(left, top, _COLUMN, high, fill=f"{role}-wash", stroke=role, line=1.5, radius=10)
        canvas.lines(
            x, top + 24, ["Self-Attention", f"(Head {head + 1})"], size=14, step=18, anchor="middle", bold=True
        )
        visible = numbers.visible[head % len(numbers.visible)]
        side = cell * size
        heat(
            canvas, x - side / 2, top + 56, numbers.weights[head], visible,
            cell=(cell, cell), largest=1.0, numbers=False, role=role,
        )  # fmt: skip
        last = " ".join(typeset(v) for v in numbers.out[head, -1, :2])
        canvas.text(x, top + 56 + side + 22, "output", size=12, fill="soft", anchor="middle")
        canvas.text(x, top + 56 + side + 39, f"{last} …", size=12.5, anchor="middle")
    return high


def _facts(numbers: LayerNumbers, parameters: int) -> str:
    shared = "" if numbers.kv_heads == numbers.heads else f", {numbers.kv_heads} of keys and values"
    squares = f"Squares: weights, rows are queries. Numbers under them: output for “{numbers.labels[-1]}”."
    of = f"Layer {numbers.layer}, {numbers.model}: " if numbers.words else ""
    return f"{of}{numbers.heads} heads{shared}, {parameters:,} parameters. {squares}"


def describe_heads(numbers: LayerNumbers, projection: tuple[int, int] | None, parameters: int) -> str:
    columns, parts = columns_of(numbers.heads), []
    for head in (h for h in columns if h is not None):
        row = numbers.weights[head, -1]
        j = int(row.argmax())
        first = " ".join(typeset(v) for v in numbers.out[head, -1, :2])
        parts.append(f"head {head + 1} gives {numbers.labels[j]} {typeset(row[j])} and writes {first} …")
    between = f" ({numbers.heads} heads; not all are drawn)" if None in columns else ""
    linear = "" if projection is None else f" of {projection[0]} to {projection[1]}"
    return (
        f"Multi-head attention, from top to bottom. The input embeddings of the {len(numbers.labels)} words "
        f"{', '.join(numbers.labels)} are split to {numbers.heads} heads{between}; each head performs self-attention "
        f"on its own, {numbers.query.shape[-1]} wide; the outputs of all heads are concatenated and go through a "
        f"linear projection{linear} to the output. {parameters:,} parameters. Of the last word, {numbers.labels[-1]}: "
        f"{'; '.join(parts)}."
    )
