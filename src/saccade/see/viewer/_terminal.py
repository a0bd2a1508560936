"""A look in a terminal: sentences, the map of one head, and the roles of all heads.

Colour is never the only sign: cells have digits if they are wide enough, otherwise shades.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from ...support._numbers import counted
from ..inspection import ROLE_NAMES, hundredths, short_number

if TYPE_CHECKING:
    from ..inspection import Look

WIDEST_CELL, DIGIT_CELL, BLOCK_CELL = 6, 4, 2
LONGEST_LABEL = 14
LEAST_HABIT = 0.1  # above chance, for a head to have a habit instead of a role
FILLED = 0.15  # least weight of cells with a coloured background
SHORT_ROLES = {
    "previous": "prev.",
    "next": "next",
    "self": "self",
    "sink": "sink",
    "delimiter": "delim.",
    "special": "spec.",
    "repeat": "repeat",
    "duplicate": "dupl.",
    "broad": "broad",
    "mixed": "mixed",
}
HABITS = {"previous": "prev", "next": "next", "self": "self", "sink": "1st", "special": "spec", "delimiter": "del"}
_NEAREST = {"previous": "prev", "delimiter": "del", "repeat": "rep", "duplicate": "dup", "special": "spec"}
BREAK, ACROSS = "┊", "┄"  # between two passages
_SHADES = "░▒▓█"
_ACCENT = "bold #4f8cff"
# From a quiet grey to the accent; legible on dark and on light terminals.
_RAMP = ((0x6B, 0x74, 0x86), (0x1F, 0x5E, 0xFF))


def print_look(console: Console, look: Look) -> None:
    """Print findings, map and table of a look in a terminal; everything fits ``console.width``."""
    for note in filter(None, (look.note, look.other_layers, look.roles_note)):
        console.print(Text(f"Note: {note}."))
    console.print(_facts(look), style="dim")
    console.print()
    for finding in look.findings:
        _print_finding(console, finding.sentence)
    console.print()
    print_map(console, look)
    console.print()
    print_heads(console, look)


def _facts(look: Look) -> Text:
    map_ = look.seen
    words = look.words
    parts = [
        f"{words:,} words and marks" if words > 1 else "1 word",
        counted(look.pieces, "token"),
        f"{look.model}, {map_.size}",
    ]
    return Text(", ".join(parts) + (f", {look.source}" if look.source else ""))


def _print_finding(console: Console, sentence: str) -> None:
    text = Text(sentence)
    text.highlight_regex(r"(?<![\w.])(?:\.\d\d|1\.00)(?!\w)", _ACCENT)
    text.highlight_regex(r"'[^' ]+'", "bold")
    lines = text.wrap(console, max(20, console.width - 2))
    for i, line in enumerate(lines):
        console.print(Text.assemble(("• " if i == 0 else "  ", _ACCENT), line), highlight=False, soft_wrap=True)


# The map of one head


def print_map(console: Console, look: Look) -> None:
    """The map of ``look.layer``, ``look.head`` with as many words as fit: wide cells with digits, or narrow ones."""
    map_ = look.seen
    labels = [_clip(word.label, LONGEST_LABEL) for word in map_.words]
    _print_title(console, look)
    columns = list(range(len(labels)))
    room = console.width - 1 - max(map(cell_len, labels)) - len(look.breaks(columns))
    cell = min(WIDEST_CELL, room // len(labels))
    if cell >= DIGIT_CELL:
        lines = _digit_lines(look, labels, cell, _colours(console))
    else:
        columns = _that_fit(look, labels, console.width)
        draw = _block_lines if map_.causal else _square_lines
        lines = draw(look, labels, columns, _colours(console))
    if not look.is_all(columns):
        held = look.seen.stretch[1] - look.seen.stretch[0]
        among = f" among the {held:,} words chosen" if held < look.words else ""
        around = "" if len(columns) == len(labels) else f", around the clearest finding{among}"
        console.print(Text(f"{look.part(columns)}{around}; the rest of a row falls on other words", style="dim"))
    for line in lines:
        line.truncate(console.width)
        console.print(line, soft_wrap=True, highlight=False)
    if cell < DIGIT_CELL and not _colours(console):
        console.print(Text("░ .05  ▒ .25  ▓ .50  █ .75 and more", style="dim"))
    for i, said in enumerate(look.outside):
        text = Text.assemble(("Outside " if i == 0 else "        ", "dim"), said)
        console.print(text, highlight=False, soft_wrap=console.width >= text.cell_len)


def _that_fit(look: Look, labels: list[str], width: int) -> list[int]:
    """The words that fit in cells of width two, after the space for labels, breaks between passages and, for a square
    map, numbers."""
    numbers = 0 if look.seen.causal else len(str(look.words)) + 1
    room = width - 1 - max(map(cell_len, labels)) - numbers
    count = max(1, room // BLOCK_CELL)
    columns = look.columns(count)
    while count > 1 and BLOCK_CELL * len(columns) + len(look.breaks(columns)) > room:
        count -= 1
        columns = look.columns(count)
    return columns


def _print_title(console: Console, look: Look) -> None:
    title = Text(f"Layer {look.layer} head {look.head}", style="bold")
    role = look.measured(look.layer, look.head)
    if role:
        score = f"{ROLE_NAMES[role['decided_by']]} {short_number(look.deciding(role))}"
        title.append(f", mixed ({score})" if role["role"] == "mixed" else f", {score}", style="not bold")
    title.append("; each row: what that word looks at", style="not bold dim")
    console.print(title)


def _digit_lines(look: Look, labels: list[str], cell: int, colours: bool) -> list[Text]:
    left = max(cell_len(label) for label in labels)
    weights = look.seen.weights[look.layer, look.head]
    breaks = look.breaks(range(len(labels)))
    head = Text(" " * left + " ")
    for i, label in enumerate(labels):
        head.append(BREAK * (i in breaks) + _pad(_clip(label, cell - 1), cell, "centre"), style="dim")
    lines = [head]
    for q in look.looking(range(len(labels))):
        line = Text(_pad(labels[q], left, "right") + " ", style="bold")
        for k in range(look.seen.seen_by[q]):
            line.append(BREAK * (k in breaks), style="dim")
            line.append(*_digit_cell(float(weights[q, k]), cell, colours))
        lines += [*_line_across(q in breaks and len(lines) > 1, line.cell_len), line]
    return lines


def _line_across(wanted: bool, width: int) -> list[Text]:
    """A line between the rows of two passages."""
    return [Text(ACROSS * width, style="dim")] if wanted else []


def _digit_cell(weight: float, cell: int, colours: bool) -> tuple[str, str | Style]:
    n = hundredths(weight)
    text = _pad(short_number(weight) if n else "·", cell, "centre")
    if not colours:
        return text, "bold" if n >= 30 else ""
    return text, (_fill(weight) if weight >= FILLED else "dim")


def _block_lines(look: Look, labels: list[str], columns: list[int], colours: bool) -> list[Text]:
    """Lines of the map. Each row ends with its word, next to the top of the word's own column."""
    weights = look.seen.weights[look.layer, look.head]
    breaks = look.breaks(columns)
    lines: list[Text] = []
    for row, q in enumerate(columns):
        line = Text()
        for column, k in enumerate(columns[: row + 1]):
            line.append(BREAK * (column in breaks), style="dim")
            line.append(*_block_cell(float(weights[q, k]), colours))
        lines += _line_across(row in breaks, line.cell_len)
        line.append(" " + labels[q], style="dim" if look.seen.words[q].special else "")
        lines.append(line)
    return lines


