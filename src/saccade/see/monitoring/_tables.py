"""Observations as text and as a table for a notebook.

A cell holds the least and the greatest of the heads' means; a notebook shows the median as well, and where the mouse
points which heads they are. Text keeps to `WIDTH` columns.
"""

from __future__ import annotations

import html as html_
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...support._numbers import compact
from ._aggregates import Aggregate
from ._observed import CallObservations
from ._record import Unobserved

Head = dict[str, Aggregate]
MOST_LINES = 12  # of alarms, and of what was not seen
MOST_CALLS = 200  # in a notebook
NAME = 44  # characters of a call's name
WIDTH = 120


class TableColumn(NamedTuple):
    """A heading, what it means, and one number for a head."""

    title: str
    meaning: str
    of: Callable[[Head], float | None]


def _mean(name: str) -> Callable[[Head], float | None]:
    return lambda head: head[name].mean if name in head and head[name].count else None


def _largest(name: str) -> Callable[[Head], float | None]:
    return lambda head: head[name].max if name in head and head[name].count else None


def _sink(head: Head) -> float | None:
    parts = [_mean(name)(head) for name in ("mass.first", "mass.sink")]
    return None if any(part is None for part in parts) else sum(part for part in parts if part is not None)


COLUMNS = (
    TableColumn("entropy", "entropy of a row in nats", _mean("entropy")),
    TableColumn("largest", "largest weight of a row", _mean("largest")),
    TableColumn("first+sink", "weight on the first key and the learned sink", _sink),
    TableColumn("self", "weight on the row's own key", _mean("mass.self")),
    TableColumn("previous", "weight on the key before", _mean("mass.previous")),
    TableColumn("distance", "mean distance from a row to its keys, in tokens", _mean("distance")),
    TableColumn("max logit", "largest logit of all steps", _largest("logits.max")),
    TableColumn("out", "norm of the output", _mean("out.norm")),
    TableColumn("grad q", "norm of the gradient of the queries", _mean("query.gradient")),
    TableColumn("grad k", "norm of the gradient of the keys", _mean("key.gradient")),
    TableColumn("grad out", "norm of the gradient of the output", _mean("out.gradient")),
)


class CallLine(NamedTuple):
    """One call: its layer, name, number of heads, and for each column the numbers by head."""

    layer: int
    name: str
    heads: int
    numbers: list[dict[int, float]]


def lines_of(seen: CallObservations) -> tuple[list[TableColumn], list[CallLine]]:
    """The columns that any call has numbers for, and the calls."""
    held = [(place.site, heads) for place, heads in zip(seen._places.values(), seen.aggregates.values(), strict=True)]
    columns = [c for c in COLUMNS if any(c.of(head) is not None for _, heads in held for head in heads.values())]
    lines = [
        CallLine(
            site.layer,
            site.name or "(the model)",
            len(heads),
            [
                {head: number for head, own in heads.items() if (number := column.of(own)) is not None}
                for column in columns
            ],
        )
        for site, heads in held
    ]
    return columns, lines


def headline(seen: CallObservations) -> str:
    """How much was seen, in a sentence."""
    steps = f"{seen.observed} of {seen.steps} step{'s' * (seen.steps != 1)}"
    if not seen.steps:
        return "Nothing observed: the model ran no forward pass inside the watched block on the thread that entered it."
    if not seen.calls:
        reason = "the model called no attention"
        if seen.passed_over:
            reason = f"`layers` matches none of the {seen.passed_over} attention calls that there were"
        if seen.unobserved:
            reason = "unobserved calls are listed below"
        return f"Nothing observed in {steps}: {reason}."
    count = len(seen.calls)
    return f"{count} attention call{'s' * (count != 1)} a step, {steps} observed."


