"""What a user sees who types the name of a `Statistics`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._result import Statistics

_MASSES = ("self", "previous", "next", "first", "sink")
_MOST = 64  # heads


def table(statistics: Statistics) -> str:
    """One line of averages per head, under what the call was and how many rows were counted."""
    items, heads, rows, keys = statistics.shape
    first = f"Statistics of {items} items, {heads} heads, {rows} queries, {keys} keys; rows: {_rows(statistics)}"
    names = ["entropy", "evenness", "largest", "distance"]
    names += [f"mass.{name}" for name in _MASSES if name != "sink" or bool(statistics.mass["sink"].any())]
    names += [f"mass.{name}" for name in statistics.mass if name not in _MASSES]
    columns = {name.removeprefix("mass."): statistics.mean(name).tolist() for name in names}
    columns["max logit"] = statistics.heads["logits"]["max"].tolist()
    cells = [["head", *columns]]
    cells += [[str(h), *(_number(column[h]) for column in columns.values())] for h in range(min(heads, _MOST))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    more = [f"and {heads - _MOST} heads more"] if heads > _MOST else []
    return "\n".join([first, *lines, *more])


def _rows(statistics: Statistics) -> str:
    counts = {
        "counted": statistics.rows_counted,
        "empty": statistics.rows_empty,
        "padded": statistics.rows_padded,
    }
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "counted")


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.4g}"
