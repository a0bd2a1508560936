"""Observations as text and as a table for a notebook.

A cell holds the least and the greatest of the heads' means; a notebook also shows the median, and the heads in a
tooltip. Text has lines of at most `WIDTH` columns.
"""

from __future__ import annotations

import html as html_
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...support._numbers import compact, counted
from ...support._tables import Markup, Table
from ._aggregates import Aggregate
from ._layers import sentences
from ._observed import CallObservations
from ._record import Unobserved

Head = dict[str, Aggregate]
MOST_LINES = 12  # of alarms, and of unobserved calls
MOST_CALLS = 200  # in a notebook
SIDES = "rlr"  # names are left-aligned
NAME = 44  # characters of a call's name
WIDTH = 120


class TableColumn(NamedTuple):
    """A heading, its meaning, and a function from a head to its number."""

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
    """One call: its layer, name and number of heads, and the numbers of each column by head."""

    layer: int
    name: str
    heads: int
    numbers: list[dict[int, float]]


def lines_of(observations: CallObservations) -> tuple[list[TableColumn], list[CallLine]]:
    """The columns for which any call has numbers, and a line for each call."""
    held = [
        (place.site, heads)
        for place, heads in zip(observations._places.values(), observations.aggregates.values(), strict=True)
    ]
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


def headline(observations: CallObservations) -> str:
    """The number of observed calls and steps, in a sentence."""
    steps = f"{observations.observed} of {counted(observations.steps, 'step')}"
    if not observations.steps:
        return "Nothing observed: the model ran no forward pass inside the watched block on the thread that entered it."
    if not observations.calls:
        reason = "the model called no attention"
        if observations.passed_over:
            reason = f"`layers` matches none of the {observations.passed_over} attention calls that there were"
        if observations.unobserved:
            reason = "unobserved calls are listed below"
        return f"Nothing observed in {steps}: {reason}."
    return f"{counted(len(observations.calls), 'attention call')} a step, {steps} observed."


def text(observations: CallObservations) -> str:
    """The summary for `print`."""
    parts = _wrapped([headline(observations), *_alarms(observations)])
    columns, lines = lines_of(observations)
    if lines:
        head = ["layer", "call", "heads", *(column.title for column in columns)]
        cells = [[str(line.layer), _clipped(line.name), str(line.heads), *map(_range, line.numbers)] for line in lines]
        parts += [
            *_blocks(Table(head, cells, SIDES)),
            "",
            "Each cell: minimum to maximum over the heads of the mean over all rows.",
        ]
        parts += _extremes(columns, lines)
    return "\n".join([*parts, *(line for lines in _not_seen(observations) for line in _wrapped(lines))])


