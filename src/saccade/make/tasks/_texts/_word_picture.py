"""Texts with words coloured by their contribution, as a picture or a part of one."""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ._word_shares import WordShares

FOR, AGAINST = "tab:orange", "tab:blue"
WRONG, RIGHT = 5, 3  # texts of a picture, of those that are most sure
PREDICTED = 12  # texts of a picture of predictions
_LINES = 5  # of a text; longer ones are broken off
_DEEPEST = 0.75  # of a colour
_LEAD, _GAP = 0.75, 0.55  # rows from one line to the next, and between texts
WIDE = 92  # letters of a line
LETTER, LINE = 0.085, 0.46  # inches
_SIZE = 10.0  # points, of which a letter of the font is 0.602 wide: 0.0836 inches


@dataclasses.dataclass(frozen=True)
class WordPanel:
    """A text of the picture.

    Args:
        title: what was named, how surely, and what is right.
    """

    title: str
    shares: WordShares


def most_sure(probabilities: np.ndarray, right: np.ndarray) -> list[int]:
    """Numbers of texts: the most certain wrong ones, then the most certain right ones."""
    order = np.argsort(-probabilities, kind="stable")
    wrong = [int(n) for n in order if not right[n]][:WRONG]
    return [*wrong, *[int(n) for n in order if right[n]][:RIGHT]]


def present(panels: Iterable[WordPanel | None]) -> list[WordPanel]:
    return [panel for panel in panels if panel is not None]


def words_picture(panels: Sequence[WordPanel], kind: str) -> bytes:
    """A picture of the texts, as "png" or "svg"."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=page_size(_rows(panels)))
    _draw_words(figure, panels)
    return drawn(figure, kind)


def picture_above_words(
    size: tuple[float, float], draw: Callable[[Any], None], panels: Sequence[WordPanel], kind: str
) -> bytes:
    """A picture of `size` inches, which `draw` draws into a figure, and the texts below it."""
    from matplotlib.figure import Figure

    wide, high = page_size(_rows(panels)) if panels else (0.0, 0.0)
    figure = Figure(figsize=(max(size[0], wide), size[1] + high), layout="constrained")
    if not panels:
        draw(figure)
        return drawn(figure, kind)
    above, below = figure.subfigures(2, 1, height_ratios=[size[1], high], squeeze=False).flat
    rest = max(wide - size[0], 0.01)
    draw(above.subfigures(1, 2, width_ratios=[size[0], rest], squeeze=False).flat[0])
    _draw_words(below, panels)
    return drawn(figure, kind)


def _draw_words(figure: Any, panels: Sequence[WordPanel]) -> None:
    axes = page(figure, _rows(panels))
    _legend(axes)
    row = 1.4
    for panel in panels:
        write(axes, 0, row, panel.title[:WIDE], weight="bold")
        row = _draw_text(axes, row + _LEAD, panel.shares) + _GAP


def _draw_text(axes: Any, row: float, shares: WordShares) -> float:
    """Words behind their colours; the row behind the last."""
    from matplotlib.patches import Rectangle

    largest = max([1.0, *map(abs, shares.shares)])  # less than a unit of the logit changes little
    lines = list(lines_of(shares.words))
    for start, stop, columns in lines[:_LINES]:
        for n, column in zip(range(start, stop), columns, strict=True):
            color, depth = FOR if shares.shares[n] > 0 else AGAINST, _DEEPEST * abs(shares.shares[n]) / largest
            box = (column - 0.3, row - 0.27), len(shares.words[n]) + 0.6, 0.54
            axes.add_patch(Rectangle(*box, color=color, alpha=depth, linewidth=0))
            write(axes, column, row, shares.words[n])
        row += _LEAD
    if len(lines) > _LINES:
        write(axes, 0, row, f"and {len(shares.words) - lines[_LINES][0]:,} more words")
        row += _LEAD
    return row


def _legend(axes: Any) -> None:
    from matplotlib.patches import Rectangle

    write(axes, 0, 0.2, "what each word adds:")
    for column, color, words in ((22, FOR, "for what was named"), (45, AGAINST, "against it")):
        axes.add_patch(Rectangle((column, -0.05), 1.6, 0.36, color=color, alpha=_DEEPEST, linewidth=0))
        write(axes, column + 2.4, 0.2, words)


def _rows(panels: Sequence[WordPanel]) -> float:
    lines = [len(list(lines_of(panel.shares.words))) for panel in panels]
    return 1.4 + sum(_LEAD * (1 + min(count, _LINES + 1)) + _GAP for count in lines)


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
