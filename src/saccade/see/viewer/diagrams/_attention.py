"""One head on a short text: words, Q, K and V, scores, weights, output, with the model's own numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....support._numbers import typeset
from ._canvas import Canvas
from ._fonts import fitted, width_of
from ._head import LayerNumbers
from ._shapes import HEAD, NUMBER, Box, arrow, column_labels, heat, node, row_labels, vectors

MOST_TOKENS = 12
SHOWN = 3  # components of a vector
_CELL = (46.0, 28.0)  # of a vector's number
_STEP_WIDTH, _STEP_HEIGHT = 128.0, 46.0
_LANE = 84  # between two of Q, K and V: room for a name and its shape


class Places(NamedTuple):
    """The places of the large parts."""

    words: Box
    query: Box
    key: Box
    value: Box
    scores: Box
    steps: Box
    weights: Box
    out: Box


def draw_attention(canvas: Canvas, numbers: LayerNumbers, head: int) -> str:
    """Draw the attention of one head; returns the description."""
    at = _places(numbers)
    _draw_words(canvas, numbers, at)
    for where, name, markup, role, values in (
        (at.query, "Query", "Q", "query", numbers.query),
        (at.key, "Key", "K", "key", numbers.key),
        (at.value, "Value", "V", "value", numbers.value),
    ):
        with canvas.group(f"{name} vectors, {values.shape[1]} x {values.shape[2]}"):
            turned = ", rotary" if numbers.rotary and role != "value" else ""
            _name(canvas, where, f"{name} {markup}", f"{values.shape[1]} × {values.shape[2]}{turned}", role)
            vectors(canvas, where.x, where.y, values[head], shown=_shown(values), role=role, cell=_CELL)
            row_labels(canvas, where, numbers.labels, fill="soft", room=_label_room(numbers))
    _draw_scores(canvas, numbers, head, at)
    _draw_steps(canvas, numbers, at)
    _draw_weights(canvas, numbers, head, at)
    _draw_output(canvas, numbers, head, at)
    _draw_reading(canvas, numbers, head, at)
    return describe_attention(numbers, head)


def _places(numbers: LayerNumbers) -> Places:
    size, room = len(numbers.labels), _label_room(numbers)
    longest = max(width_of(label, NUMBER) for label in numbers.labels)
    side = min(74.0, max(48.0, longest + 10))  # of a cell of scores, with its word above
    high, wide = size * _CELL[1], _shown(numbers.query) * _CELL[0] + 22
    words = Box(0, 0, max(70.0, min(longest, 120.0) + 24), 0)
    x = words.right + 104 + room
    query, key, value = (Box(x, 52 + i * (high + _LANE), wide, high) for i in range(3))
    middle = (query.middle[1] + key.middle[1]) / 2
    tall = size * 30.0
    scores = Box(x + wide + 86 + room, middle - tall / 2, size * side, tall)
    deep = len(numbers.steps) * _STEP_HEIGHT + 18
    steps = Box(scores.right + 34, middle - deep / 2, _STEP_WIDTH, deep)
    weights = Box(steps.right + 34 + room + 4, middle - tall / 2, size * side, tall)
    out = Box(max(weights.middle[0] + 56 + room, weights.right - wide), value.y, wide, high)
    return Places(words, query, key, value, scores, steps, weights, out)


def _draw_words(canvas: Canvas, numbers: LayerNumbers, at: Places) -> None:
    step, width = 38.0, at.words.width
    top = at.key.middle[1] - len(numbers.labels) * step / 2
    canvas.text(width / 2, top - 18, "Input words" if numbers.words else "Inputs", size=15, anchor="middle", bold=True)
    for i, label in enumerate(numbers.labels):
        y = top + i * step
        canvas.rect(0, y, width, step - 8, fill="wash", stroke="edge", radius=15)
        canvas.text(width / 2, y + 19.5, fitted(label, 14, width - 20), size=14, anchor="middle")
    start = (width + 14, at.key.middle[1])
    labels_right = at.query.x - 9 - min(_label_room(numbers), _longest(numbers))
    for where, name, role in ((at.query, "Q", "query"), (at.key, "K", "key"), (at.value, "V", "value")):
        end = (labels_right - 12, where.middle[1])
        bend = width + 34
        points = [start, end] if where is at.key else [start, (bend, start[1]), (bend, end[1]), end]
        arrow(canvas, points, stroke=role)
        middle = (bend + 10 + end[0] - HEAD) / 2
        canvas.formula(middle, end[1] - 10, f"× W_{{{name}}}", size=13, fill=role, anchor="middle")


def _draw_scores(canvas: Canvas, numbers: LayerNumbers, head: int, at: Places) -> None:
    everything = np.ones(numbers.scores[head].shape, bool)
    x, y = at.query.right + 40, at.scores.middle[1]
    arrow(canvas, [(at.query.right + 6, at.query.middle[1]), (x, at.query.middle[1]), (x, y - 13)], stroke="query")
    arrow(canvas, [(at.key.right + 6, at.key.middle[1]), (x, at.key.middle[1]), (x, y + 13)], stroke="key")
    node(canvas, x, y, "dot")
    canvas.text(x - 21, y + 5, "dot product", size=14, anchor="end", bold=True)
    left = at.scores.x - 9 - min(_label_room(numbers), _longest(numbers))
    arrow(canvas, [(x + 13, y), (left - 6, y)])
    with canvas.group("Scores: the dot product of each query with each key"):
        heat(canvas, at.scores.x, at.scores.y, numbers.scores[head], everything, cell=_cell(at.scores, numbers))
        row_labels(canvas, at.scores, numbers.labels, fill="query", room=_label_room(numbers))
        column_labels(canvas, at.scores, numbers.labels, fill="key")
    _name(canvas, at.scores, "Scores QK^{T}", "", "ink", up=26)


def _draw_steps(canvas: Canvas, numbers: LayerNumbers, at: Places) -> None:
    where, y = at.steps, at.steps.middle[1]
    arrow(canvas, [(at.scores.right + 6, y), (where.x - 2, y)])
    canvas.rect(*where, fill="wash", stroke="edge", radius=10)
    for i, step in enumerate(numbers.steps):
        top = where.y + 9 + i * _STEP_HEIGHT
        name, what = _words_of(step, numbers)
        x = where.middle[0]
        canvas.text(x, top + 19, name, size=14, anchor="middle", bold=True)
        canvas.formula(x, top + 36, what, size=12, fill="soft", anchor="middle")
        if i:
            canvas.path([], f"M{where.x + 14:.1f} {top:.1f}H{where.right - 14:.1f}", stroke="edge", line=1)


def _words_of(step: str, numbers: LayerNumbers) -> tuple[str, str]:
    width = numbers.query.shape[-1]
    usual = abs(numbers.scale * width**0.5 - 1) < 1e-6
    return {
        "scale": ("scale", f"÷ √{width}" if usual else f"× {numbers.scale:.3g}"),
        "softcap": ("softcap", "c · tanh(s / c)"),
        "bias": ("bias", "+ by position"),
        "mask": ("mask", "hide later words" if _is_causal(numbers) else "hide pairs"),
        "softmax": ("softmax", "a sink takes a share" if numbers.sink else "each row sums to 1"),
    }[step]


def _draw_weights(canvas: Canvas, numbers: LayerNumbers, head: int, at: Places) -> None:
    where, y = at.weights, at.steps.middle[1]
    left = where.x - 9 - min(_label_room(numbers), _longest(numbers))
    arrow(canvas, [(at.steps.right, y), (left - 6, y)])
    _name(canvas, where, "Attention weights", "", "weight", up=26)
    with canvas.group("Attention weights: how much of each key's value each query takes"):
        visible = _visible(numbers, head)
        heat(canvas, where.x, where.y, numbers.weights[head], visible, cell=_cell(where, numbers), largest=1.0)
        row_labels(canvas, where, numbers.labels, fill="query", room=_label_room(numbers))
        column_labels(canvas, where, numbers.labels, fill="key")


def _draw_output(canvas: Canvas, numbers: LayerNumbers, head: int, at: Places) -> None:
    x, y = at.out.x - 9 - min(_label_room(numbers), _longest(numbers)) - 44, at.value.middle[1]
    arrow(canvas, [(at.value.right + 6, y), (x - 13, y)], stroke="value")
    arrow(canvas, [(x, at.weights.bottom + 6), (x, y - 13)], stroke="weight")
    node(canvas, x, y, "times")
    canvas.text(x - 22, y - 12, "weighted sum", size=14, anchor="end", bold=True)
    arrow(canvas, [(x + 13, y), (x + 38, y)])
    with canvas.group("Output: for each word the weighted sum of the values"):
        vectors(canvas, at.out.x, at.out.y, numbers.out[head], shown=_shown(numbers.out), role="plain", cell=_CELL)
        row_labels(canvas, at.out, numbers.labels, fill="soft", room=_label_room(numbers))
    length, width = numbers.out.shape[1:]
    _name(canvas, at.out, "Output", f"{length} × {width}", "ink")


def _draw_reading(canvas: Canvas, numbers: LayerNumbers, head: int, at: Places) -> None:
    """One row as a sum, in words: that of `reading_row`."""
    row = reading_row(numbers, head)
    weights = numbers.weights[head, row]
    order = [int(j) for j in np.argsort(-weights, kind="stable")[:3] if weights[j] >= 0.005]
    terms = " + ".join(f"{typeset(weights[j])} V(“{numbers.labels[j]}”)" for j in order)
    rest = " + …" if len(order) < int((weights > 0).sum()) else ""
    sentence = f"Output(“{numbers.labels[row]}”) = {terms}{rest}"
    below = at.value.middle[1] + 30
    canvas.text(at.scores.x, below, sentence, size=14, fill="soft")
    of = f"Layer {numbers.layer} head {head}, {numbers.model}" if numbers.words else numbers.model
    canvas.text(at.scores.x, below + 24, fitted(of, 14, at.weights.x - at.scores.x), size=14, fill="soft")


def reading_row(numbers: LayerNumbers, head: int) -> int:
    """The ordinary row whose weights on several keys are most even; in a tie, the last."""
    w = numbers.weights[head]
    entropy = (-np.where(w > 0, w * np.log(np.where(w > 0, w, 1)), 0)).sum(-1)
    return int(len(entropy) - 1 - entropy[::-1].argmax())


def _name(canvas: Canvas, where: Box, title: str, detail: str, role: str, up: float = 12) -> None:
    """Put the name of a part above it, and its shape or step next to the name."""
    y = where.y - up - (4 if up > 20 else 0)
    wide = canvas.formula(where.x, y, title, size=15, fill=role, bold=True)
    if detail:
        canvas.text(where.x + wide + 10, y, detail, size=13, fill="soft")


def _cell(where: Box, numbers: LayerNumbers) -> tuple[float, float]:
    size = len(numbers.labels)
    return where.width / size, where.height / size


def _shown(values: np.ndarray) -> int:
    return min(SHOWN, values.shape[-1])


def _longest(numbers: LayerNumbers) -> float:
    return max(width_of(label, NUMBER) for label in numbers.labels)


def _label_room(numbers: LayerNumbers) -> float:
    return min(84.0, _longest(numbers))


def _visible(numbers: LayerNumbers, head: int) -> np.ndarray:
    return numbers.visible[head % len(numbers.visible)]


def _is_causal(numbers: LayerNumbers) -> bool:
    length = len(numbers.labels)
    return bool((numbers.visible == np.tri(length, dtype=bool)).all())


def describe_attention(numbers: LayerNumbers, head: int) -> str:
    length, width = len(numbers.labels), numbers.query.shape[-1]
    rows = []
    for i, label in enumerate(numbers.labels):
        parts = [f"{numbers.labels[j]} {typeset(w)}" for j, w in enumerate(numbers.weights[head, i]) if w >= 0.005]
        rows.append(f"{label}: {', '.join(parts)}")
    steps = ", then ".join({"scale": "scaled", "mask": "masked"}.get(step, step) for step in numbers.steps)
    words = ", ".join(numbers.labels)
    return (
        f"Self-attention, from left to right. The {length} input words {words} are each turned into a Query, a Key and "
        f"a Value vector of {width} numbers. The dot product of each Query with each Key gives the scores Q K "
        f"transposed, which are {steps}: the attention weights. The output of a word is the weighted sum of the Value "
        f"vectors. Weights of layer {numbers.layer} head {head}, row by row: {'; '.join(rows)}."
    )
