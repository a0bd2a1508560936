"""A whole model from its module tree: embeddings, layers folded as "N x", head; encoder and decoder side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from ._canvas import Canvas
from ._modules import DiagramPart, tree_of, walk
from ._shapes import arrow
from ._stack import ADDED, FRAME, GAP, draw_parts, draw_plus

_WIDTH, _WIDE = 356.0, 600.0  # of a column, and of one with parallel layers
_GUTTER = 96.0  # between encoder and decoder
_FIRST = ("Patch embedding", "Token embedding", "Embedding: nodes", "Class token")


@dataclass
class Flow:
    """The parts of a model in the order of computation."""

    inputs: list[DiagramPart] = field(default_factory=list)  # of both sides
    encoder: list[DiagramPart] = field(default_factory=list)
    decoder: list[DiagramPart] = field(default_factory=list)  # where there are two sides
    outputs: list[DiagramPart] = field(default_factory=list)


def flow_of(parts: Sequence[DiagramPart]) -> Flow:
    """The flow of parts, which are registered about in order; embeddings and heads move to their places."""
    sides = [part for part in parts if part.kind == "side"]
    flow, begun = Flow(), False
    source: list[DiagramPart] = []
    target: list[DiagramPart] = []
    for part in parts:
        if part.kind == "side":
            begun = True
        elif re.match(r"(source|encoder)_", part.name):
            source.append(part)
        elif re.match(r"(target|decoder)_", part.name):
            target.append(part)
        elif part.kind == "embedding" or (not begun and part.kind != "head" and sides):
            flow.inputs.append(part)
        else:
            flow.outputs.append(part)
    flow.inputs = _ordered(flow.inputs)
    flow.encoder, flow.decoder = source, target
    if len(sides) > 1:
        flow.encoder += sides[0].parts
        flow.decoder += sides[1].parts
    elif sides:
        flow.encoder += sides[0].parts
    return flow


def _ordered(parts: list[DiagramPart]) -> list[DiagramPart]:
    """Embeddings that are added first, then the others; layers that read a signal keep their order."""
    if all(part.kind in ("embedding", "norm") for part in parts):
        return sorted(parts, key=_rank)
    masks = [part for part in parts if part.label == "Mask vector"]
    rest = [part for part in parts if part.label != "Mask vector"]
    at = next((i for i, part in enumerate(rest) if part.label == "Convolutional positions"), len(rest))
    return [*rest[:at], *masks, *rest[at:]]


def _rank(part: DiagramPart) -> int:
    if part.kind == "norm":
        return len(_FIRST) + 2
    if part.label in _FIRST:
        return _FIRST.index(part.label)
    return len(_FIRST) + (0 if part.label in ADDED else 1)


def draw_transformer(canvas: Canvas, module: nn.Module, title: str) -> tuple[str, int]:
    """Draw the transformer; returns the description and the sum of the drawn parameters."""
    parts = tree_of(module)
    flow = flow_of(parts)
    total = sum(part.total() for part in parts)
    wide = _WIDE if any(part.placement == "parallel" for part in walk(parts)) else _WIDTH
    two = bool(flow.decoder)
    bottom = (_draw_two if two else _draw_one)(canvas, flow, wide)
    middle = wide / 2 + (two * (wide + 2 * FRAME + _GUTTER)) / 2
    canvas.text(middle, bottom + 34, f"{title}: {total:,} parameters", size=15, anchor="middle", bold=True)
    return _description(parts, flow, title, total), total


def _draw_one(canvas: Canvas, flow: Flow, wide: float) -> float:
    x, middle = 0.0, wide / 2
    canvas.text(middle, 12, "Input", size=15, anchor="middle", bold=True)
    arrow(canvas, [(middle, 20), (middle, 20 + GAP)])
    end = draw_parts(canvas, [*flow.inputs, *flow.encoder, *flow.outputs], x, 21 + GAP, wide).bottom
    arrow(canvas, [(middle, end + 1), (middle, end + GAP)])
    canvas.text(middle, end + GAP + 18, "Output", size=15, anchor="middle", bold=True)
    return end + GAP + 18


def _draw_two(canvas: Canvas, flow: Flow, wide: float) -> float:
    step = wide + 2 * FRAME + _GUTTER
    lefts, names = (0.0, step), ("Source", "Target")
    sides = (flow.encoder, flow.decoder)
    top = 20.0
    for left, name in zip(lefts, names, strict=True):
        canvas.text(left + wide / 2, 12, name, size=15, anchor="middle", bold=True)
    if flow.inputs:
        # One table for both sides, across both columns.
        for left in lefts:
            x = left + wide / 2
            arrow(canvas, [(x, top), (x, top + GAP)])
        axes = [left + wide / 2 for left in lefts]
        top = draw_parts(canvas, flow.inputs, lefts[0], top + GAP + 1, step + wide, axes).bottom
    drawn = []
    for left, parts in zip(lefts, sides, strict=True):
        x, begin = left + wide / 2, top + GAP + 1
        if flow.inputs and parts[0].label in ADDED:
            begin = draw_plus(canvas, x, top)
        else:
            arrow(canvas, [(x, top + 1), (x, top + GAP)])
        drawn.append(draw_parts(canvas, parts, left, begin, wide))
    _join(canvas, drawn[0].bottom, drawn[1].entries, wide, step)
    end, x = drawn[1].bottom, lefts[1] + wide / 2
    if flow.outputs:
        arrow(canvas, [(x, end + 1), (x, end + GAP)])
        end = draw_parts(canvas, flow.outputs, lefts[1], end + GAP + 1, wide).bottom
    arrow(canvas, [(x, end + 1), (x, end + GAP)])
    canvas.text(x, end + GAP + 18, "Output", size=15, anchor="middle", bold=True)
    return max(end + GAP + 18, drawn[0].bottom + 40)


def _join(canvas: Canvas, bottom: float, entries: Sequence[tuple[float, float]], width: float, step: float) -> None:
    """Arrows from the encoder's end to each cross-attention."""
    gutter = width + FRAME + _GUTTER / 2
    for x, y in entries:
        arrow(
            canvas, [(width / 2, bottom + 1), (width / 2, bottom + 22), (gutter, bottom + 22), (gutter, y), (x, y)],
            stroke="key",
        )  # fmt: skip
        canvas.text(gutter - 14, bottom + 42, "keys and values", size=13, fill="key", anchor="end")


def _description(parts: Sequence[DiagramPart], flow: Flow, title: str, total: int) -> str:
    sentences = []
    for side, inner in (
        ("", flow.inputs),
        ("Encoder: ", flow.encoder),
        ("Decoder: ", flow.decoder),
        ("", flow.outputs),
    ):
        named = [_in_words(part) for part in inner]
        if named:
            sentences.append((side if flow.decoder else "") + ", then ".join(named))
    count = sum(1 for part in walk(list(parts)) if part.kind in ("attention", "cross"))
    body = ". ".join(sentences)
    return f"{title}, from input to output, {total:,} parameters. {body}. {count} kinds of attention are drawn."


def _in_words(part: DiagramPart) -> str:
    if part.kind == "stack":
        inner = "; ".join(_in_words(p) for p in part.parts)
        return f"{part.repeat} times ({inner}), {part.parameters:,} parameters together"
    if part.kind == "block":
        names = ", ".join(p.label.lower() + (f" ({p.details[0]})" if p.details else "") for p in part.parts)
        return f"a {part.placement}-norm {part.label.lower()} of {names}"
    details = f" {part.details[0]}" if part.details else ""
    return f"{part.label}{details} with {part.parameters:,} parameters"
