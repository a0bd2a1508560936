"""Tagged texts as a picture: true entities are colours behind the words, predicted entities are bars below them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ._entities import Entity
from ._word_picture import WIDE, drawn, lines_of, page, page_size, write

_TEXTS, _ROWS = 8, 60  # texts and rows of a picture


@dataclasses.dataclass(frozen=True)
class ComparedText:
    """The words of a text, its true and predicted entities, and the line above it."""

    words: Sequence[str]
    truth: Sequence[Entity]
    found: Sequence[Entity]
    title: str = ""


@dataclasses.dataclass(frozen=True)
class _TextLine:
    """Words `start` to `stop` of a text, with the column of each word's first letter."""

    text: ComparedText
    start: int
    stop: int
    columns: list[int]

    def parts(self, entities: Sequence[Entity]) -> Iterator[tuple[str, int, int]]:
        """Kind, first and last column of each entity's words in this line."""
        for entity in entities:
            first, last = max(entity.start, self.start), min(entity.stop, self.stop) - 1
            if first <= last:
                begin, end = (self.columns[n - self.start] for n in (first, last))
                yield entity.kind, begin, end + len(self.text.words[last])


def tagged_picture(texts: Sequence[ComparedText], kind: str) -> bytes:
    """A "png" or "svg" of the first texts in which something is tagged, or predicted to be."""
    from matplotlib.figure import Figure

    chosen = [text for text in texts if text.truth or text.found][:_TEXTS] or list(texts[:1])
    placed, rows = _placed(chosen)
    kinds = sorted({entity.kind for text in chosen for entity in (*text.truth, *text.found)})
    figure = Figure(figsize=page_size(rows))
    axes = page(figure, rows)
    _legend(axes, kinds)
    for row, line in placed:
        if isinstance(line, str):
            write(axes, 0, row, line, weight="bold")
        else:
            _draw(axes, line, row, kinds)
    return drawn(figure, kind)


def _placed(texts: Sequence[ComparedText]) -> tuple[list[tuple[float, str | _TextLine]], float]:
    """Titles and lines with their rows, and the number of rows; texts beyond `_ROWS` are left out."""
    placed: list[tuple[float, str | _TextLine]] = []
    row = 1.4
    for text in texts:
        lines: list[str | _TextLine] = [*([text.title[:WIDE]] if text.title else []), *_lines(text)]
        if placed and row + len(lines) > _ROWS:
            break
        placed += [(row + n, line) for n, line in enumerate(lines)]
        row += len(lines) + 0.6
    return placed, row


def _lines(text: ComparedText) -> Iterator[_TextLine]:
    return (_TextLine(text, *line) for line in lines_of(text.words))


def _draw(axes: Any, line: _TextLine, row: float, kinds: Sequence[str]) -> None:
    from matplotlib.patches import Rectangle

    for kind, begin, end in line.parts(line.text.truth):
        box = (begin - 0.2, row - 0.27), end - begin + 0.4, 0.5
        axes.add_patch(Rectangle(*box, color=_color(kind, kinds), alpha=0.35, linewidth=0))
    for kind, begin, end in line.parts(line.text.found):
        axes.add_patch(Rectangle((begin, row + 0.27), end - begin, 0.13, color=_color(kind, kinds), linewidth=0))
    for word, column in zip(line.text.words[line.start : line.stop], line.columns, strict=True):
        write(axes, column, row, word)


def _legend(axes: Any, kinds: Sequence[str]) -> None:
    from matplotlib.patches import Rectangle

    write(axes, 0, 0.2, "truth: shaded, prediction: bar")
    at = 33
    for kind in kinds:
        if at + len(kind) > WIDE:
            return
        axes.add_patch(Rectangle((at, -0.05), 1.6, 0.36, color=_color(kind, kinds), alpha=0.6, linewidth=0))
        write(axes, at + 2, 0.2, kind)
        at += len(kind) + 5


def _color(kind: str, kinds: Sequence[str]) -> Any:
    from matplotlib import colormaps

    return colormaps["tab10"](kinds.index(kind) % 10)
