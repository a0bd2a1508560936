"""One head, or all heads of a layer, in whole words: for slides and phones. Only heads have numbers.

The flow is vertical, so that letters of 14 units keep 13 pixels on a screen of 390.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ._attention import describe_attention
from ._canvas import Canvas
from ._fonts import folded, width_of
from ._head import LayerNumbers
from ._multi_head import columns_of, describe_heads, first_head
from ._shapes import Box, arrow, heat
from ._theme import head_role

NARROW = 14  # the margin
_WIDE = 366.0
_SIZE, _TITLE = 15.0, 17.0
_LINE = 19.0  # between the baselines of a word on several lines
_BOX = 38.0  # height
_DOWN = 26.0  # length of an arrow
_LEFT = 232.0  # width of the boxes of Query and Key; Value passes beside them
_WORD_ROOM = 132.0  # for the words on each side of the weights
_THICKEST, _LEAST = 9.0, 0.05  # line width of a weight of 1; least weight with a line
_OPACITY = 0.6  # of a line, so that crossing lines are all visible
_SIDE, _ROW = 32.0, 50.0  # of the list of heads: room for its arrows, and row height


def draw_plain_attention(canvas: Canvas, numbers: LayerNumbers, head: int) -> str:
    """Draw attention; returns the description."""
    words = _draw_words(canvas, numbers, "Input words")
    width = (_LEFT - 14) / 2
    query, key, value = (
        _box(canvas, left, words.bottom + 44, width, name, role=role)
        for left, name, role in ((0, "Query", "query"), (width + 14, "Key", "key"), (_WIDE - width, "Value", "value"))
    )
    _fork(canvas, words.bottom + 6, query.y, [box.middle[0] for box in (query, key, value)])
    dot = _box(canvas, 0, query.bottom + _DOWN, _LEFT, "dot product")
    for box, role in ((query, "query"), (key, "key")):
        arrow(canvas, [(box.middle[0], box.bottom), (box.middle[0], dot.y)], stroke=role)
    steps = _below(canvas, dot, *_steps(numbers))
    weights = _draw_weights(canvas, numbers, head, steps.bottom)
    total = _box(canvas, 0, weights.bottom + _DOWN, _LEFT, "weighted sum")
    x, y = total.middle
    arrow(canvas, [(x, weights.bottom), (x, total.y)], stroke="weight")
    past, lane = value.middle[0], _WIDE - 2
    aside = [(past, value.bottom), (past, value.bottom + 16), (lane, value.bottom + 16), (lane, y), (total.right, y)]
    arrow(canvas, aside, stroke="value")
    _below(canvas, total, "Output")
    return describe_attention(numbers, head)


def draw_plain_heads(canvas: Canvas, numbers: LayerNumbers, projection: tuple[int, int] | None, parameters: int) -> str:
    """Draw all heads; returns the description. ``projection`` is the last linear layer's (in, out), or None."""
    words = _draw_words(canvas, numbers, "Input Embeddings")
    columns, middle = columns_of(numbers.heads), _WIDE / 2
    top = words.bottom + 64
    rows = [Box(_SIDE, top + i * _ROW, _WIDE - 2 * _SIDE, _ROW - 8) for i in range(len(columns))]
    canvas.text(middle + 12, words.bottom + 27, "Split to Heads", size=_TITLE, bold=True)
    joined = Box(_SIDE, rows[-1].bottom + 48, rows[0].width, 24)
    canvas.text(middle, joined.y - 12, "Concatenate", size=_TITLE, anchor="middle", bold=True)
    for head, where in zip(columns, rows, strict=True):
        _draw_head(canvas, numbers, head, where)
        if head is None:
            continue
        y = where.middle[1]
        above = [(middle, words.bottom + 6), (middle, words.bottom + 42), (2, words.bottom + 42)]
        arrow(canvas, [*above, (2, y), (where.x, y)])
        arrow(
            canvas, [(where.right, y), (_WIDE - 2, y), (_WIDE - 2, joined.middle[1]), (joined.right, joined.middle[1])]
        )
    _draw_joined(canvas, joined, columns)
    projected = _below(canvas, joined, "Linear Projection" if projection else "no Linear Projection", middle=middle)
    out = _below(canvas, projected, "Output", middle=middle)
    for i, line in enumerate(("Squares: attention weights, a row for each word", first_head(numbers))):
        canvas.text(middle, out.bottom + 30 + i * 20, line, size=14, fill="soft", anchor="middle")
    return describe_heads(numbers, projection, parameters)


def _steps(numbers: LayerNumbers) -> list[str]:
    """The steps from scores to weights, on two lines if there are many."""
    names = numbers.steps
    return [", ".join(names)] if len(names) < 5 else [", ".join(names[:3]) + ",", ", ".join(names[3:])]


