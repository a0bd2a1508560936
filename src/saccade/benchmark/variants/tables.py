"""A comparison as tables, for a terminal, a pipe and a Markdown page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from ...support import _numbers
from ...support._tables import Table
from ..attention.tables import disturbances, machine_line
from .advice import about, advice
from .results import CALLS, LAYER, READING, ContenderResults, GradientReach, LengthResult, VariantComparison
from .trends import TAIL, Crossover, crossover, growth, sound

KINDS = {READING: "Reading q, k and v", LAYER: "Layers of equal width, with their projections"}
FIRST = {READING: "exact", LAYER: "attention"}
COLUMNS = 12  # maximum number of distances in a table
WIDTH = 100  # characters in a line of text outside of tables
INDENT = "  "
UNCLEAR = "unclear"


class TableSection(NamedTuple):
    title: str
    table: Table


def sections(comparison: VariantComparison, width: int | None = None) -> list[TableSection]:
    """All tables of a comparison, in order.

    width: maximum characters in a line; None: unlimited.
    """
    rows = []
    for length in comparison.lengths:
        for kind, title in KINDS.items():
            lines = [line for line in comparison.of(kind) if line.at(length)]
            if lines:
                rows.append(TableSection(f"{title}: {_numbers.length(length)} tokens", _at(comparison, lines, length)))
    if len(comparison.lengths) > 1:
        for kind, title in KINDS.items():
            if comparison.of(kind):
                rows.append(TableSection(f"{title}: growth", _growths(comparison, kind, width)))
                rows.append(TableSection(f"{title}: where they become faster", _crossings(comparison, kind)))
    if comparison.paths:
        table = path_table(comparison.paths, width)
        rows.append(TableSection("Gradient of the last output by distance, as it starts", table))
    return rows


def _at(comparison: VariantComparison, lines: Sequence[ContenderResults], length: int) -> Table:
    exact = comparison.exact(lines[0].kind)
    base = None if exact is None else exact.at(length)
    reading = lines[0].kind == READING
    last = ["error", "worst row"] if reading else ["parameters"]
    header = ["", "forward", "training", "is", "decode", "keeps", "memory", *last]
    points = [(line, _there(line, length)) for line in lines]
    rows = [[f"{line.name}{' !' * point.noisy}", *_cells(line, point, base, reading)] for line, point in points]
    return Table(header, rows, "l")


def _there(line: ContenderResults, length: int) -> LengthResult:
    point = line.at(length)
    assert point is not None
    return point


def _cells(line: ContenderResults, point: LengthResult, base: LengthResult | None, reading: bool) -> list[str]:
    forward, training, decode = (duration(point.seconds(call)) for call in CALLS)
    theirs, ours = None if base is None else base.seconds("training"), point.seconds("training")
    ratio = "-" if point is base or not theirs or not ours else f"{_numbers.number(theirs / ours)}x"
    kept, memory = (None if number is None else _numbers.size(number) for number in (point.kept, point.memory))
    cells = [forward, training, ratio, decode, kept or "-", memory or "-"]
    return cells + ([*_error_cells(line, point)] if reading else [f"{point.parameters:,}" if ours else "-"])


def _error_cells(line: ContenderResults, point: LengthResult) -> tuple[str, str]:
    """The error, in brackets for mechanisms that are not approximations."""
    if point.error is None:
        return "-", "-"
    whole, worst = (_numbers.relative_error(number) for number in (point.error.whole, point.error.worst))
    return (f"({whole})", f"({worst})") if line.computes == "other" else (whole, worst)


def duration(seconds: float | None) -> str:
    return "-" if seconds is None else _numbers.duration(seconds)


def _growths(comparison: VariantComparison, kind: str, width: int | None) -> Table:
    header = ["", "training grows", "decode", "memory", "setting at the longest"]
    parts = [
        ([line.name, *(_power(line, what) for what in ("training", "decode", "memory"))], line.setting)
        for line in comparison.of(kind)
    ]
    return Table(header, _with_settings(header, parts, width), "l")


def _with_settings(header: list[str], table_rows: list[tuple[list[str], str]], width: int | None) -> list[list[str]]:
    """Rows with settings in the last column, wrapped to the width."""
    if width is None:
        return [[*cells, setting] for cells, setting in table_rows]
    before = sum(max(len(row[place]) for row in (header, *(cells for cells, _ in table_rows))) for place in range(4))
    room = width - len(INDENT) - before - 2 * 4
    rows = []
    for cells, setting in table_rows:
        first, *more = textwrap.wrap(setting, max(room, 20)) or [""]
        rows += [[*cells, first], *([*[""] * len(cells), part] for part in more)]
    return rows


def _power(line: ContenderResults, what: str) -> str:
    power = growth(line, what)
    if power is None:
        return "-"
    return f"L^{max(power, 0.0):.2f}" if sound(line, what) else UNCLEAR


def _crossings(comparison: VariantComparison, kind: str) -> Table:
    exact = comparison.exact(kind)
    rows = []
    for line in comparison.of(kind):
        whole = exact is None or line.whole
        rows.append([line.name, *("-" if whole or exact is None else _crossing(line, exact, call) for call in CALLS)])
    return Table(["", *(f"{call} faster" for call in CALLS)], rows, "l")


def _crossing(line: ContenderResults, exact: ContenderResults, call: str) -> str:
    return crossed(crossover(line, exact, call)) if sound(line, call) and sound(exact, call) else UNCLEAR


def crossed(crossover: Crossover) -> str:
    """The crossover in words."""
    length = "" if crossover.length is None else about(crossover.length)
    return {
        "always": "at every length",
        "measured": f"from about {length}",
        "extrapolated": f"from about {length} *",
        "until": f"only below about {length}",
        "never": "never",
        "unknown": "-",
    }[crossover.kind]


def path_table(paths: Sequence[GradientReach], width: int | None = None) -> Table:
    """A column for each distance (every second one if there are many), and the reach of the gradient."""
    distances = sorted({d for path in paths for d in path.distances})
    if len(distances) > COLUMNS:
        distances = distances[::-2][::-1]
    table = _paths(paths, distances)
    while width is not None and len(distances) > 1 and max(map(len, table.lines(INDENT))) > width:
        distances = distances[1:]  # near ones are near 1
        table = _paths(paths, distances)
    return table


def _paths(paths: Sequence[GradientReach], distances: Sequence[int]) -> Table:
    rows = []
    for path in paths:
        there = dict(zip(path.distances, path.gradients, strict=True))
        name = path.name if path.layers == 1 else f"{path.name}, {path.layers} layers"
        reach = f"{path.reach():,}" if path.distances else path.note
        rows.append([name, *(_gradient(there.get(d)) for d in distances), reach])
    return Table(["", *(f"d={d:,}" for d in distances), "reaches"], rows, "l")


def _gradient(number: float | None) -> str:
    if number is None:
        return "-"
    return "0" if number == 0 else f"{number:.2f}" if number >= 0.01 else f"{number:.0e}"


def notes(comparison: VariantComparison) -> list[str]:
    """Notes on columns and missing numbers."""
    notes = [
        "training: forward and backward. is: speed of training relative to the first line. keeps: bytes that decoding "
        "caches of the past. memory: peak of training beyond inputs and parameters, without gradients of inputs."
    ]
    if any(line.points for line in comparison.lines if line.kind == READING):
        notes.append(
            "error: ||out - exact|| / ||exact|| over all rows, exact attention in float64. In brackets: "
            "mechanisms that are no approximation of it. Parameters of mechanisms have their initial values."
        )
    if len(comparison.lengths) > 2:
        notes.append(f"Exponents are fitted from the longest length down to 1/{TAIL} of it.")
    notes += _doubts(comparison)
    if comparison.paths:
        notes.append(
            "Gradients are relative to the one at distance 1; reaches: the largest distance with at least .01."
        )
    return [*notes, *_beyond(comparison), *missing(comparison)]


def _doubts(comparison: VariantComparison) -> list[str]:
    """Notes on extrapolated, noisy and implausible numbers."""
    notes = []
    measured = [point for line in comparison.lines for point in line.points if point.readings]
    if _any_cell(comparison, "*"):
        notes.append("*: extrapolated from the last two lengths.")
    notes += disturbances(sum(point.noisy for point in measured), len(measured), comparison.machine)
    if _any_cell(comparison, UNCLEAR):
        notes.append(
            f"! {UNCLEAR}: numbers that fall with length or follow no power law. Another program may have used the "
            "machine; measure again when it is idle."
        )
    return notes


def _any_cell(comparison: VariantComparison, ending: str) -> bool:
    tables = (table for kind in KINDS for table in (_growths(comparison, kind, None), _crossings(comparison, kind)))
    return len(comparison.lengths) > 1 and any(
        cell.endswith(ending) for table in tables for row in table.rows for cell in row
    )


def _beyond(comparison: VariantComparison) -> list[str]:
    longest = comparison.data["length"]
    if comparison.data["unlimited"] or all(length <= longest for length in comparison.lengths):
        return []
    return [
        f"The data has {longest:,} tokens. Longer lengths are timed on its tokens in random order, without an error. "
        "Mechanisms that select keys by their values may take another time on a real text of that length."
    ]


def missing(comparison: VariantComparison) -> list[str]:
    """Contenders without numbers, by length, and those without decoding, with reasons."""
    notes = [f"{line.name} is not measured: {line.refused}." for line in comparison.lines if line.refused]
    for line in comparison.lines:
        by_note: dict[str, list[str]] = {}
        for point in line.points:
            if point.note:
                by_note.setdefault(point.note, []).append(_numbers.length(point.length))
        notes += [f"{line.name} at {', '.join(lengths)}: {note}." for note, lengths in by_note.items()]
    steps: dict[str, list[str]] = {}
    for line in comparison.lines:
        reason = next((point.no_decode for point in line.points if point.no_decode), "")
        if reason:
            steps.setdefault(reason, []).append(line.name)
    return notes + [f"No decoding step: {', '.join(names)}: {reason}." for reason, names in steps.items()]


def heading(comparison: VariantComparison) -> list[str]:
    data = comparison.data
    heads = str(data["heads"]) if data["heads"] == data["kv_heads"] else f"{data['heads']}/{data['kv_heads']}"
    way = "causal" if data["causal"] else "bidirectional"
    shape = f"{way}, batch {data['batch']}, {heads} heads of width {data['head']}, float32"
    note = f" ({data['note']})" if data["note"] else ""
    return [f"{data['source']}{note}: {shape}", machine_line(comparison.machine)]


def text(comparison: VariantComparison) -> list[str]:
    """The comparison as lines for a pipe."""
    lines = [*heading(comparison), ""]
    for section in sections(comparison, WIDTH):
        lines += [section.title, *section.table.lines(INDENT), ""]
    return [*lines, *notes(comparison), "", advice(comparison)]


def page(comparison: VariantComparison) -> str:
    """The comparison as a page for `benchmarks/results/`."""
    what, machine = heading(comparison)
    lines = ["# Which attention to choose", "", f"    {comparison.settings.get('command', 'saccade compare')}", ""]
    lines += [f"{what}.", "", f"{machine}.", "", f"**{advice(comparison)}**", ""]
    for section in sections(comparison):
        lines += [f"## {section.title}", "", *section.table.markdown(), ""]
    return "\n".join([*lines, "## Notes", "", *(f"- {note}" for note in notes(comparison))]) + "\n"
