"""Masks of remainders: every n-th key, chunks of a sequence, and columns of them. They are made to be combined."""

from __future__ import annotations

from torch import Tensor

from ._data import bounded
from ._intervals import Kind, Region, chunks_apart, in_columns
from ._mask import Mask
from ._program import Opcode, Program, ProgramScope


class Dilated(Mask):
    """Every `step`-th key, counted from the query's own: `(j - position(i)) % step == 0`.

    A dilated window (Beltagy et al., 2020) is `Window(left, right) & Dilated(step)`: of the keys from `left` back to
    `right` ahead it keeps those a multiple of `step` away. The column head of the Sparse Transformer's strided pattern
    (Child et al., 2019) is `Causal() & Dilated(stride)`.

    Args:
        step: at least 1; 1 keeps all.

    Raises:
        ValueError, TypeError: a step below 1, or not an int.

    ::

        Window(4, 2) & Dilated(2), Lq = Lk = 6
          1 . 1 . . .
          . 1 . 1 . .
          1 . 1 . 1 .
          . 1 . 1 . 1
          1 . 1 . 1 .
          . 1 . 1 . 1
    """

    fields = ("step",)
    by_distance = True
    by_position = True
    endless = True
    sees_itself = True
    tables_reach_back = True

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

    def write(self, program: Program, scope: ProgramScope) -> None:
        program.write(Opcode.DILATED, self.step)

    def __repr__(self) -> str:
        return f"Dilated({self.step})"


class Chunks(Mask):
    """Chunks of `size` positions, each seen by itself and its neighbours: `-left <= j // size - p // size <= right`.

    `Causal() & Chunks(size)` is the block-local head of the Sparse Transformer's fixed pattern (Child et al., 2019),
    and the chunked attention of Llama 4; `Chunks(size, 1, 1)` is the window of BigBird (Zaheer et al., 2020).

    Args:
        size: at least 1.
        left, right: how many chunks before and after the query's own are seen, too; at least 0.

    Raises:
        ValueError, TypeError: outside of these ranges, or not ints.

    ::

        Chunks(2), Lq = 3, Lk = 5      Chunks(2, 1), Lq = 3, Lk = 5
          . . 1 1 .                      1 1 1 1 .
          . . 1 1 .                      1 1 1 1 .
          . . . . 1                      . . 1 1 1
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

    def write(self, program: Program, scope: ProgramScope) -> None:
        program.write(Opcode.CHUNKS, self.size, self.left, self.right)

    def __repr__(self) -> str:
        neighbours = f", {self.left}, {self.right}" if self.left or self.right else ""
        return f"Chunks({self.size}{neighbours})"


class Columns(Mask):
    """The last keys of every chunk, whoever asks: `j % stride >= stride - columns`.

    `Causal() & Columns(stride, columns)` is the other head of the Sparse Transformer's fixed pattern (Child et al.,
    2019, section 4.2): keys that summarise their chunk for the queries after it.

    Args:
        stride: the chunk length, at least 1.
        columns: how many of its last keys, 1 to `stride`.

    Raises:
        ValueError, TypeError: outside these ranges, or not ints.

    ::

        Columns(3), Lq = 2, Lk = 7
          . . 1 . . 1 .
          . . 1 . . 1 .
    """

    fields = ("stride", "columns")
    by_position = True
    endless = True
    tables_reach_back = True

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

    def write(self, program: Program, scope: ProgramScope) -> None:
        program.write(Opcode.COLUMNS, self.stride, self.columns)

    def __repr__(self) -> str:
        return f"Columns({self.stride}, {self.columns})"
