"""One step of decoding with a cache: the new token's vectors, its weights, and the next tokens."""

from __future__ import annotations

import numpy as np

from ....support._numbers import size as bytes_of, typeset
from ._canvas import Canvas
from ._fonts import fitted, width_of
from ._shapes import NUMBER, Box, arrow, column_labels, heat, node, row_labels, vectors
from ._step_numbers import DecoderStepNumbers, StepReading

_SHOWN = 3
_CELL = (46.0, 28.0)
_WAY = 44.0  # room for an arrow
_BETWEEN = 120.0  # between self-attention and cross-attention


def draw_step(canvas: Canvas, numbers: DecoderStepNumbers, head: int, source_head: int | None = None) -> str:
    """Draw a step of decoding, with cross-attention below it if there is a source; returns the description."""
    own = numbers.own
    room, wide = _room(own), _wide(own.key)
    high = len(own.labels) * _CELL[1]
    token = Box(0, 0, max(96.0, width_of(own.labels[-1], 15, bold=True) + 32), 44)
    new = token.right + 2 * _WAY + 12  # left edge of the new token's vectors
    held = new + wide + 2 * _WAY + room + 22  # left edge of the cache
    query = Box(new, 0, wide, _CELL[1])
    keys = Box(held, 120, wide, high)
    values = Box(held, keys.bottom + 100, wide, high)
    _draw_new(canvas, own, head, token, (query, keys, values))
    key, value = own.of_head(head)
    _draw_cache(canvas, own.labels, keys, key, "key", "K cache", room, new=True)
    _draw_cache(canvas, own.labels, values, value, "value", "V cache", room, new=True)
    end = _draw_reading(canvas, own, head, query, keys, values)
    shape = " × ".join(map(str, numbers.before)), " × ".join(map(str, own.shape))
    added = f"A token adds {bytes_of(own.token_bytes)} in {numbers.layers} layers."
    facts = [f"Keys of a layer: {shape[0]} becomes {shape[1]}; values likewise. {added}"]
    if numbers.source is not None and source_head is not None:
        canvas.text(0, -52, "Self-attention: the cache grows with every token", size=17, bold=True)
        facts.append(_facts_of_source(numbers.source, numbers.layers))
        top = values.bottom + 52 + 22 + _BETWEEN
        end = _draw_source(canvas, numbers, source_head, token._replace(y=top), (new, held), facts[1])
    _draw_following(canvas, numbers.following, end)
    _draw_facts(canvas, new, values.bottom + 52, facts[0], f"Layer {numbers.layer} head {head}.")
    return _description(numbers, head, source_head, facts)


def _room(reading: StepReading) -> float:
    return min(84.0, max(width_of(label, NUMBER) for label in reading.labels))


def _wide(rows: np.ndarray) -> float:
    return min(_SHOWN, rows.shape[-1]) * _CELL[0] + 22


def _draw_facts(canvas: Canvas, x: float, y: float, facts: str, place: str) -> None:
    canvas.text(x, y, facts, size=14, fill="soft")
    canvas.text(x, y + 22, place, size=14, fill="soft")


def _facts_of_source(source: StepReading, layers: int) -> str:
    kept = bytes_of(len(source.labels) * source.token_bytes)
    shape = " × ".join(map(str, source.shape))
    return f"Keys of a layer: {shape}, in every step the same; values likewise. {kept} in {layers} layers, made once."


def _draw_source(
    canvas: Canvas, numbers: DecoderStepNumbers, head: int, token: Box, columns: tuple[float, float], facts: str
) -> tuple[float, float]:
    """Cross-attention below self-attention: a new query, with the source's keys and values, computed once."""
    source = numbers.source
    assert source is not None
    room, wide, high = _room(source), _wide(source.key), len(source.labels) * _CELL[1]
    new, held = columns
    canvas.text(0, token.y - 52, "Cross-attention: the cache of the source stays as it is", size=17, bold=True)
    query = Box(new, token.y, _wide(source.query), _CELL[1])
    token = token._replace(y=query.middle[1] - token.height / 2)
    _draw_token(canvas, numbers.own.labels[-1], token, "")
    canvas.text(token.middle[0], token.bottom + 24, "after self-attention", size=13, fill="soft", anchor="middle")
    arrow(canvas, [(token.right + 4, query.middle[1]), (query.x - 8, query.middle[1])], stroke="query")
    canvas.formula((token.right + query.x) / 2, query.middle[1] - 9, "× W_{Q}", size=13, fill="query", anchor="middle")
    vectors(canvas, query.x, query.y, source.query[head][None], shown=_SHOWN, role="query", cell=_CELL)
    canvas.text(query.x, query.y - 10, "a second query", size=14, fill="query", bold=True)
    keys = Box(held, token.y + 120, wide, high)
    values = Box(held, keys.bottom + 100, _wide(source.value), high)
    rows = source.of_head(head)
    for where, held_rows, role, name in ((keys, rows[0], "key", "K"), (values, rows[1], "value", "V")):
        _draw_cache(canvas, source.labels, where, held_rows, role, f"{name} of the source", room, new=False)
    _draw_encoder(canvas, source, token, (keys, values), new)
    end = _draw_reading(canvas, source, head, query, keys, values)
    _draw_facts(canvas, new, values.bottom + 52, facts, f"Layer {numbers.layer} head {head}.")
    return end