def _draw_words(canvas: Canvas, numbers: LayerNumbers, title: str) -> Box:
    """The words in rows from the left; returns their box."""
    canvas.text(_WIDE / 2, 0, title if numbers.words else "Inputs", size=_TITLE, anchor="middle", bold=True)
    rows: list[list[tuple[list[str], float]]] = [[]]
    for label in numbers.labels:
        lines = folded(label, _SIZE, _WIDE - 24)
        wide = max(width_of(line, _SIZE) for line in lines) + 22
        if rows[-1] and sum(w + 8 for _, w in rows[-1]) + wide > _WIDE:
            rows.append([])
        rows[-1].append((lines, wide))
    y = 14.0
    for row in rows:
        high = max(len(lines) for lines, _ in row) * _LINE + 11
        x = (_WIDE - sum(wide + 8 for _, wide in row) + 8) / 2
        for lines, wide in row:
            canvas.rect(x, y, wide, high, fill="wash", stroke="edge", radius=15)
            _text(canvas, x + wide / 2, y + high / 2, lines, anchor="middle")
            x += wide + 8
        y += high + 8
    return Box(0, 14, _WIDE, y - 8 - 14)


def _draw_weights(canvas: Canvas, numbers: LayerNumbers, head: int, above: float) -> Box:
    """Query words on the left, key words on the right, and lines as thick as the weights."""
    middle, top = _LEFT / 2, above + _DOWN + 18
    arrow(canvas, [(middle, above), (middle, above + _DOWN)])
    canvas.text(middle, top, "Attention weights", size=_TITLE, fill="weight", anchor="middle", bold=True)
    lines = [folded(label, _SIZE, _WORD_ROOM) for label in numbers.labels]
    room = max(max(width_of(line, _SIZE) for line in part) for part in lines)
    apart = min(150.0, _WIDE - 24 - 2 * room)
    left = max(room, middle - apart / 2)
    right, y, centres = left + apart, top + 14, []
    for part in lines:
        high = len(part) * _LINE + 7
        centres.append(y + high / 2)
        y += high
    weights = np.where(numbers.weights[head] >= _LEAST, numbers.weights[head], 0)
    with canvas.group("Attention weights: the thicker a line, the more of its right word the left word takes"):
        for i, j in np.argwhere(weights):
            (x, y0), (x1, y1) = ends = (left + 10, centres[i]), (right - 10, centres[j])
            data = f"M{x:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}"
            canvas.path(ends, data, stroke="weight", line=float(weights[i, j]) * _THICKEST, opacity=_OPACITY)
        for part, at in zip(lines, centres, strict=True):
            _text(canvas, left, at, part, anchor="end", fill="query")
            _text(canvas, right, at, part, anchor="start", fill="key")
    return Box(0, top, _LEFT, y - top + 6)


def _draw_head(canvas: Canvas, numbers: LayerNumbers, head: int | None, where: Box) -> None:
    x, y = where.middle
    if head is None:
        between = numbers.heads - len(columns_of(numbers.heads)) + 1
        canvas.text(x, y + 5, f"… {between} more", size=_SIZE, fill="soft", anchor="middle")
        return
    role, side = head_role(head), where.height - 8
    with canvas.group(f"Self-Attention (Head {head + 1})"):
        canvas.rect(*where, fill=f"{role}-wash", stroke=role, radius=8)
        canvas.text(where.x + 14, y + 5, f"Self-Attention (Head {head + 1})", size=_SIZE, bold=True)
        cell = side / len(numbers.labels)
        visible = numbers.visible[head % len(numbers.visible)]
        heat(
            canvas, where.right - side - 6, where.y + 4, numbers.weights[head], visible,
            cell=(cell, cell), largest=1.0, numbers=False, role=role,
        )  # fmt: skip


def _draw_joined(canvas: Canvas, where: Box, columns: Sequence[int | None]) -> None:
    wide = where.width / len(columns)
    for i, head in enumerate(columns):
        role, wash = ("edge", "wash") if head is None else (head_role(head), f"{head_role(head)}-wash")
        canvas.rect(where.x + i * wide, where.y, wide, where.height, fill=wash, stroke=role)


def _fork(canvas: Canvas, above: float, below: float, ends: Sequence[float]) -> None:
    """Arrows from the words to every part."""
    middle, level = ends[len(ends) // 2], above + 16
    for x in ends:
        points = [(middle, above), (middle, level), (x, level), (x, below)]
        arrow(canvas, points[::3] if x == middle else points)


def _below(canvas: Canvas, above: Box, *title: str, middle: float = _LEFT / 2) -> Box:
    """A box under another, with an arrow to it."""
    where = _box(canvas, middle - _LEFT / 2, above.bottom + _DOWN, _LEFT, *title)
    arrow(canvas, [(middle, above.bottom), (middle, where.y)])
    return where


def _box(canvas: Canvas, x: float, y: float, width: float, *title: str, role: str | None = None) -> Box:
    where = Box(x, y, width, _BOX + (len(title) - 1) * _LINE)
    fill, stroke = ("wash", "edge") if role is None else (f"{role}-wash", role)
    canvas.rect(*where, fill=fill, stroke=stroke, radius=8)
    _text(canvas, *where.middle, title, anchor="middle", bold=True)
    return where


def _text(canvas: Canvas, x: float, y: float, lines: Sequence[str], **how: Any) -> None:
    """Lines around the height ``y``."""
    first = y - (len(lines) - 1) * _LINE / 2 + 5
    if len(lines) == 1:
        canvas.text(x, first, lines[0], size=_SIZE, **how)
    else:
        canvas.lines(x, first, lines, size=_SIZE, step=_LINE, **how)
