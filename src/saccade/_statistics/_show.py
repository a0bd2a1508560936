"""What a user sees who types the name of a `Statistics`."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._result import Statistics

_MASSES = ("self", "previous", "next", "first", "sink")
_MOST = 64  # heads
_STYLE = "border-collapse:collapse;font-size:90%;font-variant-numeric:tabular-nums"
_CELL = "padding:2px 8px;text-align:right;white-space:nowrap;border-bottom:1px solid rgba(128,128,128,.3)"


def table(statistics: Statistics) -> str:
    """One line of averages per head, under what the call was and how many rows were counted."""
    first, cells, more = _cells(statistics)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([first, *lines, *more])


def html(statistics: Statistics) -> str:
    """The same for a notebook."""
    first, (titles, *lines), more = _cells(statistics)
    head = "".join(f'<th style="{_CELL}">{escape(title)}</th>' for title in titles)
    body = "".join(f"<tr>{''.join(f'<td style={_CELL!r}>{cell}</td>' for cell in line)}</tr>" for line in lines)
    table = f'<table style="{_STYLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return "".join(
        [f"<p>{escape(first)}</p>", f'<div style="overflow-x:auto">{table}</div>', *(f"<p>{line}</p>" for line in more)]
    )


def _cells(statistics: Statistics) -> tuple[str, list[list[str]], list[str]]:
    """What it is of, a table with titles, and what is left out."""
    items, heads, rows, keys = statistics.shape
    first = f"Statistics of {items} items, {heads} heads, {rows} queries, {keys} keys; rows: {_rows(statistics)}"
    names = ["entropy", "evenness", "largest", "distance"]
    names += [f"mass.{name}" for name in _MASSES if name != "sink" or bool(statistics.mass["sink"].any())]
    names += [f"mass.{name}" for name in statistics.mass if name not in _MASSES]
    columns = {name.removeprefix("mass."): statistics.mean(name).tolist() for name in names}
    columns["max logit"] = statistics.heads["logits"]["max"].tolist()
    cells = [["head", *columns]]
    cells += [[str(h), *(_number(column[h]) for column in columns.values())] for h in range(min(heads, _MOST))]
    return first, cells, [f"and {heads - _MOST} heads more"] if heads > _MOST else []


def _rows(statistics: Statistics) -> str:
    counts = {
        "counted": statistics.rows_counted,
        "empty": statistics.rows_empty,
        "padded": statistics.rows_padded,
    }
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "counted")


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.4g}"