def _draw_encoder(canvas: Canvas, source: StepReading, token: Box, caches: tuple[Box, Box], new: float) -> None:
    """The encoder, from which keys and values of the source come."""
    keys, values = caches
    middle = (keys.middle[1] + values.middle[1]) / 2
    where = Box(token.x, middle - 34, max(token.width, 128.0), 68)
    canvas.rect(*where, fill="wash", stroke="ink", line=1.5, radius=10)
    canvas.text(where.middle[0], middle - 4, "Encoder", size=15, anchor="middle", bold=True)
    canvas.text(where.middle[0], middle + 16, "has read", size=13, fill="soft", anchor="middle")
    words = fitted(" ".join(source.labels), 13, max(where.width, 150.0))
    canvas.text(where.x, where.bottom + 22, words, size=13, fill="soft")
    bend = new + 20
    for cache, role, name in ((keys, "key", "K"), (values, "value", "V")):
        y = cache.middle[1]
        labels = cache.x - 9 - max(width_of(label, NUMBER) for label in source.labels)
        arrow(canvas, [(where.right + 4, middle), (bend, middle), (bend, y), (labels - 8, y)], stroke=role)
        canvas.formula((bend + labels) / 2, y - 9, f"× W_{{{name}}}, once", size=13, fill=role, anchor="middle")


def _draw_token(canvas: Canvas, label: str, token: Box, below: str) -> None:
    canvas.rect(*token, fill="wash", stroke="ink", line=1.5, radius=22)
    x, y = token.middle
    canvas.text(x, y + 0.35 * 15, fitted(label, 15, token.width - 20, bold=True), size=15, anchor="middle", bold=True)
    canvas.text(x, token.y - 14, "New token", size=15, anchor="middle", bold=True)
    if below:
        canvas.text(x, token.bottom + 24, below, size=13, fill="soft", anchor="middle")


def _draw_new(canvas: Canvas, own: StepReading, head: int, token: Box, rows: tuple[Box, Box, Box]) -> None:
    """The new token and its three vectors; key and value go into the last row of their caches."""
    query, keys, values = rows
    step = _CELL[1]
    middle = keys.bottom - step / 2
    token = token._replace(y=middle - token.height / 2)
    _draw_token(canvas, own.labels[-1], token, f"position {len(own.labels) - 1}")
    held = own.of_head(head)
    for name, role, vector, y, cache in (
        ("q", "query", own.query[head], query.y, None),
        ("k", "key", held[0][-1], keys.bottom - step, keys),
        ("v", "value", held[1][-1], values.bottom - step, values),
    ):
        start, end, bend = (token.right + 4, middle), (query.x - 8, y + step / 2), token.right + 34
        turned = abs(end[1] - start[1]) > 1
        arrow(canvas, [start, (bend, start[1]), (bend, end[1]), end] if turned else [start, end], stroke=role)
        x = (bend + end[0]) / 2 + 2
        canvas.formula(x, end[1] - 9, f"× W_{{{name.upper()}}}", size=13, fill=role, anchor="middle")
        vectors(canvas, query.x, y, vector[None], shown=_SHOWN, role=role, cell=_CELL)
        label = {"q": "query of the new token", "k": "its key", "v": "its value"}[name]
        canvas.text(query.x, y - 10, label, size=14, fill=role, bold=True)
        if cache is not None:
            labels = cache.x - 9 - width_of(own.labels[-1], NUMBER)
            arrow(canvas, [(query.right + 6, end[1]), (labels - 8, end[1])], stroke=role)
            canvas.text((query.right + labels) / 2 - 2, end[1] - 9, "append", size=13, fill=role, anchor="middle")


def _draw_cache(
    canvas: Canvas,
    labels: list[str],
    where: Box,
    rows: np.ndarray,
    role: str,
    name: str,
    room: float,
    *,
    new: bool,
) -> None:
    """Keys or values by token; the ``new`` one, the last, has a frame."""
    with canvas.group(f"{name}, {len(rows)} rows of {rows.shape[1]}" + "; the last is new" * new):
        wide = canvas.text(where.x, where.y - 14, name, size=15, fill=role, bold=True)
        canvas.text(where.x + wide + 10, where.y - 14, f"{len(rows)} × {rows.shape[1]}", size=13, fill="soft")
        vectors(canvas, where.x, where.y, rows, shown=_SHOWN, role=role, cell=_CELL)
        row_labels(canvas, where, labels, fill="soft", room=room)
        if not new:
            return
        last = where.bottom - _CELL[1]
        canvas.rect(where.x, last, where.width, _CELL[1], stroke=role, line=2.5, radius=6)


