"""A layer of graph attention: values along the edges, logits by addition, a softmax over each node's neighbours."""

from __future__ import annotations

from ....support._numbers import counted
from ._canvas import Canvas, formula_width
from ._modules import DiagramPart
from ._shapes import Box, arrow

_HIGH, _GAP = 34.0, 20.0
_LOGITS = {
    "gat": "e_{ij} = LeakyReLU(a · Wx_{i} + b · Wx_{j})",
    "gatv2": "e_{ij} = a · LeakyReLU(Vx_{i} + Wx_{j})",
}


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
