"""Masks of remainders: every n-th key, chunks of a sequence, and columns of them. They are made to be combined."""

from __future__ import annotations

from torch import Tensor

from ._data import bounded
from ._intervals import Kind, Region, chunks_apart, in_columns
from ._mask import Mask
from ._program import Opcode, ProgramScope, ProgramWriter


class Dilated(Mask):
    """Every `step`-th key, counted from the query's own: `(j - position(i)) % step == 0`.

    A dilated window (Beltagy et al., 2020) is `Window(left, right) & Dilated(step)`: of the keys from `left` back to
    `right` ahead it keeps those a multiple of `step` away. The column head of the Sparse Transformer's strided pattern
    (Child et al., 2019) is `Causal() & Dilated(stride)`.

    Args:
        step: at least 1; 1 keeps all.

    Raises:
        ValueError: a step below 1.
        TypeError: a step that is not an int.

    Example:
        >>> import saccade
        >>> (saccade.Window(4, 2) & saccade.Dilated(2)).picture(6, 6)
        Window(4, 2) & Dilated(2)
          0          5
        0 ██··██······
        1 ··██··██····
        2 ██··██··██··
        3 ··██··██··██
        4 ██··██··██··
        5 ··██··██··██
        6 queries down, 6 keys across; █ attends, · masked
    """

    fields = ("step",)
    by_distance = True
    by_position = True
    endless = True
    sees_itself = True
    _tables_reach_back = True

    step: int

    def __init__(self, step: int):
        self._set(step=bounded(step, "Dilated: step", least=1))

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        return (key - position) % self.step == 0

    def region_kind(self, region: Region) -> Kind:
        low, high = region.distances()
        if high // self.step * self.step < low:
            return "empty"
        return "full" if self.step == 1 or low == high else "partial"

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        program.write(Opcode.DILATED, self.step)

    def __repr__(self) -> str:
        return f"Dilated({self.step})"


class Chunks(Mask):
    """Chunks of `size` positions, each seen by itself and its neighbours: `-left <= j // size - p // size <= right`.

    `Causal() & Chunks(size)` is the block-local head of the Sparse Transformer's fixed pattern (Child et al., 2019),
    and the chunked attention of Llama 4. `Chunks(size, 1, 1)` is the window of BigBird (Zaheer et al., 2020).

    Args:
        size: positions in a chunk, at least 1.
        left: how many chunks before the query's own it also sees, at least 0.
        right: how many chunks after it, the same.

    Raises:
        ValueError: a number outside these ranges.
        TypeError: a number that is not an int.

    Example:
        >>> import saccade
        >>> saccade.Chunks(2, 1).picture(3, 5)
        Chunks(2, 1, 0)
          0        4
        0 ████████··
        1 ████████··
        2 ····██████
        3 queries down, 5 keys across; █ attends, · masked
    """

    fields = ("size", "left", "right")
    by_position = True
    endless = True
    sees_itself = True

    size: int
    left: int
    right: int

    def __init__(self, size: int, left: int = 0, right: int = 0):
        self._set(
            size=bounded(size, "Chunks: size", least=1),
            left=bounded(left, "Chunks: left", least=0),
            right=bounded(right, "Chunks: right", least=0),
        )

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        ahead = key // self.size - position // self.size
        return (ahead >= -self.left) & (ahead <= self.right)

    def region_kind(self, region: Region) -> Kind:
        return chunks_apart(region, self.size, self.left, self.right)

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        program.write(Opcode.CHUNKS, self.size, self.left, self.right)

    def __repr__(self) -> str:
        neighbours = f", {self.left}, {self.right}" if self.left or self.right else ""
        return f"Chunks({self.size}{neighbours})"


class Columns(Mask):
    """The last keys of every chunk, the same for every query: `j % stride >= stride - columns`.

    `Causal() & Columns(stride, columns)` is the other head of the Sparse Transformer's fixed pattern (Child et al.,
    2019, section 4.2): keys that summarise their chunk for the queries after it.

    Args:
        stride: the chunk length, at least 1.
        columns: how many of its last keys, 1 to `stride`.

    Raises:
        ValueError: a number outside these ranges.
        TypeError: a number that is not an int.

    Example:
        >>> import saccade
        >>> saccade.Columns(3).picture(2, 7)
        Columns(3, 1)
          0            6
        0 ····██····██··
        1 ····██····██··
        2 queries down, 7 keys across; █ attends, · masked
    """

    fields = ("stride", "columns")
    by_position = True
    endless = True
    _tables_reach_back = True

    stride: int
    columns: int
    positional = False

    def __init__(self, stride: int, columns: int = 1):
        self._set(
            stride=bounded(stride, "Columns: stride", least=1), columns=bounded(columns, "Columns: columns", least=1)
        )
        if self.columns > self.stride:
            raise ValueError(f"Columns: columns must be at most stride {self.stride}, got {self.columns}")

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        return key % self.stride >= self.stride - self.columns

    def region_kind(self, region: Region) -> Kind:
        return in_columns(region.keys, self.stride, self.columns)

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        program.write(Opcode.COLUMNS, self.stride, self.columns)

    def __repr__(self) -> str:
        return f"Columns({self.stride}, {self.columns})"
