"""A table for people: plain text, Markdown, or HTML for a notebook. Tables with colours are made with rich."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_STYLE = "border-collapse:collapse;font-size:90%;font-variant-numeric:tabular-nums"
_CELL = "padding:2px 8px;text-align:{};white-space:nowrap;border-bottom:1px solid rgba(128,128,128,.3)"


class Markup(str):
    """A cell that is HTML already."""


@dataclass(frozen=True)
class Table:
    """Headings and cells.

    Attributes:
        head: empty for a table without headings.
        rows: as many cells in each.
        sides: "l" or "r" for each column, the last letter for all that follow: names to the left, numbers to the right.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    sides: str = "lr"

    @classmethod
    def of_named(cls, rows: Mapping[str, Mapping[str, str]], head: str = "") -> Table:
        """Rows by their names; the columns are those of the first."""
        columns = list(next(iter(rows.values())))
        return cls([head, *columns], [[name, *(row[column] for column in columns)] for name, row in rows.items()])

    @property
    def widths(self) -> list[int]:
        return [max(map(len, column)) for column in zip(*self._lines, strict=True)]

    def lines(self, indent: str = "") -> list[str]:
        """Columns two spaces apart, without spaces at the end of a line."""
        widths = self.widths
        return [
            (indent + "  ".join(self._padded(n, cell, widths[n]) for n, cell in enumerate(row))).rstrip()
            for row in self._lines
        ]

    def columns(self, chosen: Sequence[int]) -> Table:
        """The table with only these columns."""
        return Table(
            [self.head[n] for n in chosen],
            [[row[n] for n in chosen] for row in self.rows],
            "".join(self._side(n) for n in chosen),
        )

    def markdown(self) -> list[str]:
        head, *rows = ([cell.replace("|", "\\|") for cell in row] for row in (self.head, *self.rows))
        return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]

    def html(self) -> str:
        body = "".join(f"<tr>{self._html(row, 'td')}</tr>" for row in self.rows)
        table = f"<thead><tr>{self._html(self.head, 'th')}</tr></thead><tbody>{body}</tbody>"
        return f'<div style="overflow-x:auto"><table style="{_STYLE}">{table}</table></div>'

    def __str__(self) -> str:
        return "\n".join(self.lines())

    @property
    def _lines(self) -> list[Sequence[str]]:
        return [*([self.head] if self.head else []), *self.rows]

    def _side(self, column: int) -> str:
        return self.sides[min(column, len(self.sides) - 1)]

    def _padded(self, column: int, cell: str, width: int) -> str:
        return cell.ljust(width) if self._side(column) == "l" else cell.rjust(width)

    def _html(self, row: Sequence[str], tag: str) -> str:
        sides = ("left" if self._side(n) == "l" else "right" for n in range(len(row)))
        cells = (cell if isinstance(cell, Markup) else escape(cell) for cell in row)
        return "".join(
            f'<{tag} style="{_CELL.format(side)}">{cell}</{tag}>' for side, cell in zip(sides, cells, strict=True)
        )