def text(seen: CallObservations) -> str:
    """The summary that `print` shows."""
    parts = _wrapped([headline(seen), *_alarms(seen)])
    columns, lines = lines_of(seen)
    if lines:
        rows = [["layer", "call", "heads", *(column.title for column in columns)]]
        for line in lines:
            rows.append([str(line.layer), _clipped(line.name), str(line.heads), *map(_range, line.numbers)])
        parts += [*_blocks(rows), "", "Each cell: minimum to maximum over the heads of the mean over all rows."]
        parts += _extremes(columns, lines)
    return "\n".join([*parts, *(line for lines in _not_seen(seen) for line in _wrapped(lines))])


def _wrapped(lines: Sequence[str]) -> list[str]:
    """Lines of at most `WIDTH` characters, where words are not longer; what goes on is indented."""
    wrap = textwrap.TextWrapper(WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return [part for line in lines for part in (wrap.wrap(line) or [""])]


def _blocks(rows: Sequence[Sequence[str]]) -> list[str]:
    """The table, in several where it is too wide: each begins with the layers and names."""
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(len(rows[0]))]
    blocks, room = [[0, 1, 2]], WIDTH + 2 - sum(widths[:3])
    left = room
    for column in range(3, len(widths)):
        if widths[column] > left and len(blocks[-1]) > 3:
            blocks.append([0, 1, 2])
            left = room
        blocks[-1].append(column)
        left -= widths[column]
    tables = [aligned([[row[column] for column in block] for row in rows]) for block in blocks]
    return [line for table in tables for line in ("", *table)]


def _extremes(columns: Sequence[TableColumn], lines: Sequence[CallLine]) -> list[str]:
    """Which heads of the whole model have the least and the greatest of each column."""
    found = []
    for place, column in enumerate(columns):
        held = [(n, f"{_clipped(line.name, 32)} head {h}") for line in lines for h, n in line.numbers[place].items()]
        low, high = (choose(held, key=lambda pair: pair[0]) for choose in (min, max))
        if compact(low[0]) != compact(high[0]):
            found.append([column.title, compact(low[0]), low[1], compact(high[0]), high[1]])
    if not found:
        return []
    widths = [max(len(row[cell]) for row in found) for cell in range(4)]
    return ["", "Minimum and maximum over all heads:"] + [
        f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}} {row[2]:<{widths[2]}}  {row[3]:>{widths[3]}} {row[4]}"
        for row in found
    ]


def _alarms(seen: CallObservations) -> list[str]:
    if not seen.alarms:
        return []
    order = {"error": 0, "warning": 1, "note": 2}
    found = sorted(seen.alarms, key=lambda alarm: order[alarm.severity])
    shown = [f"  {alarm}" for alarm in found[:MOST_LINES]]
    rest = len(found) - len(shown)
    counts = [(kind, sum(alarm.severity == kind for alarm in found)) for kind in order]
    title = ", ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in counts if count)
    return ["", f"Alarms: {title}", *shown, *([f"  ... and {rest} more in .alarms"] if rest else [])]


def _not_seen(seen: CallObservations) -> list[list[str]]:
    """What was not observed, and what is not known: a title and its lines each."""
    return [_counted("Not observed:", seen.unobserved, ".unobserved"), _counted("Not known:", seen.unknown, ".unknown")]


def _counted(title: str, table: Mapping[str, Unobserved], rest_in: str) -> list[str]:
    if not table:
        return []
    found = sorted(table.items(), key=lambda item: -item[1].count)
    shown = [f"  {name or 'the model'} ({one.count}): {one.reason}" for name, one in found[:MOST_LINES]]
    rest = len(found) - len(shown)
    return ["", title, *shown, *([f"  ... and {rest} more in {rest_in}"] if rest else [])]


class TextTable(str):
    """Text as any other, which a notebook shows as a table."""

    _rows: Sequence[Sequence[str]] = ()

    def _repr_html_(self) -> str:
        head, *body = (
            [(_LEFT if column == 1 else _CELL, html_.escape(cell)) for column, cell in enumerate(row)]
            for row in self._rows
        )
        titles = "".join(f'<th style="{style}">{cell}</th>' for style, cell in head)
        written = ["".join(f'<td style="{style}">{cell}</td>' for style, cell in row) for row in body]
        lines = "".join(f"<tr>{cells}</tr>" for cells in written)
        table = f'<table style="{_STYLE}"><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>'
        return f'<div style="overflow-x:auto">{table}</div>'


