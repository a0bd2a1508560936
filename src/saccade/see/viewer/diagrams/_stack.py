"""Parts of a model below one another: boxes with shapes and parameters, blocks with residual streams, frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ._canvas import Canvas
from ._fonts import fitted, width_of
from ._modules import DiagramPart
from ._shapes import Box, Point, arrow, node

GAP = 20.0  # between two boxes, with an arrow
PLUS = 9.0  # radius of a sum
FRAME = 14.0  # from a frame to the residual stream in it
RESIDUAL = 26.0  # from the boxes to the residual line around them
_ROLES = {"attention": "weight", "cross": "key", "feed-forward": "head6", "head": "head4", "embedding": "head5"}
DrawBox = Callable[[Canvas, DiagramPart, float, float, float], float]
ADDED = (
    "Position embedding",
    "Segment embedding",
    "Sinusoidal positions",
    "Embedding of degrees in",
    "Embedding of degrees out",
)


@dataclass
class Drawn:
    """The lower edge of a drawing, and the points where keys and values of the other side enter."""

    bottom: float
    entries: list[Point] = field(default_factory=list)


def draw_parts(
    canvas: Canvas, parts: Sequence[DiagramPart], x: float, y: float, width: float, axes: Sequence[float] | None = None
) -> Drawn:
    """Draw ``parts`` from ``y`` downward, each ``width`` wide from ``x``; an arrow leads to each but the first.

    ``axes`` are the x positions of the flow; None is the middle.
    """
    drawn, before, ways = Drawn(y), None, axes or [x + width / 2]
    for part in parts:
        if before is not None:
            drawn.bottom = max([_joint(canvas, before, part, axis, drawn.bottom) for axis in ways])
        if part.kind == "stack":
            inner = draw_frame(canvas, part, x, drawn.bottom, width)
            drawn.bottom = inner.bottom
            drawn.entries += inner.entries
        elif part.kind == "block":
            inner = draw_block(canvas, part, x, drawn.bottom, width)
            drawn.bottom = inner.bottom
            drawn.entries += inner.entries
        else:
            drawn.bottom = draw_box(canvas, part, x, drawn.bottom, width)
        before = part
    return drawn


def _joint(canvas: Canvas, before: DiagramPart, part: DiagramPart, x: float, y: float) -> float:
    """The sign between two parts: a plus if they are added, nothing between tables side by side, else an arrow."""
    if before.kind == part.kind == "embedding":
        if part.label not in ADDED:
            return y + 6
        return draw_plus(canvas, x, y)
    arrow(canvas, [(x, y + 1), (x, y + GAP - 1)])
    return y + GAP


def draw_plus(canvas: Canvas, x: float, y: float) -> float:
    """A plus between two parts; returns the upper edge of the lower one."""
    node(canvas, x, y + 12, "plus", radius=8)
    return y + 24


def draw_box(canvas: Canvas, part: DiagramPart, x: float, y: float, width: float) -> float:
    """One part: name and parameter count on a line, its shape below; returns its lower edge."""
    high = 32.0 if part.kind == "norm" else 48.0 if part.details else 34.0
    role = _ROLES.get(part.kind)
    fill, stroke = (f"{role}-wash", role) if role else ("wash", "edge")
    counted = f"{part.parameters:,}" if part.parameters or not part.shared else "+ 0"
    with canvas.group(f"{part.label}: {part.parameters:,} parameters"):
        canvas.rect(x, y, width, high, fill=fill, stroke=stroke, radius=8)
        baseline = y + (21 if part.details and part.kind != "norm" else high / 2 + 5)
        room = width - 34 - width_of(counted, 13)
        canvas.text(x + 12, baseline, fitted(part.label, 14, room, bold=True), size=14, bold=True)
        canvas.text(x + width - 12, baseline, counted, size=13, fill="soft", anchor="end")
        if part.details and part.kind != "norm":
            detail = fitted(part.details[0], 13, width - 24)
            canvas.text(x + 12, y + 39, detail, size=13, fill="soft")
    return y + high


def draw_frame(canvas: Canvas, part: DiagramPart, x: float, y: float, width: float) -> Drawn:
    """A frame around equal layers, drawn once, with their number and parameters."""
    top = y + 40
    # The frame goes behind its content, which sets its height.
    known = part.parts[0].kind == "block"
    bottom = _draw_inside(Canvas(), part.parts, x, top, width, known).bottom + FRAME
    frame = Box(x - FRAME, y, width + 2 * FRAME, bottom - y)
    canvas.rect(*frame, fill="paper", stroke="line", line=1.5, radius=14)
    times = f"{part.repeat} ×"
    wide = width_of(times, 17, bold=True)
    canvas.text(frame.x + 16, y + 26, times, size=17, bold=True)
    left, right = frame.x + 24 + wide, frame.right - 16
    total = f"{part.parameters:,}"
    canvas.text(right, y + 26, total, size=13, fill="soft", anchor="end")
    room = right - left - width_of(total, 13) - 10
    inner, several = part.parts[0], len(part.parts) > 1
    title = title_of(inner) if inner.kind == "block" else f"{part.label}, its parts" if several else part.label
    canvas.text(left, y + 26, fitted(title, 14, room), size=14, fill="soft")
    return Drawn(bottom, _draw_inside(canvas, part.parts, x, top, width, known).entries)


def _draw_inside(canvas: Canvas, parts: Sequence[DiagramPart], x: float, y: float, width: float, known: bool) -> Drawn:
    """The parts of a layer; without arrows if only their names are known, not their order."""
    if known:
        return draw_parts(canvas, parts, x, y, width)
    for part in parts:
        y = (draw_parts(canvas, [part], x, y, width)).bottom + 6
    return Drawn(y - 6)


def title_of(block: DiagramPart) -> str:
    """The block's label with the place of its norm."""
    return f"{block.label}, {block.placement}-norm" if block.placement != "parallel" else f"{block.label}, parallel"


