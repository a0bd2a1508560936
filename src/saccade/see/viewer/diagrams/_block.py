"""One block of a model with its inside: projections, heads, gate, norms, and the residual stream around it.

Of graph attention, one layer: values along the edges, logits by addition, a softmax over each node's neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....support._numbers import counted
from ._canvas import Canvas, formula_width
from ._modules import DiagramPart
from ._shapes import Box, arrow, node
from ._stack import draw_block, draw_box, title_of

_WIDTH, _WIDE = 470.0, 800.0  # of a block, and of one with parallel layers
_GUTTER = 150.0
_PILL = 34.0
_HIGH, _GAP = 34.0, 20.0
_LOGITS = {
    "gat": "e_{ij} = LeakyReLU(a · Wx_{i} + b · Wx_{j})",
    "gatv2": "e_{ij} = a · LeakyReLU(Vx_{i} + Wx_{j})",
}


def draw_blocks(canvas: Canvas, blocks: Sequence[DiagramPart], title: str) -> str:
    """Draw the blocks next to one another, and return the description."""
    x = bottom = 0.0
    for block in blocks:
        if is_graph_layer(block):
            bottom = max(bottom, draw_graph_layer(canvas, block, x, _WIDTH))
            x += _WIDTH + _GUTTER
            continue
        wide = _WIDE if block.placement == "parallel" else _WIDTH
        middle = x + wide / 2
        canvas.text(middle, 0, title_of(block), size=17, anchor="middle", bold=True)
        canvas.text(middle, 22, f"{block.parameters:,} parameters", size=13, fill="soft", anchor="middle")
        width = block.facts["width"]
        canvas.text(middle, 56, f"x: L × {width:,}", size=14, anchor="middle")
        drawn = draw_block(canvas, block, x, 64, wide, _draw_part)
        for entry in drawn.entries:
            _draw_context(canvas, entry, x)
        arrow(canvas, [(middle, drawn.bottom), (middle, drawn.bottom + 26)])
        canvas.text(middle, drawn.bottom + 44, f"out: L × {width:,}", size=14, anchor="middle")
        bottom = max(bottom, drawn.bottom + 44)
        x += wide + _GUTTER
    canvas.text((x - _GUTTER) / 2, bottom + 34, title, size=13, fill="soft", anchor="middle")
    return _description(blocks, title)


def _draw_context(canvas: Canvas, entry: tuple[float, float], x: float) -> None:
    left = x - 52
    arrow(canvas, [(left, entry[1]), entry], stroke="key")
    canvas.text(left - 6, entry[1] - 3, "from the", size=13, fill="key", anchor="end")
    canvas.text(left - 6, entry[1] + 13, "encoder", size=13, fill="key", anchor="end")


def _draw_part(canvas: Canvas, part: DiagramPart, x: float, y: float, width: float) -> float:
    if part.kind in ("attention", "cross"):
        return _draw_attention(canvas, part, x, y, width)
    return _draw_feed_forward(canvas, part, x, y, width) if part.facts else draw_box(canvas, part, x, y, width)


def _frame(canvas: Canvas, part: DiagramPart, where: Box, role: str) -> None:
    canvas.rect(*where, fill=f"{role}-wash", stroke=role, radius=10)
    canvas.text(where.x + 14, where.y + 24, part.label, size=15, bold=True)
    canvas.text(where.right - 14, where.y + 24, f"{part.parameters:,}", size=13, fill="soft", anchor="end")


def _pill(canvas: Canvas, where: Box, text: str, stroke: str) -> None:
    canvas.rect(*where, fill="paper", stroke=stroke, radius=7)
    x, y = where.middle
    size = 13 * min(1.0, (where.width - 12) / formula_width(text, 13))
    canvas.formula(x, y + 4.5, text, size=size, anchor="middle")


def _draw_attention(canvas: Canvas, part: DiagramPart, x: float, y: float, width: float) -> float:
    """Three projections, the heads, the output projection."""
    facts = part.facts
    where = Box(x, y, width, 172)
    role = "key" if part.kind == "cross" else "weight"
    with canvas.group(f"{part.label}: {part.parameters:,} parameters"):
        _frame(canvas, part, where, role)
        gap = 10.0
        wide = (width - 28 - 2 * gap) / 3
        inner, kv = facts["heads"] * facts["head"], facts["kv_heads"] * facts["head"]
        source = facts.get("context", facts["width"])
        columns = (("Q", "query", facts["width"], inner), ("K", "key", source, kv), ("V", "value", source, kv))
        heads = Box(x + 14, y + 92, width - 28, 30)
        for i, (name, colour, size, out) in enumerate(columns):
            pill = Box(x + 14 + i * (wide + gap), y + 38, wide, _PILL)
            _pill(canvas, pill, f"W_{{{name}}}: {size:,} → {out:,}", colour)
            arrow(canvas, [(pill.middle[0], pill.bottom), (pill.middle[0], heads.y)], stroke=colour)
        several = f"{facts['heads']} heads × {facts['head']}"
        several += f", {facts['kv_heads']} of keys and values" if facts["kv_heads"] != facts["heads"] else ""
        several += f", {facts['positions']}" if facts["positions"] else ""
        _pill(canvas, heads, f"{several}: softmax(QK^{{T}} · scale) V", role)
        output = Box(x + 14, y + 134, width - 28, 28)
        arrow(canvas, [(heads.middle[0], heads.bottom), (heads.middle[0], output.y)])
        _pill(canvas, output, f"W_{{O}}: {inner:,} → {facts['width']:,}", role)
    return where.bottom


def _draw_feed_forward(canvas: Canvas, part: DiagramPart, x: float, y: float, width: float) -> float:
    """Up, activation, down; or gated: two branches that are multiplied."""
    facts = part.facts
    grown, act = f"{facts['width']:,} → {facts['hidden']:,}", facts["activation"]
    shrunk = f"{facts['hidden']:,} → {facts['width']:,}"
    role = "head6"
    middle = x + width / 2
    where = Box(x, y, width, 176 if facts["gated"] else 130)
    with canvas.group(f"{part.label}: {part.parameters:,} parameters"):
        _frame(canvas, part, where, role)
        if not facts["gated"]:
            up, down = Box(x + 14, y + 38, width - 28, _PILL), Box(x + 14, y + 86, width - 28, _PILL)
            _pill(canvas, up, f"up: {grown}, {act}", role)
            arrow(canvas, [(middle, up.bottom), (middle, down.y)])
            _pill(canvas, down, f"down: {shrunk}", role)
            return where.bottom
        half = (width - 28 - 12) / 2
        gate, up = Box(x + 14, y + 38, half, _PILL), Box(x + 26 + half, y + 38, half, _PILL)
        times = up.bottom + 32
        for pill, text, sign in ((gate, f"gate: {grown}, {act}", -1), (up, f"up: {grown}", 1)):
            _pill(canvas, pill, text, role)
            arrow(canvas, [(pill.middle[0], pill.bottom), (pill.middle[0], times), (middle + sign * 9, times)])
        node(canvas, middle, times, "times", radius=9)
        down = Box(x + 14, times + 24, width - 28, _PILL)
        arrow(canvas, [(middle, times + 9), (middle, down.y)])
        _pill(canvas, down, f"down: {shrunk}", role)
        return where.bottom


def _description(blocks: Sequence[DiagramPart], title: str) -> str:
    if all(map(is_graph_layer, blocks)):
        return f"{title}. From top to bottom. {'. '.join(map(describe_graph_layer, blocks))}."
    sentences = []
    for block in blocks:
        order = {
            "pre": "norms come before each layer, inside the residual stream's detour",
            "post": "norms come after each sum, on the residual stream itself",
            "parallel": "one norm comes before both layers, which are added together",
        }[block.placement]
        layers = "; ".join(
            f"{part.label}, {', '.join(part.details)}, {part.parameters:,} parameters" for part in block.parts
        )
        sentences.append(f"{title_of(block)}, {block.parameters:,} parameters: {order}. Layers: {layers}")
    body = ". ".join(sentences)
    return f"{title}. From top to bottom. {body}. The residual stream runs around each layer and is added."


def is_graph_layer(part: DiagramPart) -> bool:
    return "graph" in part.facts


def draw_graph_layer(canvas: Canvas, part: DiagramPart, x: float, width: float) -> float:
    """The steps from the vectors of nodes to their outputs; returns the lower edge."""
    facts = part.facts
    heads, head, middle = facts["heads"], facts["head"], x + width / 2
    out = heads * head if facts["concat"] else head
    canvas.text(middle, 0, part.label, size=17, anchor="middle", bold=True)
    canvas.text(middle, 22, f"{part.parameters:,} parameters", size=13, fill="soft", anchor="middle")
    canvas.text(middle, 56, f"x: N nodes × {facts['width']:,}", size=14, anchor="middle")
    boxes = [
        (f"W: {facts['width']:,} → {counted(heads, 'head')} × {head}", "value"),
        (_LOGITS[facts["graph"]], "query"),
        ("w_{ij} = softmax of e_{ij} over the edges j → i", "weight"),
        ("o_{i} = sum of w_{ij} Wx_{j}", "value"),
        (_joined(heads, concat=facts["concat"]), "weight"),
    ]
    at = 64.0
    frame = Box(x, at + _GAP, width, len(boxes) * (_HIGH + _GAP) + _GAP)
    arrow(canvas, [(middle, at), (middle, frame.y)])
    with canvas.group(f"{part.label}: {part.parameters:,} parameters"):
        canvas.rect(*frame, fill="weight-wash", stroke="weight", radius=10)
        for i, (text, role) in enumerate(boxes):
            top = frame.y + _GAP + i * (_HIGH + _GAP)
            canvas.rect(x + 14, top, width - 28, _HIGH, fill="paper", stroke=role, radius=7)
            size = 13 * min(1.0, (width - 44) / formula_width(text, 13))
            canvas.formula(middle, top + _HIGH / 2 + 4.5, text, size=size, anchor="middle")
            if i:
                arrow(canvas, [(middle, top - _GAP), (middle, top)])
    arrow(canvas, [(middle, frame.bottom), (middle, frame.bottom + 26)])
    canvas.text(middle, frame.bottom + 44, f"out: N × {out:,}", size=14, anchor="middle")
    return frame.bottom + 44


def describe_graph_layer(part: DiagramPart) -> str:
    """The layer in words."""
    facts = part.facts
    heads = counted(facts["heads"], "head")
    return (
        f"{part.label}, {part.parameters:,} parameters: each node reads the nodes from which edges lead to it. "
        f"{facts['width']:,} numbers of a node become {heads} of {facts['head']}; their logits are sums, not dot "
        "products; a softmax over a node's edges weighs the neighbours' values, and "
        f"{_joined(facts['heads'], concat=facts['concat'])}"
    )


def _joined(heads: int, *, concat: bool) -> str:
    joined = "heads side by side" if concat else "the mean of heads"
    return f"{joined if heads > 1 else 'one head'}, plus a bias"