def grid(seen: CallObservations, statistic: str) -> TextTable:
    """A line for each call, a column for each head."""
    names = {name for heads in seen.aggregates.values() for head in heads.values() for name in head}
    if statistic not in names:
        known = ", ".join(sorted(names)) or "none, nothing was observed"
        raise ValueError(f"statistic must be one of {known}; got {statistic!r}")
    every = sorted({head for place in seen._places.values() for head in place.heads})
    rows = [["layer", "call", *(f"head {head}" for head in every)]]
    for place, heads in zip(seen._places.values(), seen.aggregates.values(), strict=True):
        cells = [_mean(statistic)(heads[head]) if head in heads else None for head in every]
        numbers = ["" if cell is None else compact(cell) for cell in cells]
        rows.append([str(place.site.layer), _clipped(place.site.name or "(the model)"), *numbers])
    shown = TextTable("\n".join(aligned(rows)))
    shown._rows = rows
    return shown


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns; names (the second one) stand to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _range(numbers: Mapping[int, float]) -> str:
    if not numbers:
        return ""
    low, high = compact(min(numbers.values())), compact(max(numbers.values()))
    return low if low == high else f"{low}..{high}"


def _clipped(name: str, most: int = NAME) -> str:
    return name if len(name) <= most else f"...{name[3 - most :]}"


_STYLE = "border-collapse:collapse;font-size:90%;font-variant-numeric:tabular-nums"
_CELL = "padding:2px 8px;text-align:right;white-space:nowrap;border-bottom:1px solid rgba(128,128,128,.3)"
_LEFT = _CELL.replace("text-align:right", "text-align:left")


def html(seen: CallObservations) -> str:
    """The same for a notebook: median, and least to greatest in grey."""
    columns, lines = lines_of(seen)
    parts = [f"<p>{html_.escape(headline(seen))}</p>", *_list(_alarms(seen)[1:])]
    if lines:
        titles = [("layer", ""), ("call", ""), ("heads", ""), *((c.title, c.meaning) for c in columns)]
        head = "".join(
            f'<th style="{_LEFT if title == "call" else _CELL}" title="{html_.escape(note)}">{title}</th>'
            for title, note in titles
        )
        body = "".join(f"<tr>{''.join(_cells(line))}</tr>" for line in lines[:MOST_CALLS])
        table = f'<table style="{_STYLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        parts.append(f'<div style="overflow-x:auto">{table}</div>')
    if len(lines) > MOST_CALLS:
        parts.append(f"<p>... and {len(lines) - MOST_CALLS} calls more; <code>.table()</code> has all</p>")
    return "".join([*parts, *(item for lines in _not_seen(seen) for item in _list(lines[1:]))])


def _cells(line: CallLine) -> list[str]:
    cells = [f'<td style="{_CELL}">{line.layer}</td>', f'<td style="{_LEFT}">{html_.escape(line.name)}</td>']
    return [*cells, f'<td style="{_CELL}">{line.heads}</td>', *(_median(numbers) for numbers in line.numbers)]


def _median(numbers: Mapping[int, float]) -> str:
    if not numbers:
        return f'<td style="{_CELL}"></td>'
    around = f' <span style="opacity:.6">{_range(numbers)}</span>' if len(numbers) > 1 else ""
    low, high = (choose(numbers, key=numbers.__getitem__) for choose in (min, max))
    heads = f"least: head {low}, greatest: head {high}"
    return f'<td style="{_CELL}" title="{heads}">{compact(statistics.median(numbers.values()))}{around}</td>'


def _list(lines: Sequence[str]) -> list[str]:
    """A title and its lines."""
    if not lines:
        return []
    items = "".join(f"<li>{html_.escape(line.strip())}</li>" for line in lines[1:])
    return [f"<p>{html_.escape(lines[0])}</p><ul>{items}</ul>"]