def draw_block(
    canvas: Canvas, block: DiagramPart, x: float, y: float, width: float, draw: DrawBox | None = None
) -> Drawn:
    """Attention and feed-forward with their norms and the residual stream; ``draw`` draws each box."""
    draw = draw or draw_box
    x, width = x + RESIDUAL, width - 2 * RESIDUAL
    if block.placement == "parallel":
        return _draw_parallel(canvas, block, x, y, width, draw)
    drawn = Drawn(y)
    for part in block.parts:
        drawn.bottom = _draw_sublayer(
            canvas, part, block.placement, Box(x, drawn.bottom, width, 0), drawn.entries, draw
        )
    return drawn


def _draw_sublayer(
    canvas: Canvas, part: DiagramPart, placement: str, where: Box, entries: list[Point], draw: DrawBox
) -> float:
    x, y, width, _ = where
    middle, right = x + width / 2, x + width + RESIDUAL
    arrow(canvas, [(middle, y), (middle, y + GAP + 4)])
    at = y + GAP + 5
    if placement == "pre" and part.parts:
        at = draw_box(canvas, part.parts[0], x, at, width)
        arrow(canvas, [(middle, at + 1), (middle, at + GAP - 2)])
        at += GAP - 1
    top, at = at, draw(canvas, part, x, at, width)
    if part.kind == "cross":
        entries.append((x, (top + at) / 2))
    plus = at + GAP - 2 + PLUS
    arrow(canvas, [(middle, at + 1), (middle, plus - PLUS)])
    # The stream leaves before the norm and returns after the layer.
    arrow(canvas, [(middle, y + 7), (right, y + 7), (right, plus), (middle + PLUS, plus)], stroke="ink")
    node(canvas, middle, plus, "plus", radius=PLUS, stroke="ink")
    at = plus + PLUS
    if placement == "post" and part.parts:
        arrow(canvas, [(middle, at), (middle, at + GAP - 3)])
        at = draw_box(canvas, part.parts[0], x, at + GAP - 2, width)
    return at


def _draw_parallel(canvas: Canvas, block: DiagramPart, x: float, y: float, width: float, draw: DrawBox) -> Drawn:
    """One norm, both layers side by side, their sum, and the residual stream added to it."""
    middle, right = x + width / 2, x + width + RESIDUAL
    arrow(canvas, [(middle, y), (middle, y + GAP + 4)])
    norms = [norm for part in block.parts for norm in part.parts]
    at = y + GAP + 5
    at = draw_box(canvas, norms[0], x, at, width) if norms else at
    half = (width - 16) / 2
    ends = []
    for i, part in enumerate(block.parts):
        left = x + i * (half + 16)
        arrow(canvas, [(middle, at), (middle, at + 12), (left + half / 2, at + 12), (left + half / 2, at + 30)])
        ends.append((left + half / 2, draw(canvas, part, left, at + 31, half)))
    low = max(end for _, end in ends)
    plus = low + 30 + PLUS
    for i, (column, end) in enumerate(ends):
        arrow(canvas, [(column, end + 1), (column, plus), (middle + (PLUS if i else -PLUS), plus)])
    node(canvas, middle, plus, "plus", radius=PLUS)
    last = plus + 2 * PLUS + GAP
    arrow(canvas, [(middle, plus + PLUS), (middle, last - PLUS)])
    arrow(canvas, [(middle, y + 7), (right, y + 7), (right, last), (middle + PLUS, last)], stroke="ink")
    node(canvas, middle, last, "plus", radius=PLUS, stroke="ink")
    return Drawn(last + PLUS)
