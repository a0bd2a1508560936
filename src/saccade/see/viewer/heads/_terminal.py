"""Heads in a terminal: maps of layers x heads, bars, sentences.

Colour is never the only sign: every cell and every bar has its number, with its sign.
Shape legend: C calls, H heads of a call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ....support._numbers import counted, decimals_for, short_number, signed_cell
from ...attribution import Attribution, CallHeads, Component, HeadImportance, HeadValues, Patching, WhyAttends
from ...inspection import ROLE_NAMES
from .._terminal import _ACCENT, FILLED, _clip, _colours, _pad
from ._sentences import importance_sentences, legend, patching_sentences, rises

LONGEST_LAYER, LONGEST_NAME = 24, 44
BAR = 16  # cells of the longest bar
PAIRS, PARTS, HEADS = 10, 5, 5  # lines of a table
# From a quiet grey to blue, or to orange below 0; white is legible on each.
_GREY, _UP, _DOWN = (0x6B, 0x74, 0x86), (0x1F, 0x5E, 0xFF), (0xB4, 0x53, 0x09)
BARS = {True: "█", False: "▒"}  # above 0, below 0


class Line(NamedTuple):
    """A row of a table with bars."""

    name: str
    value: float
    said: str = ""


def print_importance(console: Console, importance: HeadImportance, measured: str) -> None:
    """The map of the rise of the loss without each head, and sentences; ``measured`` describes the loss."""
    title = {
        "gradient": "Rise of the loss without each head, first-order estimate",
        "ablation": "Rise of the loss without each head",
        "greedy": "Rise of the loss without each head, in the last round that tried it",
    }[importance.by]
    print_map(console, rises(importance), f"{title} (nats)", f"{measured}: {importance.loss:.3f} nats")
    console.print()
    print_sentences(console, importance_sentences(importance))
    _print_unobserved(console, importance.unobserved)


def print_patching(console: Console, patching: Patching, measured: str) -> None:
    """The maps of both estimates and sentences; ``measured`` describes the metric."""
    note = (
        f"0 is the corrupted run ({patching.corrupted:+.3f}), 1 is the clean run ({patching.clean:+.3f}); "
        f"metric: {measured}"
    )
    for effects, way in ((patching.exact, "exact"), (patching.gradient, "by gradient")):
        if effects is not None:
            title = f"Share of the metric that each head's output restores, {way}"
            print_map(console, effects, title, note)
            console.print()
            note = ""
    print_sentences(console, patching_sentences(patching))
    _print_unobserved(console, patching.unobserved)


def print_attributed(console: Console, attribution: Attribution) -> None:
    """The contributions of the top five heads to the predicted token, and of everything else by kind."""
    target = repr(attribution.target_text) + (
        "" if attribution.against_text is None else f" rather than {attribution.against_text!r}"
    )
    _title(console, f"Contributions to the logit of {target} after {attribution.labels[attribution.position]}")
    console.print(
        Text(
            f"direct logit attribution; probability {attribution.probability:.3f}; {_fixed(attribution.fixed)}",
            style="dim",
        )
    )
    ranked = attribution.top(len(attribution.components))
    of_heads = [(component, value) for component, value in ranked if component.head is not None]
    lines = [Line(str(component), value, _sources(attribution, component)) for component, value in of_heads[:HEADS]]
    rest = of_heads[HEADS:]
    if rest:
        lines.append(Line(counted(len(rest), "more head"), sum(value for _, value in rest)))
    kinds = dict.fromkeys(component.kind for component in attribution.components if component.head is None)
    for kind in kinds:
        total = sum(attribution.of(*component) for component in attribution.components if component.kind == kind)
        lines.append(Line("feed-forward layers" if kind == "feed_forward" else str(Component(kind)), total))
    print_bars(console, lines, attribution.total, attribution.remainder)


def _sources(attribution: Attribution, head: Component) -> str:
    return "from " + ", ".join(f"{label} {value:+.2f}" for label, value in attribution.largest_sources(head))


def print_why(console: Console, answer: WhyAttends) -> None:
    """The largest pairs of components with bars, the sums of each side, and sentences."""
    rather = "" if answer.against is None else f" rather than {answer.labels[answer.against]} (token {answer.against})"
    _title(
        console,
        f"Head {answer.layer}.{answer.head}: {answer.labels[answer.query]} (token {answer.query}) attends to "
        f"{answer.labels[answer.key]} (token {answer.key}){rather}",
    )
    visibility = f"weight {answer.weight:.3f}" if answer.visible else "hidden by the mask"
    logit = f"logit {answer.logit:+.3f}" if answer.against is None else f"logits differ by {answer.logit:+.3f}"
    console.print(Text(f"{visibility}, {logit}; {_fixed(answer.fixed)}", style="dim"))
    console.print()
    _title(console, "Contribution to the query x contribution to the key")
    top = answer.top(PAIRS)
    lines = [Line(f"{first} x {second}", value) for first, second, value in top]
    rest = answer.matrix.numel() - len(top)
    if rest > 0:
        lines.append(Line(f"{rest:,} more pairs", float(answer.matrix.sum()) - sum(value for *_, value in top)))
    lines += [Line(name, value) for name, value in (("bias", answer.bias), ("softcap", answer.softcap)) if value]
    print_bars(console, lines, answer.total, answer.remainder)
    for side, shares in (("query", answer.of_query), ("key", answer.of_key)):
        console.print()
        _title(console, f"By contribution to the {side} {answer.labels[getattr(answer, side)]}")
        order = shares.abs().argsort(descending=True, stable=True).tolist()
        lines = [Line(str(answer.components[i]), float(shares[i])) for i in order[:PARTS]]
        if order[PARTS:]:
            lines.append(Line(f"{len(order) - PARTS} more", float(shares[order[PARTS:]].sum())))
        print_bars(console, lines)
    console.print()
    print_sentences(console, [f"{sentence}." for sentence in answer.sentences(3)])


def print_roles(console: Console, roles: Mapping[str, Any]) -> None:
    """The heads of each role that `measure_roles` returns, the clearest first, with their score above chance."""
    _title(console, "Roles of the heads")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("role", style="bold", no_wrap=True)
    table.add_column("heads", justify="right")
    table.add_column("clearest: layer.head and score above chance")
    names = [name for rule in roles["rules"] for name in rule["roles"]]
    for name in [*names, "mixed"]:
        held = [head for head in roles["heads"] if head["role"] == name]
        scored = sorted(((head["above_chance"][head["decided_by"]], head) for head in held), key=lambda one: -one[0])
        clearest = "  ".join(f"{h['layer']}.{h['head']} {short_number(value)}" for value, h in scored[:HEADS])
        if held:
            table.add_row(ROLE_NAMES[name], str(len(held)), "none of these clearly" if name == "mixed" else clearest)
    console.print(table)


# Maps


def print_map(console: Console, values: HeadValues, title: str, note: str) -> None:
    """A row for each call and a cell for each head, in blocks of as many heads as fit."""
    _title(console, title)
    if note:
        console.print(Text(note, style="dim"))
    labels = layer_labels(values.calls)
    left = max(cell_len(label) for label in ("layer", *labels)) + 1
    grid = values.grid().tolist()
    most = max((abs(value) for row in grid for value in row if not math.isnan(value)), default=0.0)
    digits = decimals_for(most)
    cell = max(7, *(cell_len(signed_cell(value, digits)) + 2 for row in grid for value in row))
    per_line = max(1, (console.width - left) // cell)
    for first in range(0, len(grid[0]), per_line):
        heads = range(first, min(first + per_line, len(grid[0])))
        names = "".join(_pad(f"head {h}" if cell > 7 or h < 10 else f"h {h}", cell, "right") for h in heads)
        console.print(Text(_pad("layer", left) + names, style="dim"), soft_wrap=True)
        for label, row in zip(labels, grid, strict=True):
            line = Text(_pad(label, left))
            for head in heads:
                line.append(*_cell(row[head], most, digits, cell, _colours(console)))
            line.rstrip()
            console.print(line, soft_wrap=True, highlight=False)
    meaning = legend((value for row in grid for value in row), digits)
    if meaning:
        console.print(Text(meaning, style="dim"), highlight=False)


def layer_labels(calls: Sequence[CallHeads]) -> list[str]:
    """The number of each layer; the names of calls if a layer has several."""
    numbers = [str(call.layer) for call in calls]
    return (
        numbers
        if len(set(numbers)) == len(numbers)
        else [_clip(call.name or "(the model)", LONGEST_LAYER) for call in calls]
    )


def _cell(value: float, most: float, digits: int, width: int, colours: bool) -> tuple[str, str | Style]:
    text = _pad(signed_cell(value, digits), width, "right")
    share = 0.0 if math.isnan(value) or not most else value / most
    if not colours:
        return text, "bold" if abs(share) >= 0.5 else ""
    return text, _fill(share) if abs(share) >= FILLED else "dim"


def _fill(share: float) -> Style:
    """The background of a cell, by its share of the largest number."""
    r, g, b = (round(a + (z - a) * abs(share)) for a, z in zip(_GREY, _UP if share > 0 else _DOWN, strict=True))
    return Style.parse(f"{'bold ' if abs(share) >= 0.3 else ''}#ffffff on #{r:02x}{g:02x}{b:02x}")


# Bars and sentences


def print_bars(
    console: Console, lines: Sequence[Line], total: float | None = None, remainder: float | None = None
) -> None:
    """Name, number, bar, and a remark; below, the sum."""
    most = max((abs(line.value) for line in lines), default=0.0) or 1.0
    shown = [*lines, Line("sum", total)] if total is not None else lines
    names = [_clip(line.name, LONGEST_NAME) for line in shown]
    left = max(map(cell_len, names))
    for name, line in zip(names, shown, strict=True):
        text = Text(f"  {_pad(name, left)}  {line.value:+8.3f}  ")
        if line.name == "sum" and remainder is not None:
            text.append(f"remainder {remainder:.1e} (rounding)", style="dim")
        else:
            length = round(BAR * abs(line.value) / most)
            text.append(
                _pad(BARS[line.value > 0] * length, BAR if line.said else 0),
                style="#{:02x}{:02x}{:02x}".format(*(_UP if line.value > 0 else _DOWN)) if _colours(console) else "",
            )
            text.append(f"  {line.said}" if line.said else "", style="dim")
        text.rstrip()
        if console.is_terminal:  # in a pipe or a file long lines are not cut
            text.truncate(console.width, overflow="ellipsis")
        console.print(text, soft_wrap=True, highlight=False)


def print_sentences(console: Console, sentences: Sequence[str]) -> None:
    """Sentences as wrapped bullet points."""
    for sentence in sentences:
        for i, line in enumerate(Text(sentence).wrap(console, max(20, console.width - 2))):
            console.print(Text.assemble(("• " if i == 0 else "  ", _ACCENT), line), highlight=False, soft_wrap=True)


def _print_unobserved(console: Console, unobserved: object) -> None:
    for name, why in dict(unobserved).items():  # type: ignore[call-overload]
        console.print(Text(f"Not reached: {name}: {why}", style="dim"))


def _fixed(fixed: Sequence[str]) -> str:
    return f"held fixed: {', '.join(fixed)}"


def _title(console: Console, title: str) -> None:
    console.print(Text(title, style="bold"), highlight=False)
