"""Drawings of masks: text for a terminal, SVG or an image elsewhere. Sampled, so Lq x Lk is never formed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import torch

from ...support._extras import installing
from ._arbitrary import FromTensor
from ._data import describe, whole
from ._intervals import Span
from ._mask import Mask

_SIDE = 32  # rows and keys looked at in a cell that is neither empty nor full
_SHADES = "·░▒▓█"
_IMAGE = 128
_NOTEBOOK, _SQUARES = 48, (32, 128, 512, 2048, 2**13, 2**15, 2**18, 2**21)  # cells at most, lengths that are tried
_ONE_BY_ONE = 2048


@dataclass(frozen=True, eq=False)
class MaskPicture:
    """A mask as a grid of cells, each standing for `step` x `step` pairs of query and key.

    In a terminal it prints itself as text, in a notebook it is an SVG image.

    Attributes:
        cells: float array (rows, columns), the fraction of the pairs that attend: 0 and 1 exactly where all agree.
        step: queries and keys in a cell.
        title, caption: the mask; the sizes, and which batch item and head are shown.
    """

    cells: np.ndarray
    step: int
    title: str
    caption: str
    lengths: tuple[int, int]

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self.text()

    def text(self) -> str:
        """Two characters a cell, which is about square in a terminal."""
        rows, columns = self.cells.shape
        margin = len(str(max(self.lengths[0] - 1, 0)))
        last = str(max(self.lengths[1] - 1, 0))
        scale = f"{'0':<{max(2 * columns - len(last), 2)}}{last}" if columns > 1 else "0"
        lines = [self.title, f"{'':{margin}} {scale}"]
        lines += [f"{n * self.step:>{margin}} {''.join(_glyph(x) * 2 for x in self.cells[n])}" for n in range(rows)]
        legend = f"each cell {self.step} x {self.step}: █ all, ░▒▓ some" if self.step > 1 else "█ attends"
        return "\n".join([*lines, f"{self.caption}; {legend}, · masked"])

    def svg(self) -> str:
        """A self-contained SVG document; dark where the reader's system is."""
        return self._svg("<style>svg{color:#1b2a4a}@media(prefers-color-scheme:dark){svg{color:#c9d8ff}}</style>")

    def _svg(self, style: str) -> str:
        rows, columns = self.cells.shape
        side = max(3, min(24, 512 // max(rows, columns, 1)))
        width, height, left, top = columns * side, rows * side, 8, 46
        total = max(width + 2 * left, 360)
        return "".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{height + top + left}" ',
                f'viewBox="0 0 {total} {height + top + left}" role="img" font-family="system-ui, sans-serif">',
                style,
                f'<title>{escape(f"{self.title}, {self.caption}")}</title><g fill="currentColor">',
                f'<text x="{left}" y="18" font-size="13">{escape(_shortened(self.title, total // 7))}</text>',
                f'<text x="{left}" y="36" font-size="11" opacity=".7">{escape(self.caption)}</text>',
                *(_bar(run, left, top, side) for n in range(rows) for run in _runs(self.cells[n], n, apart=side >= 8)),
                f'</g><rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" ',
                'stroke="currentColor" stroke-opacity=".4"/></svg>',
            ]
        )

    def _repr_html_(self) -> str:
        return self._svg("")  # in the notebook's own colour: a style would reach every drawing on its page

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the picture to a .txt, .svg, .png or .pdf file; the last two need the extra `plot`.

        Raises:
            ValueError: another ending.
            FileExistsError: the file is there, and `overwrite` is not set.
            ImportError: matplotlib is missing.
        """
        path = Path(path)
        if path.suffix not in (".txt", ".svg", ".png", ".pdf"):
            raise ValueError(
                f"to must be 'text', 'svg' or a path ending in .txt, .svg, .png or .pdf, got {str(path)!r}"
            )
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists: choose another name, or overwrite=True")
        if path.suffix in (".png", ".pdf"):
            self._plot(path)
        else:
            path.write_text(self.svg() if path.suffix == ".svg" else self.text() + "\n", encoding="utf-8")
        return path

    def _plot(self, path: Path) -> None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError(f"drawing images needs matplotlib: {installing('plot')}") from None
        figure = Figure(
            figsize=(5, 5 * max(self.cells.shape[0], 1) / max(self.cells.shape[1], 1) + 1), layout="constrained"
        )
        axes = figure.add_subplot()
        Lq, Lk = self.lengths
        corners = (-0.5, self.cells.shape[1] * self.step - 0.5, self.cells.shape[0] * self.step - 0.5, -0.5)
        axes.imshow(_visible(self.cells), cmap="Blues", vmin=0, vmax=1, extent=corners, interpolation="nearest")
        axes.set(xlim=(-0.5, Lk - 0.5), ylim=(Lq - 0.5, -0.5), xlabel="key", ylabel="query row")
        axes.set_title(f"{self.title}\n{self.caption}", fontsize=9, wrap=True)
        figure.savefig(path, dpi=200)


def picture(
    mask: Mask,
    Lq: int,
    Lk: int,
    *,
    to: str | Path | None = None,
    item: int = 0,
    head: int = 0,
    cells: int | None = None,
    overwrite: bool = False,
) -> MaskPicture | str | Path:
    """Draw one batch item and head of a mask.

    A mask that is too large to draw pair by pair is drawn in square cells: what is empty or full is known without
    looking, and in every other cell a grid of at most 32 x 32 pairs is looked at.

    Args:
        to: None for a `MaskPicture`, which shows itself as text in a terminal and as an image in a notebook; "text" or
            "svg" for a string; or a path ending in .txt, .svg, .png or .pdf (the last two need the extra `plot`).
        item, head: which batch item and query head.
        cells: at most so many cells across and down; by default what fits the terminal, or 128 for images.
        overwrite: let `to` replace a file.

    Raises:
        ValueError: the mask does not fit (Lq, Lk), there is no such item or head, or `to` is none of these.
        FileExistsError, ImportError: see `MaskPicture.save`.
    """
    if not (to is None or isinstance(to, str | Path)):
        raise TypeError(f"to must be None, 'text', 'svg' or a path, got {describe(to)}")
    mask, _ = mask._settled(Lq, Lk, None)
    batch, heads = mask._batch_and_heads()
    for index, size, name in ((item, batch, "item"), (head, heads, "head")):
        if whole(index, name, least=0) >= size > 1:
            raise ValueError(f"{name} must be below {size}, got {index}")
    limits = _limits(to) if cells is None else (whole(cells, "cells", least=1),) * 2
    # A power of two, so that cells line up with the blocks and strides that masks are made of.
    step = 1 << (max(-(-Lq // limits[0]), -(-Lk // limits[1]), 1) - 1).bit_length()
    shown = [f"item {item} of {batch}"] * (batch > 1) + [f"head {head} of {heads}"] * (heads > 1)
    caption = ", ".join([f"{Lq} queries down, {Lk} keys across", *shown])
    which = (min(item, max(batch - 1, 0)), min(head, heads - 1))
    drawn = MaskPicture(_fractions(mask, Lq, Lk, step, *which), step, repr(mask), caption, (Lq, Lk))
    if to is None:
        return drawn
    return drawn.text() if to == "text" else drawn.svg() if to == "svg" else drawn.save(to, overwrite=overwrite)


def in_notebook(mask: Mask) -> str:
    """The mask drawn at a size that shows its pattern; the text of the mask if drawing fails at every size."""
    try:
        drawn = _at_usual_sizes(mask)
        first = next(drawn)
        return next((each for each in chain((first,), drawn) if not _says_little(each)), first)._repr_html_()
    except Exception:  # no size fits; and a predicate is anybody's code
        return f"<code>{escape(repr(mask))}</code>"


def _at_usual_sizes(mask: Mask) -> Iterator[MaskPicture]:
    for Lq, Lk in _usual_sizes(mask):
        drawn = picture(mask, Lq, Lk, cells=_NOTEBOOK)
        assert isinstance(drawn, MaskPicture)
        yield drawn


def _usual_sizes(mask: Mask) -> list[tuple[int, int]]:
    """Sizes at which to draw a mask: its own size if its data fit only that, otherwise growing squares."""
    fixed = mask._required_lengths()
    if fixed is not None:
        return [fixed]
    squares = [n for n in _SQUARES if fits(mask, n)]
    if not squares:
        squares = [n for n in range(_ONE_BY_ONE - 1, 0, -1) if fits(mask, n)][:1]
    return [(n, n) for n in squares] or _sizes_of_tensors(mask)


def fits(mask: Mask, length: int) -> bool:
    try:
        mask.check(None, None, length, length, None)
    except ValueError:
        return False
    return True


def _sizes_of_tensors(mask: Mask) -> list[tuple[int, int]]:
    """Numbers of queries and keys of the first part that is a tensor."""
    if isinstance(mask, FromTensor):
        return [(mask.sizes[-2], mask.sizes[-1])]
    return next((found for part in mask._children() if (found := _sizes_of_tensors(part))), [])


def _says_little(drawn: MaskPicture) -> bool:
    """Whether the picture is uninformative: no pair is visible, every pair is, or exactly the pairs that are not later
    than the query, as for a window larger than the picture."""
    if not drawn.cells.any():
        return True
    later = np.triu(np.ones_like(drawn.cells, dtype=bool), 1)
    early = np.tril(np.ones_like(later), -1)
    return bool((drawn.cells[early] == 1).all()) and set(drawn.cells[later].tolist()) in ({0.0}, {1.0})


def _limits(to: str | Path | None) -> tuple[int, int]:
    """Maximum numbers of cells down and across: a mask that may be printed fits on a screen."""
    if to in (None, "text") or str(to).endswith(".txt"):
        return 40, max(min((shutil.get_terminal_size((80, 24)).columns - 8) // 2, 60), 16)
    return _IMAGE, _IMAGE


def _fractions(mask: Mask, Lq: int, Lk: int, step: int, item: int, head: int) -> np.ndarray:
    rows = [(at, min(at + step, Lq)) for at in range(0, Lq, step)]
    keys = [(at, min(at + step, Lk)) for at in range(0, Lk, step)]
    cells = np.zeros((len(rows), len(keys)))
    for n, row in enumerate(rows):
        kinds = [mask.kind(row, key, Lq, Lk, item=item, head=head) for key in keys]
        cells[n] = [kind == "full" for kind in kinds]
        partial = [m for m, kind in enumerate(kinds) if kind == "partial"]
        if partial:
            cells[n, partial] = _looked_at(mask, Lq, Lk, row, [keys[m] for m in partial], item, head)
    return cells


def _looked_at(mask: Mask, Lq: int, Lk: int, row: Span, keys: list[Span], item: int, head: int) -> list[float]:
    """The fraction that attends in each cell of one row of cells; of all pairs, or of a grid where they are many."""
    places = [_grid(key) for key in keys]
    device = mask._device() or torch.device("cpu")
    at = [torch.as_tensor(np.atleast_1d(x), device=device) for x in (item, head, _grid(row), np.concatenate(places))]
    shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
    b, h, i, j = (index.view(shape) for index, shape in zip(at, shapes, strict=True))
    bits = mask._attends(b, h, i, j, Lq, Lk).expand(1, 1, i.numel(), j.numel())[0, 0].cpu().numpy()
    counted = row[1] - row[0] <= _SIDE and all(key[1] - key[0] <= _SIDE for key in keys)
    slack = 0.0 if counted else 1 / 64  # a sample does not prove that nothing, or everything, attends
    ends = np.cumsum([len(place) for place in places])[:-1]
    return [float(np.clip(part.mean(), slack, 1 - slack)) for part in np.split(bits, ends, axis=1)]


def _grid(span: Span) -> np.ndarray:
    size = span[1] - span[0]
    return np.unique(np.linspace(span[0], span[1] - 1, min(size, _SIDE)).round().astype(np.int64))


def _glyph(fraction: float) -> str:
    return _SHADES[0 if fraction == 0 else 4 if fraction == 1 else 1 + min(int(fraction * 3), 2)]


def _visible(cells: np.ndarray) -> np.ndarray:
    """Shades in which even a single column of a large cell shows."""
    return np.where(cells > 0, np.maximum(cells, 0.25), 0.0)


def _runs(cells: np.ndarray, row: int, apart: bool) -> list[tuple[int, int, int, float]]:
    """(row, first, stop, opacity) of the stretches of cells that look alike, or single cells, that are not blank."""
    levels = np.round(_visible(cells) * 16) / 16
    edges = range(len(levels) + 1) if apart else [0, *(np.flatnonzero(np.diff(levels)) + 1).tolist(), len(levels)]
    return [
        (row, first, stop, float(levels[first]))
        for first, stop in pairwise(edges)
        if stop > first and levels[first] > 0
    ]


def _bar(run: tuple[int, int, int, float], left: int, top: int, side: int) -> str:
    row, first, stop, level = run
    opacity = "" if level == 1 else f' opacity="{level:.3g}"'
    gap = 1 if side >= 8 else 0
    place = f'x="{left + first * side}" y="{top + row * side}"'
    return f'<rect {place} width="{(stop - first) * side - gap}" height="{side - gap}"{opacity}/>'


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