def _square_lines(look: Look, labels: list[str], columns: list[int], colours: bool) -> list[Text]:
    """A square map has no room for words at columns: rows and columns have numbers, those of columns downward."""
    weights = look.seen.weights[look.layer, look.head]
    breaks = look.breaks(columns)
    numbers = {k: "" if look.seen.words[k].special else str(look.number(k)) for k in columns}
    digits = max(map(len, numbers.values()))
    lines = [
        Text("".join(BREAK * (i in breaks) + f"{numbers[k]:>{digits}}"[place].rjust(2) for i, k in enumerate(columns)))
        for place in range(digits)
    ]
    for line in lines:
        line.stylize("dim")
    for row, q in enumerate(columns):
        line = Text()
        for column, k in enumerate(columns):
            line.append(BREAK * (column in breaks), style="dim")
            line.append(*_block_cell(float(weights[q, k]), colours))
        lines += _line_across(row in breaks, line.cell_len)
        line.append(f" {numbers[q]:>{digits}}", style="dim")
        line.append(" " + labels[q], style="dim" if look.seen.words[q].special else "")
        lines.append(line)
    return lines


def _block_cell(weight: float, colours: bool) -> tuple[str, str | Style]:
    if weight < 0.05:
        return "· ", "dim"
    if colours and weight >= FILLED:
        return " " * BLOCK_CELL, _fill(weight)
    return _SHADES[min(3, int(weight * 4))] * BLOCK_CELL, "dim" if colours else ""


