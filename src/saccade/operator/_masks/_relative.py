"""Masks that depend on the positions of query and key: causal, window, prefix, and two of the Sparse Transformer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._data import OwnedTensor, bounded, extent, numbers, per_item
from ._intervals import Kind, Region, band, both, chunks_apart, either, in_columns
from ._mask import Mask
from ._program import OPEN, Opcode, ProgramScope, ProgramWriter


class Causal(Mask):
    """Keys up to the query's own position: `j <= position(i)`.

    With Lq != Lk the last query stands beside the last key (bottom-right). Where Lk < Lq the leading queries stand
    before the first key, and their rows are empty:

        Lq = 2, Lk = 5        Lq = 4, Lk = 2
          1 1 1 1 .             . .     position -2: an empty row
          1 1 1 1 1             . .     position -1: an empty row
                                1 .
                                1 1

    Example:
        >>> import saccade
        >>> saccade.Causal().picture(2, 5)
        Causal()
          0        4
        0 ████████··
        1 ██████████
        2 queries down, 5 keys across; █ attends, · masked
    """

    fields = ()
    by_distance = True
    by_position = True
    endless = True
    sees_itself = True
    widens = True

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        return key <= position

    def region_kind(self, region: Region) -> Kind:
        return band(*region.distances(), None, 0)

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        program.write(Opcode.WINDOW, OPEN, 0)

    def __repr__(self) -> str:
        return "Causal()"


class Window(Mask):
    """Keys near the query's position: `-left <= j - position(i) <= right`, both ends included.

    `Window(w, w)` is the sliding window of Longformer (Beltagy et al., 2020), 2w + 1 keys wide. `Window(w, 0)` is
    causal and keeps w + 1 keys, the query's own among them.

    Args:
        left: how many keys before the query's own it sees, at least 0; None leaves that side open.
        right: how many keys after it, the same.

    Raises:
        ValueError: a negative side.
        TypeError: a side that is not an int.

    Example:
        >>> import saccade
        >>> saccade.Window(1, 0).picture(3, 5)
        Window(1, 0)
          0        4
        0 ··████····
        1 ····████··
        2 ······████
        3 queries down, 5 keys across; █ attends, · masked
    """

    fields = ("left", "right")
    by_distance = True
    by_position = True
    endless = True
    sees_itself = True

    left: int | None
    right: int | None

    def __init__(self, left: int | None, right: int | None):
        self._set(left=None if left is None else bounded(left, "Window: left", least=0))
        self._set(right=None if right is None else bounded(right, "Window: right", least=0))

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        distance = key - position
        kept = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            kept = distance >= -self.left
        return kept if self.right is None else kept & (distance <= self.right)

    def region_kind(self, region: Region) -> Kind:
        return band(*region.distances(), None if self.left is None else -self.left, self.right)

    @property
    def widens(self) -> bool:
        return self.left is None

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        program.write(Opcode.WINDOW, *(OPEN if side is None else side for side in (self.left, self.right)))

    def __repr__(self) -> str:
        return f"Window({self.left}, {self.right})"


class Prefix(Mask):
    """Prefix language model: every query sees the prefix, and after it attention is causal.

    The rule is `j < length or j <= position(i)`: the decoder of Prefix LM (Raffel et al., 2020; Dong et al., 2019).

    Args:
        length: an int, or one int per batch item as a list or integer tensor (B,); at least 0.

    Raises:
        ValueError: a negative length, or a shape other than (B,).
        TypeError: lengths that are not integers.

    Example:
        >>> import saccade
        >>> saccade.Prefix(2).picture(4, 4)
        Prefix(2)
          0      3
        0 ████····
        1 ████····
        2 ██████··
        3 ████████
        4 queries down, 4 keys across; █ attends, · masked
    """

    fields = ("length",)
    by_position = True
    endless = True
    sees_itself = True
    widens = True

    length: int | OwnedTensor

    def __init__(self, length: int | Sequence[int] | Tensor):
        self._set(length=numbers(length, "Prefix: length", least=0))

    def _own_batch_and_heads(self) -> tuple[int, int]:
        return (1, 1) if isinstance(self.length, int) else (self.length.shape[0], 1)

    def tables(self) -> tuple[OwnedTensor, ...]:
        return () if isinstance(self.length, int) else (self.length,)

    def moved(self, device: torch.device | str) -> Mask:
        return self if isinstance(self.length, int) else self.replaced(length=self.length.to(device))

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        return (key <= position) | (key < per_item(self.length, b))

    def region_kind(self, region: Region) -> Kind:
        least, most = extent(self.length, region.item)
        start, stop = region.keys
        seen: Kind = "full" if stop <= least else "empty" if start >= most else "partial"
        return either((band(*region.distances(), None, 0), seen))

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        program.write(Opcode.PREFIX, *program.number(self.length))

    def __repr__(self) -> str:
        return f"Prefix({self.length!r})"


class Strided(Mask):
    """The strided pattern of the Sparse Transformer (Child et al., 2019, section 4.2), both of its heads as one mask.

    `j <= p and (p - j <= stride or (p - j) % stride == 0)` with p = position(i): the last `stride` positions and the
    query's own, and every stride-th before. Any earlier position is reached in two hops.

    Args:
        stride: at least 1; about sqrt(L) keeps O(sqrt(L)) keys a row.

    Raises:
        ValueError: a stride below 1.
        TypeError: a stride that is not an int.

    Example:
        >>> import saccade
        >>> saccade.Strided(3).picture(8, 8)
        Strided(3)
          0              7
        0 ██··············
        1 ████············
        2 ██████··········
        3 ████████········
        4 ··████████······
        5 ····████████····
        6 ██····████████··
        7 ··██····████████
        8 queries down, 8 keys across; █ attends, · masked
    """

    fields = ("stride",)
    by_distance = True
    by_position = True
    endless = True
    sees_itself = True
    _tables_reach_back = True

    stride: int

    def __init__(self, stride: int):
        self._set(stride=bounded(stride, "Strided: stride", least=1))

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        back = position - key
        return (back >= 0) & ((back <= self.stride) | (back % self.stride == 0))

    def region_kind(self, region: Region) -> Kind:
        low, high = region.distances()
        least, most = -high, -low
        near = band(least, most, 0, self.stride)
        if self.stride == 1 or least == most:
            on = least % self.stride == 0
            return either((near, both((band(least, most, 0, None), "full" if on else "empty"))))
        next_column = -(-max(least, 0) // self.stride) * self.stride
        return "partial" if near == "empty" and next_column <= most else near

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        program.write(Opcode.STRIDED, self.stride)

    def __repr__(self) -> str:
        return f"Strided({self.stride})"


class Fixed(Mask):
    """The fixed pattern of the Sparse Transformer (Child et al., 2019, section 4.2), both of its heads as one mask.

    `j <= p and (j // stride == p // stride or j % stride >= stride - columns)` with p = position(i): the query's own
    block, and the last `columns` positions of every block before it, which summarise that block. Any earlier
    position is reached in two hops.

    Args:
        stride: the block length l, at least 1.
        columns: the summary positions c of a block, 1 to `stride`.

    Raises:
        ValueError: a number outside these ranges.
        TypeError: a number that is not an int.

    Example:
        >>> import saccade
        >>> saccade.Fixed(3).picture(8, 8)
        Fixed(3, 1)
          0              7
        0 ██··············
        1 ████············
        2 ██████··········
        3 ····████········
        4 ····██████······
        5 ····████████····
        6 ····██····████··
        7 ····██····██████
        8 queries down, 8 keys across; █ attends, · masked
    """

    fields = ("stride", "columns")
    by_position = True
    endless = True
    sees_itself = True
    _tables_reach_back = True

    stride: int
    columns: int

    def __init__(self, stride: int, columns: int = 1):
        self._set(stride=bounded(stride, "Fixed: stride", least=1), columns=bounded(columns, "Fixed: columns", least=1))
        if self.columns > self.stride:
            raise ValueError(f"Fixed: columns must be at most stride {self.stride}, got {self.columns}")

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        same = key // self.stride == position // self.stride
        return (key <= position) & (same | (key % self.stride >= self.stride - self.columns))

    def region_kind(self, region: Region) -> Kind:
        low, high = region.distances()
        shown = chunks_apart(region, self.stride), in_columns(region.keys, self.stride, self.columns)
        return both((band(low, high, None, 0), either(shown)))

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        program.write(Opcode.FIXED, self.stride, self.columns)

    def __repr__(self) -> str:
        return f"Fixed({self.stride}, {self.columns})"
