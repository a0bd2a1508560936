"""One step of decoding with a cache: what the new token adds, what it reads, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..._call import ObservedCall
from ..._numbers import size as bytes_of
from ...inspection import TextModel, weights_of
from ...inspection._models import evaluating
from ...models import DecoderLM
from ...models.text.decoder import TextDecoder
from ...nn import KVCache
from ._canvas import Canvas
from ._fonts import fitted, width_of
from ._head import read_short
from ._shapes import NUMBER, Box, arrow, column_labels, heat, node, number, row_labels, vectors

MOST_TOKENS = 12
_SHOWN = 3
_CELL = (46.0, 28.0)
_BEST = 3  # next tokens that are shown
_WAY = 44.0  # room for an arrow


@dataclass(frozen=True, eq=False)
class StepNumbers:
    """One step in one layer, in float64. T tokens are cached before it.

    Attributes:
        labels: the T cached tokens and the new one.
        query: (H, D). key, value: (Hkv, T + 1, D), what the cache holds afterwards, the last of each the new one.
        weights: (H, T + 1). out: (H, Dv).
        before, after: shapes of the layer's keys in the cache, (B, Hkv, T, D) and (B, Hkv, T + 1, D).
        token_bytes: of keys and values that one token adds, in all layers.
        following: the likeliest next tokens and their probabilities.
    """

    labels: list[str]
    layer: int
    layers: int
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    weights: np.ndarray
    out: np.ndarray
    scale: float
    before: tuple[int, ...]
    after: tuple[int, ...]
    token_bytes: int
    following: list[tuple[str, float]]


def step_numbers(model: TextModel, text: str, layer: int) -> StepNumbers:
    """Decode the last token of ``text`` after the others. ValueError for a model that decodes nothing."""
    module = model.module
    if not isinstance(module, DecoderLM | TextDecoder):
        raise ValueError(f"model: {model.name} decodes no text token by token; a decoder such as GPT-2 does")
    if isinstance(module, TextDecoder) and module.request.head != "causal-lm":
        raise ValueError(f"model: {model.name} has no head that gives next tokens")
    tokens, labels = read_short(model, text, MOST_TOKENS)
    ids = model.whole(tokens.ids)
    if ids.shape[1] < 2:
        raise ValueError("text: a step reads what came before it; two tokens at least are needed")
    cache, seen = module.cache(), list[ObservedCall]()

    def keep(at: int, call: ObservedCall) -> None:
        if at == layer:
            seen.append(call)

    ids = ids.to(next(module.parameters()).device)
    with evaluating(module), torch.no_grad():
        _logits(module, ids[:, :-1], cache, keep)
        logits = _logits(module, ids[:, -1:], cache, keep)
    first, last = seen
    shares = logits[0, -1].double().cpu().softmax(-1)
    best = shares.topk(_BEST)
    words = [_shown_token(model, int(token)) for token in best.indices]
    call_scale = last.scale if last.scale is not None else last.query.shape[-1] ** -0.5
    array = {name: getattr(last, name)[0].double().cpu().numpy() for name in ("query", "key", "value", "out")}
    return StepNumbers(
        labels=labels,
        layer=layer,
        layers=model.layers,
        query=array["query"][:, 0],
        key=array["key"],
        value=array["value"],
        weights=weights_of(last)[0, :, 0].double().cpu().numpy(),
        out=array["out"][:, 0],
        scale=float(call_scale),
        before=tuple(first.key.shape),
        after=tuple(last.key.shape),
        token_bytes=_bytes_per_token(last, model.layers),
        following=list(zip(words, best.values.tolist(), strict=True)),
    )


def _logits(module: nn.Module, ids: Tensor, cache: KVCache, keep: object) -> Tensor:
    out = module(ids, cache=cache, observe=keep)
    return out if isinstance(out, Tensor) else out.logits


def _bytes_per_token(call: ObservedCall, layers: int) -> int:
    """What a slot of every layer takes."""
    slot = sum(x.shape[1] * x.shape[-1] * x.element_size() for x in (call.key, call.value))
    return layers * slot


def _shown_token(model: TextModel, token: int) -> str:
    return model.written(token).replace("\n", "⏎").strip() or "␣"


def draw_step(canvas: Canvas, numbers: StepNumbers, head: int) -> str:
    """Draw it; returns the description."""
    group = len(numbers.weights) // len(numbers.key)
    key, value = numbers.key[head // group], numbers.value[head // group]
    room = min(84.0, max(width_of(label, NUMBER) for label in numbers.labels))
    wide, high = min(_SHOWN, key.shape[-1]) * _CELL[0] + 22, len(numbers.labels) * _CELL[1]
    token = Box(0, 0, max(96.0, width_of(numbers.labels[-1], 15, bold=True) + 32), 44)
    new = token.right + 2 * _WAY + 12  # where the new token's vectors stand
    held = new + wide + 2 * _WAY + room + 22  # where the cache stands
    query = Box(new, 0, wide, _CELL[1])
    keys = Box(held, 120, wide, high)
    values = Box(held, keys.bottom + 100, wide, high)
    _draw_new(canvas, numbers, head, token, (query, keys, values), (key, value))
    _draw_cache(canvas, numbers, keys, key, "key", "K cache", room)
    _draw_cache(canvas, numbers, values, value, "value", "V cache", room)
    end = _draw_reading(canvas, numbers, head, query, keys, values)
    _draw_following(canvas, numbers, end)
    shape = " × ".join(map(str, numbers.before)), " × ".join(map(str, numbers.after))
    added = f"A token adds {bytes_of(numbers.token_bytes)} in {numbers.layers} layers."
    facts = f"Keys of a layer: {shape[0]} becomes {shape[1]}; values likewise. {added}"
    canvas.text(new, values.bottom + 52, facts, size=14, fill="soft")
    canvas.text(new, values.bottom + 74, f"Layer {numbers.layer} head {head}.", size=14, fill="soft")
    return _description(numbers, head, facts)


def _draw_new(
    canvas: Canvas,
    numbers: StepNumbers,
    head: int,
    token: Box,
    rows: tuple[Box, Box, Box],
    held: tuple[np.ndarray, np.ndarray],
) -> None:
    """The new token and its three vectors; key and value go into the last row of their caches."""
    query, keys, values = rows
    step = _CELL[1]
    middle = keys.bottom - step / 2
    token = token._replace(y=middle - token.height / 2)
    canvas.rect(*token, fill="wash", stroke="ink", line=1.5, radius=22)
    canvas.text(
        *_centre(token, 15),
        fitted(numbers.labels[-1], 15, token.width - 20, bold=True),
        size=15,
        anchor="middle",
        bold=True,
    )
    canvas.text(token.middle[0], token.y - 14, "New token", size=15, anchor="middle", bold=True)
    canvas.text(
        token.middle[0], token.bottom + 24, f"position {len(numbers.labels) - 1}", size=13, fill="soft", anchor="middle"
    )
    for name, role, vector, y, cache in (
        ("q", "query", numbers.query[head], query.y, None),
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
            labels = cache.x - 9 - width_of(numbers.labels[-1], NUMBER)
            arrow(canvas, [(query.right + 6, end[1]), (labels - 8, end[1])], stroke=role)
            canvas.text((query.right + labels) / 2 - 2, end[1] - 9, "append", size=13, fill=role, anchor="middle")


def _draw_cache(
    canvas: Canvas, numbers: StepNumbers, where: Box, rows: np.ndarray, role: str, name: str, room: float
) -> None:
    with canvas.group(f"{name}, {len(rows)} rows of {rows.shape[1]}; the last is new"):
        wide = canvas.text(where.x, where.y - 14, name, size=15, fill=role, bold=True)
        canvas.text(where.x + wide + 10, where.y - 14, f"{len(rows)} × {rows.shape[1]}", size=13, fill="soft")
        vectors(canvas, where.x, where.y, rows, shown=_SHOWN, role=role, cell=_CELL)
        row_labels(canvas, where, numbers.labels, fill="soft", room=room)
        last = where.bottom - _CELL[1]
        canvas.rect(where.x, last, where.width, _CELL[1], stroke=role, line=2.5, radius=6)


def _draw_reading(
    canvas: Canvas, numbers: StepNumbers, head: int, query: Box, keys: Box, values: Box
) -> tuple[float, float]:
    """Scores against all keys, one row of weights, the sum of the values; returns where the output is."""
    x, y = keys.right + _WAY, keys.middle[1]
    arrow(canvas, [(query.right + 6, query.middle[1]), (x, query.middle[1]), (x, y - 13)], stroke="query")
    arrow(canvas, [(keys.right + 6, y), (x - 13, y)], stroke="key")
    node(canvas, x, y, "dot")
    canvas.text(x + 12, y - 52, "dot product,", size=14, bold=True)
    canvas.text(x + 12, y - 34, "scale, softmax", size=14, bold=True)
    weights = numbers.weights[head][None]
    side = min(74.0, max(50.0, max(width_of(label, NUMBER) for label in numbers.labels) + 10))
    where = Box(x + 13 + _WAY + 76, y - 15, side * weights.shape[1], 30)
    arrow(canvas, [(x + 13, y), (where.x - 6, y)])
    canvas.text(where.x, where.y - 32, "Attention weights", size=15, fill="weight", bold=True)
    with canvas.group("Attention weights of the new token"):
        heat(canvas, where.x, where.y, weights, np.ones(weights.shape, bool), cell=(side, 30), largest=1.0)
        column_labels(canvas, where, numbers.labels, fill="key")
    down, low = where.middle[0], values.middle[1]
    arrow(canvas, [(down, where.bottom + 6), (down, low - 13)], stroke="weight")
    arrow(canvas, [(values.right + 6, low), (down - 13, low)], stroke="value")
    node(canvas, down, low, "times")
    canvas.text(down - 22, low - 12, "weighted sum", size=14, anchor="end", bold=True)
    out = Box(down + 13 + 36, low - _CELL[1] / 2, min(_SHOWN, numbers.out.shape[-1]) * _CELL[0] + 22, _CELL[1])
    arrow(canvas, [(down + 13, low), (out.x - 4, low)])
    canvas.text(out.x, out.y - 10, "output", size=14, bold=True)
    vectors(canvas, out.x, out.y, numbers.out[head][None], shown=_SHOWN, role="plain", cell=_CELL)
    return out.middle[0], out.bottom


def _draw_following(canvas: Canvas, numbers: StepNumbers, at: tuple[float, float]) -> None:
    x, y = at
    names = [fitted(word, 14, 110) for word, _ in numbers.following]
    top = y + 58
    arrow(canvas, [(x, y + 6), (x, top - 24)])
    canvas.text(x + 14, y + 32, "all heads, all layers", size=13, fill="soft")
    canvas.text(x, top, "Next token", size=15, anchor="middle", bold=True)
    for i, (name, (_, share)) in enumerate(zip(names, numbers.following, strict=True)):
        row = top + 12 + i * 26
        canvas.text(x - 10, row + 15, name, size=14, anchor="end")
        canvas.rect(x, row + 3, max(2.0, 120 * share), 16, fill="heat", opacity=0.62, radius=2)
        canvas.text(x + max(2.0, 120 * share) + 8, row + 15, number(share), size=13, fill="soft")


def _centre(where: Box, size: float) -> tuple[float, float]:
    return where.middle[0], where.middle[1] + 0.35 * size


def _description(numbers: StepNumbers, head: int, facts: str) -> str:
    weights = ", ".join(f"{label} {number(w)}" for label, w in zip(numbers.labels, numbers.weights[head], strict=True))
    following = ", ".join(f"{word} {number(share)}" for word, share in numbers.following)
    return (
        f"One step of decoding with a key-value cache. {len(numbers.labels) - 1} tokens are cached; the new token "
        f"{numbers.labels[-1]} makes a query, a key and a value. Key and value are appended to the cache; the query "
        f"reads all {len(numbers.labels)} keys and, by its weights, all values. {facts} Weights of layer "
        f"{numbers.layer} head {head}: {weights}. Likeliest next tokens: {following}."
    )
