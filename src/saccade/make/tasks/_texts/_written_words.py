"""Words in lines of a fixed width, for pictures of texts: columns are letters, rows are lines."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

WIDE = 92  # letters of a line
LETTER, LINE = 0.085, 0.46  # inches
_SIZE = 10.0  # points, of which a letter of the font is 0.602 wide: 0.0836 inches


def lines_of(words: Sequence[str]) -> Iterator[tuple[int, int, list[int]]]:
    """For each line its first word, the word after its last, and the column of each word's first letter.

    A word longer than a line has one of its own.
    """
    columns: list[int] = []
    start = at = 0
    for n, word in enumerate(words):
        if columns and at + len(word) > WIDE:
            yield start, n, columns
            columns, start, at = [], n, 0
        columns.append(at)
        at += len(word) + 1
    yield start, len(words), columns


def page(figure: Any, rows: float) -> Any:
    """Axes that fill a matplotlib figure, with `rows` rows."""
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(-2, WIDE + 2.7), ylim=(rows, -0.4))
    return axes


def page_size(rows: float) -> tuple[float, float]:
    """Width and height in inches."""
    return LETTER * (WIDE + 4.7), LINE * (rows + 0.4)


def write(axes: Any, column: float, row: float, words: str, weight: str = "normal") -> None:
    font = {"family": "DejaVu Sans Mono", "size": _SIZE, "weight": weight}
    axes.text(column, row, words, va="center", parse_math=False, **font)


def drawn(figure: Any, kind: str) -> bytes:
    """The figure as a "png" or "svg"."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # drawn as a box
        figure.savefig(content, format=kind, dpi=144)
    return content.getvalue()