def _colours(console: Console) -> bool:
    return console.color_system in ("truecolor", "256", "windows") and not console.no_color


def _fill(weight: float) -> Style:
    low, high = _RAMP
    r, g, b = (round(a + (z - a) * min(1.0, weight)) for a, z in zip(low, high, strict=True))
    return Style.parse(f"{'bold ' if weight >= 0.3 else ''}#ffffff on #{r:02x}{g:02x}{b:02x}")


# The role of every head


def print_heads(console: Console, look: Look) -> None:
    """Layers x heads: the role, the score that decided it, the same score here, and the entropy here in nats."""
    map_ = look.seen
    left, cell = 6, 9 if look.roles else 10
    per_line = max(1, (console.width - left) // cell)
    console.print(Text("Role of each head", style="bold"))
    if look.roles:
        legend = "role; score above chance when measured, and in this text; entropy in this text (nats)"
        if look.note:
            legend = (
                "role, as a head of tokens; score above chance when measured on tokens, and of the words of this text; "
                "entropy of these words (nats)"
            )
    else:
        legend = (
            "roles were not measured for this model (saccade heads --roles does that); largest score above chance, and "
            "entropy (nats), in this text"
        )
    console.print(Text(legend, style="dim"))
    for first in range(0, map_.heads, per_line):
        heads = range(first, min(first + per_line, map_.heads))
        console.print(Text(_pad("layer", left) + "".join(_pad(f"head {h}", cell) for h in heads).rstrip(), style="dim"))
        for layer in range(map_.layers):
            for line in _head_lines(look, layer, heads, left, cell):
                console.print(line, soft_wrap=True, highlight=False)


def _head_lines(look: Look, layer: int, heads: range, left: int, cell: int) -> list[Text]:
    lines = [Text(_pad(str(layer), left), style=""), Text(" " * left), Text(" " * left)]
    there = set(look.seen.places())
    for h in heads:
        if (layer, h) not in there:
            for line in lines:
                line.append(" " * cell)
            continue
        role = look.measured(layer, h)
        mixed = role is None or role["role"] == "mixed"
        style = _ACCENT if (layer, h) == (look.layer, look.head) else "dim" if mixed else "bold"
        lines[0].append(_pad(SHORT_ROLES[role["role"]] if role else _habit(look, layer, h), cell), style=style)
        lines[1].append(_pad(_scores(look, role) if role else "", cell), style="dim" if mixed else "")
        lines[2].append(_pad(f"{look.habits['entropy'][layer, h]:.2f}", cell), style="dim")
    for line in lines:
        line.rstrip()
    return lines if look.roles else [lines[0], lines[2]]


def _habit(look: Look, layer: int, head: int) -> str:
    """The largest of the head's scores above chance in this text, for a model with unknown roles."""
    values = {name: look.above(name, layer, head) or 0.0 for name in HABITS}
    best = max(values, key=lambda name: values[name])
    return f"{HABITS[best]} {short_number(values[best])}" if values[best] >= LEAST_HABIT else "-"


def _scores(look: Look, role: dict[str, Any]) -> str:
    score = short_number(look.deciding(role))
    if role["role"] == "mixed":
        return f"{_NEAREST.get(role['decided_by'], role['decided_by'])} {score}"
    value = look.above(role["decided_by"], role["layer"], role["head"])
    return f"{score} {'-' if value is None else short_number(value)}"


# Fitting text into cells


def _clip(label: str, width: int) -> str:
    if cell_len(label) <= width:
        return label
    while cell_len(label) > width - 1:
        label = label[:-1]
    return label + "…"


def _pad(label: str, width: int, side: str = "left") -> str:
    gap = max(0, width - cell_len(label))
    before = {"left": 0, "right": gap, "centre": gap // 2 + gap % 2}[side]
    return " " * before + label + " " * (gap - before)
