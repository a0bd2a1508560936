"""Masks made of square blocks: a given layout, and random ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._data import OwnedTensor, block_counts, bounded, describe, whole
from ._intervals import Kind, Region, Span, counted
from ._mask import Mask, MaskProblem
from ._program import Opcode, ProgramScope, ProgramWriter

_LOW = 0xFFFFFFFF
_MANY = 4096  # beyond so many blocks a rectangle is not worth counting


class Blocks(Mask):
    """Whole blocks: `layout[position(i) // size, j // size]`.

    Query blocks go by position, so that a cache works; for two different sequences of blocks use `.at(0)`.
    A position before 0 is in no block.

    Args:
        layout: booleans (nq, nk), or (H, nq, nk) by query head.
        size: tokens in a block, at least 1.

    Raises:
        TypeError: a layout that is not boolean.
        ValueError: another rank; when the mask is used, fewer blocks than queries or keys reach.

    Example:
        >>> import saccade
        >>> saccade.Blocks([[True, False], [True, True]], size=2).picture(4, 4)
        Blocks([[True, False], [True, True]], size=2)
          0      3
        0 ████····
        1 ████····
        2 ████████
        3 ████████
        4 queries down, 4 keys across; █ attends, · masked
    """

    fields = ("layout", "size")

    layout: OwnedTensor
    size: int
    _counts: np.ndarray

    def __init__(self, layout: Sequence[Sequence[bool]] | Tensor, size: int):
        wanted = "booleans (nq, nk) or (H, nq, nk)"
        table = OwnedTensor.of(layout, "Blocks: layout", wanted, booleans=True, integers=False)
        if len(table.shape) not in (2, 3) or 0 in table.shape:
            raise ValueError(f"Blocks: layout must be {wanted}, got {describe(table.values)}")
        self._set(layout=table, size=bounded(size, "Blocks: size", least=1), _counts=block_counts(_by_head(table.host)))

    def _own_batch_and_heads(self) -> tuple[int, int]:
        return 1, 1 if len(self.layout.shape) == 2 else self.layout.shape[0]

    def tables(self) -> tuple[OwnedTensor, ...]:
        return (self.layout,)

    def moved(self, device: torch.device | str) -> Mask:
        return self.replaced(layout=self.layout.to(device))

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        layout = self.layout.on(key.device)
        rows, keys = layout.shape[-2:]
        query_block, key_block = position // self.size, key // self.size
        inside = (query_block >= 0) & (query_block < rows) & (key_block < keys)
        places: tuple[Tensor, ...] = (query_block.clamp(0, rows - 1), key_block.clamp(0, keys - 1))
        if layout.dim() == 3:
            places = (h if layout.shape[0] > 1 else h * 0, *places)
        return inside & layout[places]

    def region_kind(self, region: Region) -> Kind:
        rows, keys = _touched(region.positions, self.size), _touched(region.keys, self.size)
        total = (rows[1] - rows[0]) * (keys[1] - keys[0])
        (top, bottom), (left, right) = _within(rows, self.layout.shape[-2]), _within(keys, self.layout.shape[-1])
        counts = self._counts
        if region.head is not None and counts.shape[0] > 1:
            counts = counts[region.head : region.head + 1]
        kept = counts[:, bottom, right] - counts[:, top, right] - counts[:, bottom, left] + counts[:, top, left]
        return "empty" if not kept.any() else "full" if kept.min() == total else "partial"

    def fits(self, problem: MaskProblem) -> None:
        rows, keys = (blocks * self.size for blocks in self.layout.shape[-2:])
        if problem.positions[1] > rows:
            raise ValueError(
                f"Blocks: the layout covers {rows} positions, the queries reach {problem.positions[1] - 1}"
            )
        if problem.keys > keys:
            raise ValueError(f"Blocks: the layout covers {keys} keys, there are {problem.keys}")

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        program.write(Opcode.BLOCKS, program.table(self.layout), self.size)

    def __repr__(self) -> str:
        return f"Blocks({self.layout!r}, size={self.size})"


class RandomBlocks(Mask):
    """Random blocks, as in BigBird (Zaheer et al., 2020): each block of queries sees some of the blocks before it.

    The seed and the query block alone decide which ones, never Lk, so decoding token by token sees what training saw.
    Query block r draws one block from each of `count` equal parts of the r blocks before it: min(count, r) different
    ones. BigBird is `Window(w, w) | Global(tokens) | RandomBlocks(seed, size, count)`.

    Args:
        seed: any int.
        size: tokens in a block, at least 1.
        count: blocks drawn by each query block, at least 0.
        symmetric: also attend the other way, from the drawn block to the one that drew it: not causal, and BigBird's
            random pattern made bidirectional. What a row sees among earlier keys is the same.

    Raises:
        TypeError: numbers that are not ints.
        ValueError: numbers outside these ranges.

    Example:
        >>> import saccade
        >>> saccade.RandomBlocks(seed=0, size=1, count=1).picture(6, 6)
        RandomBlocks(0, size=1, count=1)
          0          5
        0 ············
        1 ██··········
        2 ██··········
        3 ██··········
        4 ······██····
        5 ██··········
        6 queries down, 6 keys across; █ attends, · masked
    """

    fields = ("seed", "size", "count", "symmetric")
    _tables_reach_back = True

    seed: int
    size: int
    count: int
    symmetric: bool
    _start: int

    def __init__(self, seed: int, size: int, count: int, *, symmetric: bool = False):
        if not isinstance(symmetric, bool):
            raise TypeError(f"RandomBlocks: symmetric must be a bool, got {describe(symmetric)}")
        number = whole(seed, "RandomBlocks: seed")
        self._set(
            seed=number,
            size=bounded(size, "RandomBlocks: size", least=1),
            count=bounded(count, "RandomBlocks: count", least=0),
            symmetric=symmetric,
            _start=_mixed(_mixed(number & _LOW) ^ (number >> 32 & _LOW)),
        )

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        query_block, key_block = position // self.size, key // self.size
        hit = self._drawn(query_block, key_block)
        return hit | self._drawn(key_block, query_block) if self.symmetric else hit

    def _drawn(self, by: Tensor, other: Tensor) -> Tensor:
        """Whether block `by` drew block `other`."""
        hit = torch.zeros_like(by, dtype=torch.bool)
        drawer = by.clamp(min=0)
        for part in range(self.count):
            low = _part(part, drawer, self.count)
            width = _part(part + 1, drawer, self.count) - low
            drawn = low + _draw(self._start, drawer, part) % width.clamp(min=1)
            hit = hit | ((other == drawn) & (width > 0))
        return hit

    def region_kind(self, region: Region) -> Kind:
        rows, keys = _touched(region.positions, self.size), _touched(region.keys, self.size)
        if rows[1] - rows[0] + keys[1] - keys[0] > _MANY:
            return "partial"
        kept = self._pairs(rows, keys) + (self._pairs(keys, rows) if self.symmetric else 0)
        return counted(kept, (rows[1] - rows[0]) * (keys[1] - keys[0]))

    def _pairs(self, by: Span, other: Span) -> int:
        return sum(
            other[0] <= block < other[1]
            for drawer in range(max(by[0], other[0] + 1, 1), by[1])
            for block in self._blocks_drawn(drawer, (max(other[0], 0), min(other[1], drawer)))
        )

    def _blocks_drawn(self, drawer: int, other: Span) -> Iterator[int]:
        """The earlier blocks overlapping `other` that block `drawer` chooses at random; computed on the host."""
        count = min(self.count, drawer)  # of more parts, those beyond are empty
        first, last = (-(-(block + 1) * count // drawer) - 1 for block in (other[0], other[1] - 1))
        for part in range(max(first, 0), last + 1):
            yield _block_drawn(self._start, count, drawer, part)

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        program.write(Opcode.RANDOM, self._start, self.size, self.count, int(self.symmetric))

    def __repr__(self) -> str:
        symmetric = ", symmetric=True" if self.symmetric else ""
        return f"RandomBlocks({self.seed}, size={self.size}, count={self.count}{symmetric})"


def _mixed(x: Any) -> Any:
    """A bijection of 32-bit numbers that scatters them (Wellons, lowbias32); the same for ints and int64 tensors."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _LOW
    x = (x ^ (x >> 15)) * 0x846CA68B & _LOW
    return x ^ (x >> 16)


def _draw(start: int, drawer: Any, part: int) -> Any:
    return _mixed(_mixed((start + drawer * 0x9E3779B1) & _LOW) ^ (part * 0x85EBCA77 & _LOW))


def _part(part: int, blocks: Any, count: int) -> Any:
    """`part * blocks // count`, whose product an int64 would not hold for blocks that stand far away."""
    return part * (blocks // count) + part * (blocks % count) // count


@lru_cache(maxsize=1 << 16)
def _block_drawn(start: int, count: int, drawer: int, part: int) -> int:
    low, high = part * drawer // count, (part + 1) * drawer // count
    return low + int(_draw(start, drawer, part)) % (high - low)


def _by_head(layout: np.ndarray) -> np.ndarray:
    return layout if layout.ndim == 3 else layout[None]


def _touched(span: Span, size: int) -> Span:
    """The blocks that a span of tokens touches."""
    return span[0] // size, (span[1] - 1) // size + 1


def _within(span: Span, length: int) -> Span:
    return min(max(span[0], 0), length), min(max(span[1], 0), length)
