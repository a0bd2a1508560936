"""Draws docs/figures/architecture.svg from the imports of the package: python docs/figures/architecture.py

Above: what each part of Saccade imports; a part stands below all that import it. Below: the files through which a query
and a mask go from the call to the kernel; an arrow is an import, and C++ files stand where Python ends.
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "saccade"
FIGURE = Path(__file__).with_suffix(".svg")
WAY = [  # the files of the drawing below, row by row
    ["operator._attention"],
    ["operator._checks", "operator._backends.native._run"],
    [
        "operator._call",
        "operator._masks",
        "operator._backends.native._lowering",
        "operator._backends.native._kernels",
    ],
]
CORE = [  # what follows in C++: (file, what it does, the files that it goes on to)
    ("bindings.cpp", "integers and addresses"),
    ("mask_reader.h", "a program of numbers"),
    ("mask_list.h", "runs of tiles to visit"),
    ("forward.h", "scores, weights, output"),
]
OPERATOR = {"batching", "nn", "positions", "variants"}  # parts of that wing; the rest of it is one box
WINGS = {"make": "make", "operator": "operator", "see": "see"}  # the style of a wing's boxes
WIDTH, ROW, BOX = 1000, 50, 26
SHIFT = 44  # of rows to either side, so that no arrow passes behind a box of the same column
STYLE = """text { font: 13px system-ui, sans-serif; fill: #24292f; text-anchor: middle }
.small { font-size: 11px; fill: #57606a }
.title { font-weight: 600; text-anchor: start }
rect { fill: #f3f4f6; stroke: #8a95a5; rx: 4 }
.core { fill: #f6efe3; stroke: #b89b6a }
.see { fill: #e9f5ec; stroke: #6ba37b }
.make { fill: #f5ebf7; stroke: #a57bb0 } .operator { fill: #e3edfb; stroke: #4f77b5 }
path { marker-end: url(#head); fill: none; stroke: #9aa7b8; stroke-width: 1 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .small { fill: #9da7b1 }
rect { fill: #22272e; stroke: #6b7684 }
.core { fill: #33291a; stroke: #9a7f50 } .see { fill: #1a2e20; stroke: #5b9069 }
.make { fill: #2f1f33; stroke: #8f6a99 } .operator { fill: #16264a; stroke: #5c82c8 } path { stroke: #56616f } }"""


def imports() -> dict[str, set[str]]:
    """What each module of the package imports of it, wherever in the file the import stands."""
    modules = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if package else []
            base = ".".join([part for part in above if part] + ([node.module] if node.module else []))
            found[name] |= {
                one if (one := f"{base}.{alias.name}".strip(".")) in modules else base for alias in node.names
            }
        found[name] -= {name, ""}
    return found


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(name: str) -> str:
    """`see.inspection._look` -> `inspection`; "" of what is imported from everywhere and left out."""
    wing, *rest = name.split(".")
    if wing == "operator" and not OPERATOR & set(rest[:1]):
        return wing
    if wing in WINGS:
        return "tasks" if rest and rest[0].startswith("_task_") else rest[0] if rest else ""
    return "" if wing in {"support", "__main__"} else wing


def of_parts(graph: dict[str, set[str]]) -> tuple[dict[str, set[str]], dict[str, str]]:
    """The same between parts, and the wing of each."""
    parts: dict[str, set[str]] = {}
    wings: dict[str, str] = {}
    for name, others in graph.items():
        if own := part_of(name):
            wings[own] = WINGS.get(name.partition(".")[0], "")
            parts.setdefault(own, set()).update(part_of(other) for other in others)
    return {own: others - {own, ""} for own, others in parts.items()}, wings


def rows(parts: dict[str, set[str]]) -> list[list[str]]:
    """Parts above all that they import: the row of a part is one more than the highest of those."""
    height: dict[str, int] = {}

    def of(part: str) -> int:
        if part not in height:
            height[part] = 1 + max((of(other) for other in parts[part]), default=-1)
        return height[part]

    for part in parts:
        of(part)
    lines: list[list[str]] = []
    place: dict[str, float] = {}
    for n in range(max(height.values()) + 1):  # from below: each stands over the middle of what it imports
        line = sorted(part for part in parts if height[part] == n)
        line.sort(key=lambda part: sum(place[other] for other in parts[part]) / max(len(parts[part]), 1))
        place |= {part: (column + 0.5) / len(line) for column, part in enumerate(line)}
        lines.insert(0, line)
    return lines


def _box(x: float, y: float, text: str, kind: str = "") -> str:
    width = 8 * len(text) + 16
    return (
        f'<rect class="{kind}" x="{x - width / 2:.0f}" y="{y - BOX / 2:.0f}" width="{width}" height="{BOX}"/>'
        f'<text x="{x:.0f}" y="{y + 4:.0f}">{escape(text)}</text>'
    )


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    y, to_y = y + BOX / 2, to_y - BOX / 2
    middle = (y + to_y) / 2
    return f'<path d="M{x:.0f} {y:.0f} C{x:.0f} {middle:.0f} {to_x:.0f} {middle:.0f} {to_x:.0f} {to_y:.0f}"/>'


def _laid(lines: list[list[str]], top: float, shift: float = 0) -> dict[str, tuple[float, float]]:
    return {
        name: (WIDTH * (n + 0.5) / len(line) + shift * (row % 3 - 1), top + ROW * row)
        for row, line in enumerate(lines)
        for n, name in enumerate(line)
    }


def _direct(parts: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without what follows from others: a -> c where a -> b -> c."""

    def below(part: str) -> set[str]:
        return set().union(*({other} | below(other) for other in parts[part]))

    return {part: others - set().union(*(below(other) for other in others)) for part, others in parts.items()}


def draw() -> str:
    graph = imports()
    parts, wings = of_parts(graph)
    above = _laid(rows(parts), 84, SHIFT)
    lines, boxes = [], [_box(x, y, part, wings[part]) for part, (x, y) in above.items()]
    for part, others in _direct(parts).items():
        lines += [_arrow(*above[part], *above[other]) for other in sorted(others)]
    top = max(y for _, y in above.values()) + 100
    way = _laid(WAY, top)
    boxes += [
        _box(x, y, name.replace(".", "/").removeprefix("operator/") + ("/" if name.endswith("_masks") else ".py"))
        for name, (x, y) in way.items()
    ]
    for name in way:
        through = (graph[other] for other in graph[name] if (PACKAGE / other.replace(".", "/")).is_dir())
        others = graph[name].union(*through) & set(way)
        lines += [_arrow(*way[name], *way[other]) for other in sorted(others) if way[other][1] == way[name][1] + ROW]
    core_top = top + ROW * len(WAY) + 30
    core = {name: (WIDTH * (n + 0.5) / len(CORE), core_top) for n, (name, _) in enumerate(CORE)}
    lines.append(_arrow(*way["operator._backends.native._kernels"], *core["bindings.cpp"]))
    for (one, (x, y)), (_, what) in zip(core.items(), CORE, strict=True):
        boxes += [
            _box(x, y, f"native/{one}", "core"),
            f'<text class="small" x="{x:.0f}" y="{y + 28:.0f}">{what}</text>',
        ]
    for (_, (x, y)), (_, (to_x, _)) in zip(list(core.items())[:-1], list(core.items())[1:], strict=True):
        lines.append(f'<path d="M{x + 84:.0f} {y:.0f} L{to_x - 84:.0f} {y:.0f}"/>')
    height = core_top + 50
    left_out = "without what follows from other arrows; support/ is left out, which all import"
    titles = [
        '<text class="title" x="16" y="24">What imports what</text>',
        f'<text class="small" style="text-anchor: start" x="170" y="24">{left_out}</text>',
        *(_box(70 + 130 * n, 50, f"wing {wing}", wing) for n, wing in enumerate(WINGS)),
        f'<text class="title" x="16" y="{top - 36:.0f}">From the call to the kernel: a query and a mask</text>',
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">',
            "<title>The parts of Saccade, and the way of a query and a mask</title>",
            f"<style>{STYLE}</style>",
            '<marker id="head" markerWidth="7" markerHeight="7" refX="6" refY="3" orient="auto">'
            '<polygon points="0,0 6,3 0,6" fill="#9aa7b8"/></marker>',
            *titles,
            *lines,
            *boxes,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    FIGURE.write_text(draw(), encoding="utf-8")