def _draw_reading(
    canvas: Canvas, reading: StepReading, head: int, query: Box, keys: Box, values: Box
) -> tuple[float, float]:
    """Scores against all keys, one row of weights, the sum of the values; returns where the output is."""
    x, y = keys.right + _WAY, keys.middle[1]
    arrow(canvas, [(query.right + 6, query.middle[1]), (x, query.middle[1]), (x, y - 13)], stroke="query")
    arrow(canvas, [(keys.right + 6, y), (x - 13, y)], stroke="key")
    node(canvas, x, y, "dot")
    canvas.text(x + 12, y - 52, "dot product,", size=14, bold=True)
    canvas.text(x + 12, y - 34, "scale, softmax", size=14, bold=True)
    weights = reading.weights[head][None]
    side = min(74.0, max(50.0, max(width_of(label, NUMBER) for label in reading.labels) + 10))
    where = Box(x + 13 + _WAY + 76, y - 15, side * weights.shape[1], 30)
    arrow(canvas, [(x + 13, y), (where.x - 6, y)])
    canvas.text(where.x, where.y - 32, "Attention weights", size=15, fill="weight", bold=True)
    with canvas.group("Attention weights of the new token"):
        heat(canvas, where.x, where.y, weights, np.ones(weights.shape, bool), cell=(side, 30), largest=1.0)
        column_labels(canvas, where, reading.labels, fill="key")
    down, low = where.middle[0], values.middle[1]
    arrow(canvas, [(down, where.bottom + 6), (down, low - 13)], stroke="weight")
    arrow(canvas, [(values.right + 6, low), (down - 13, low)], stroke="value")
    node(canvas, down, low, "times")
    canvas.text(down - 22, low - 12, "weighted sum", size=14, anchor="end", bold=True)
    out = Box(down + 13 + 36, low - _CELL[1] / 2, min(_SHOWN, reading.out.shape[-1]) * _CELL[0] + 22, _CELL[1])
    arrow(canvas, [(down + 13, low), (out.x - 4, low)])
    canvas.text(out.x, out.y - 10, "output", size=14, bold=True)
    vectors(canvas, out.x, out.y, reading.out[head][None], shown=_SHOWN, role="plain", cell=_CELL)
    return out.middle[0], out.bottom


def _draw_following(canvas: Canvas, following: list[tuple[str, float]], at: tuple[float, float]) -> None:
    x, y = at
    names = [fitted(word, 14, 110) for word, _ in following]
    top = y + 58
    arrow(canvas, [(x, y + 6), (x, top - 24)])
    canvas.text(x + 14, y + 32, "all heads, all layers", size=13, fill="soft")
    canvas.text(x, top, "Next token", size=15, anchor="middle", bold=True)
    for i, (name, (_, share)) in enumerate(zip(names, following, strict=True)):
        row = top + 12 + i * 26
        canvas.text(x - 10, row + 15, name, size=14, anchor="end")
        canvas.rect(x, row + 3, max(2.0, 120 * share), 16, fill="heat", opacity=0.62, radius=2)
        canvas.text(x + max(2.0, 120 * share) + 8, row + 15, typeset(share), size=13, fill="soft")


def _description(numbers: DecoderStepNumbers, head: int, source_head: int | None, facts: list[str]) -> str:
    own, source = numbers.own, numbers.source
    read = ""
    if source is not None and source_head is not None:
        read = (
            f" Cross-attention follows: a second query reads the {len(source.labels)} keys and values of the source, "
            f"which were made once from what the encoder gives and do not change. {facts[1]} Weights of layer "
            f"{numbers.layer} head {source_head}: {_in_words(source, source_head)}."
        )
    following = ", ".join(f"{word} {typeset(share)}" for word, share in numbers.following)
    return (
        f"One step of decoding with a key-value cache. {len(own.labels) - 1} tokens are cached; the new token "
        f"{own.labels[-1]} makes a query, a key and a value. Key and value are appended to the cache; the query "
        f"reads all {len(own.labels)} keys and, by its weights, all values. {facts[0]} Weights of layer "
        f"{numbers.layer} head {head}: {_in_words(own, head)}.{read} Most probable next tokens: {following}."
    )


def _in_words(reading: StepReading, head: int) -> str:
    return ", ".join(f"{label} {typeset(w)}" for label, w in zip(reading.labels, reading.weights[head], strict=True))