def _wrapped(lines: Sequence[str]) -> list[str]:
    """Lines broken at `WIDTH` characters, except within words; continued lines are indented."""
    wrap = textwrap.TextWrapper(WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return [part for line in lines for part in (wrap.wrap(line) or [""])]


def _blocks(table: Table) -> list[str]:
    """The table, or several if it is too wide: each begins with the layers and names."""
    widths = [width + 2 for width in table.widths]
    blocks, room = [[0, 1, 2]], WIDTH + 2 - sum(widths[:3])
    left = room
    for column in range(3, len(widths)):
        if widths[column] > left and len(blocks[-1]) > 3:
            blocks.append([0, 1, 2])
            left = room
        blocks[-1].append(column)
        left -= widths[column]
    return [line for block in blocks for line in ("", *table.columns(block).lines())]


def _extremes(columns: Sequence[TableColumn], lines: Sequence[CallLine]) -> list[str]:
    """The heads of the whole model with the least and the greatest number of each column."""
    rows = []
    for place, column in enumerate(columns):
        held = [(n, f"{_clipped(line.name, 32)} head {h}") for line in lines for h, n in line.numbers[place].items()]
        low, high = (choose(held, key=lambda pair: pair[0]) for choose in (min, max))
        if compact(low[0]) != compact(high[0]):
            rows.append([column.title, compact(low[0]), low[1], compact(high[0]), high[1]])
    return ["", "Minimum and maximum over all heads:", *Table((), rows, "lrlrl").lines("  ")] if rows else []


def _alarms(observations: CallObservations) -> list[str]:
    if not observations.alarms:
        return []
    order = {"error": 0, "warning": 1, "note": 2}
    alarms = sorted(observations.alarms, key=lambda alarm: order[alarm.severity])
    shown = [f"  {alarm}" for alarm in alarms[:MOST_LINES]]
    rest = len(alarms) - len(shown)
    counts = [(kind, sum(alarm.severity == kind for alarm in alarms)) for kind in order]
    title = ", ".join(counted(count, kind) for kind, count in counts if count)
    return ["", f"Alarms: {title}", *shown, *([f"  ... and {rest} more in .alarms"] if rest else [])]


def _not_seen(observations: CallObservations) -> list[list[str]]:
    """Layers without attention, unobserved calls and unknown properties, each with a title and lines."""
    without = [f"  {sentence}" for sentence in sentences(observations.without_attention)]
    return [
        ["", "Without attention weights:", *without] if without else [],
        _counted("Not observed:", observations.unobserved, ".unobserved"),
        _counted("Not known:", observations.unknown, ".unknown"),
    ]


def _counted(title: str, table: Mapping[str, Unobserved], rest_in: str) -> list[str]:
    if not table:
        return []
    entries = sorted(table.items(), key=lambda item: -item[1].count)
    shown = [f"  {name or 'the model'} ({entry.count}): {entry.reason}" for name, entry in entries[:MOST_LINES]]
    rest = len(entries) - len(shown)
    return ["", title, *shown, *([f"  ... and {rest} more in {rest_in}"] if rest else [])]


class TextTable(str):
    """Text that a notebook shows as a table."""

    _table: Table

    def _repr_html_(self) -> str:
        return self._table.html()


def grid(observations: CallObservations, statistic: str) -> TextTable:
    """A row for each call, a column for each head."""
    names = {name for heads in observations.aggregates.values() for head in heads.values() for name in head}
    if statistic not in names:
        known = ", ".join(sorted(names)) or "none, nothing was observed"
        raise ValueError(f"statistic must be one of {known}; got {statistic!r}")
    every = sorted({head for place in observations._places.values() for head in place.heads})
    rows = []
    for place, heads in zip(observations._places.values(), observations.aggregates.values(), strict=True):
        cells = [_mean(statistic)(heads[head]) if head in heads else None for head in every]
        numbers = ["" if cell is None else compact(cell) for cell in cells]
        rows.append([str(place.site.layer), _clipped(place.site.name or "(the model)"), *numbers])
    table = Table(["layer", "call", *(f"head {head}" for head in every)], rows, SIDES)
    shown = TextTable(table)
    shown._table = table
    return shown


def _range(numbers: Mapping[int, float]) -> str:
    if not numbers:
        return ""
    low, high = compact(min(numbers.values())), compact(max(numbers.values()))
    return low if low == high else f"{low}..{high}"


def _clipped(name: str, most: int = NAME) -> str:
    return name if len(name) <= most else f"...{name[3 - most :]}"


def html(observations: CallObservations) -> str:
    """The same for a notebook: the median, and the range in grey."""
    columns, lines = lines_of(observations)
    parts = [f"<p>{html_.escape(headline(observations))}</p>", *_list(_alarms(observations)[1:])]
    if lines:
        head = ["layer", "call", "heads", *(_with_title(c.title, c.meaning) for c in columns)]
        cells = [
            [str(line.layer), line.name, str(line.heads), *map(_median, line.numbers)] for line in lines[:MOST_CALLS]
        ]
        parts.append(Table(head, cells, SIDES).html())
    if len(lines) > MOST_CALLS:
        parts.append(f"<p>... and {len(lines) - MOST_CALLS} calls more; <code>.table()</code> has all</p>")
    return "".join([*parts, *(item for lines in _not_seen(observations) for item in _list(lines[1:]))])


def _with_title(text: str, title: str) -> Markup:
    """Text with a tooltip."""
    return Markup(f'<span title="{html_.escape(title)}">{text}</span>')


def _median(numbers: Mapping[int, float]) -> str:
    if not numbers:
        return ""
    around = f' <span style="opacity:.6">{_range(numbers)}</span>' if len(numbers) > 1 else ""
    low, high = (choose(numbers, key=numbers.__getitem__) for choose in (min, max))
    middle = compact(statistics.median(numbers.values()))
    return _with_title(f"{middle}{around}", f"least: head {low}, greatest: head {high}")


def _list(lines: Sequence[str]) -> list[str]:
    """A title and its lines."""
    if not lines:
        return []
    items = "".join(f"<li>{html_.escape(line.strip())}</li>" for line in lines[1:])
    return [f"<p>{html_.escape(lines[0])}</p><ul>{items}</ul>"]
