"""Whole rectangles by batch item and head: the blocks that a BlockMask of PyTorch lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ._data import OwnedTensor, block_counts, bounded, describe
from ._intervals import Kind, Region, Span
from ._mask import Mask, MaskProblem
from ._program import Opcode, ProgramScope, ProgramWriter

_SIDE = 64  # rows and keys of a tile of `Opcode.TILES`
_EMPTY, _FULL = -1, -2


class BlockTable(Mask):
    """Rectangles of rows by keys, `layout[b, h, row // size[0], key // size[1]]`.

    Rows and keys are counted from 0 in the problem, whatever `.at` says. `Blocks` has square blocks by position.

    Args:
        layout: booleans (B or 1, H or 1, nq, nk).
        size: rows and keys of a block.
    """

    fields = ("layout", "size")
    positional = False

    layout: OwnedTensor
    size: tuple[int, int]
    _counts: np.ndarray

    def __init__(self, layout: Tensor | np.ndarray, size: Sequence[int]):
        wanted = "booleans (B or 1, H or 1, nq, nk)"
        table = OwnedTensor.of(layout, "BlockTable: layout", wanted, booleans=True, integers=False)
        if len(table.shape) != 4 or 0 in table.shape:
            raise ValueError(f"BlockTable: layout must be {wanted}, got {describe(table.values)}")
        rows, keys = (bounded(side, "BlockTable: size", least=1) for side in size)
        self._set(layout=table, size=(rows, keys), _counts=block_counts(table.host))

    def _own_batch_and_heads(self) -> tuple[int, int]:
        return self.layout.shape[0], self.layout.shape[1]

    def tables(self) -> tuple[OwnedTensor, ...]:
        return (self.layout,)

    def moved(self, device: torch.device | str) -> Mask:
        return self.replaced(layout=self.layout.to(device))

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        layout = self.layout.on(key.device)
        items, heads, rows, keys = layout.shape
        down, across = row // self.size[0], key // self.size[1]
        item, head = b if items > 1 else b * 0, h if heads > 1 else h * 0
        return layout[item, head, down.clamp(0, rows - 1), across.clamp(0, keys - 1)]

    def region_kind(self, region: Region) -> Kind:
        (top, bottom), (left, right) = (
            (span[0] // side, (span[1] - 1) // side + 1)
            for span, side in zip((region.rows, region.keys), self.size, strict=True)
        )
        counts = _chosen(_chosen(self._counts, region.item, 0), region.head, 1)
        kept = counts[..., bottom, right] - counts[..., top, right] - counts[..., bottom, left] + counts[..., top, left]
        return "empty" if not kept.any() else "full" if kept.min() == (bottom - top) * (right - left) else "partial"

    def fits(self, problem: MaskProblem) -> None:
        rows, keys = (blocks * side for blocks, side in zip(self.layout.shape[2:], self.size, strict=True))
        if problem.rows > rows or problem.keys > keys:
            raise ValueError(
                f"BlockTable: the layout covers {rows} queries and {keys} keys, "
                f"there are {problem.rows} and {problem.keys}"
            )

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        starts = scope.rows[0], scope.keys[0]
        if any(size % _SIDE for size in self.size) or any(start % _SIDE for start in starts):
            program.work_out(self, scope, program)
            return
        down, across = (_blocks(span, size) for span, size in zip((scope.rows, scope.keys), self.size, strict=True))
        which = np.where(self.layout.host[:, :, down[:, None], across], _FULL, _EMPTY).astype(np.int32)
        tables = [program.table(torch.from_numpy(array)) for array in (which, np.zeros((0, _SIDE), dtype=np.int64))]
        program.write(Opcode.TILES, *tables, *scope.rows, *scope.keys)

    def __repr__(self) -> str:
        return f"BlockTable({self.layout!r}, size={self.size})"


def _chosen(counts: np.ndarray, place: int | None, axis: int) -> np.ndarray:
    """The counts of one item or head."""
    return counts if place is None or counts.shape[axis] == 1 else counts.take([place], axis)


def _blocks(span: Span, size: int) -> np.ndarray:
    """The block of each tile of 64 in a span."""
    return np.arange(span[0], span[1], _SIDE) // size
