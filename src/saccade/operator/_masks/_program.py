"""A mask as the native kernels read it: a program of numbers, and tables.

Each class of mask writes its own part (`write`). native/mask_program.h says what the numbers of an operation are, and
native/mask_reader.h makes an expression of them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ._data import OwnedTensor
from ._intervals import Span

if TYPE_CHECKING:
    from ._mask import Mask

OPEN = 1 << 60  # a side without an end
_BEYOND = 1 << 24


class Opcode(IntEnum):
    """The kind of a part of the program, with the numbers of native/mask_program.h."""

    WINDOW = 0
    PADDING = 1
    DOCUMENTS = 2
    PREFIX = 3
    GLOBAL = 4
    STRIDED = 5
    FIXED = 6
    BLOCKS = 7
    RANDOM = 8
    EDGES = 9
    TENSOR = 10
    TILES = 11
    AT = 12
    SLICE = 13
    ALL = 14
    ANY = 15
    INVERT = 16
    HEADS = 17
    DILATED = 18
    CHUNKS = 19
    COLUMNS = 20


class ProgramScope(NamedTuple):
    """Context in which a mask is lowered to a program: its rows and keys, the offset of the rows, and the whole mask
    that contains it.

    Row 0 and key 0 of the whole are row `rows[0]` and key `keys[0]` of the part.
    """

    rows: Span
    keys: Span
    offset: int | OwnedTensor
    whole: Mask

    @property
    def beyond(self) -> bool:
        return is_beyond(self.rows[0], self.keys[0])

    def undecided(self, rows: Span, keys: Span) -> bool:
        """Whether this part can change the whole mask in a rectangle: for `Causal() & part`, it cannot above the
        diagonal."""
        (top, bottom), (left, right) = self.rows, self.keys
        asked = (rows[0] - top, rows[1] - top), (keys[0] - left, keys[1] - left)
        return self.whole.kind(*asked, bottom - top, right - left) == "partial"


class ProgramWriter:
    """The program written so far. Tables are passed on without a copy.

    Args:
        work_out: writes a part that has no program of its own, pair by pair where that is needed.
    """

    def __init__(self, work_out: Callable[[Mask, ProgramScope, ProgramWriter], None]):
        self.numbers: list[int] = []
        self.tensors: list[Tensor] = []
        self.work_out = work_out

    def write(self, operation: Opcode, *numbers: int) -> None:
        self.numbers.extend((operation, *numbers))

    def table(self, table: OwnedTensor | Tensor | None) -> int:
        """The number of a table, -1 for none."""
        if table is None:
            return -1
        self.tensors.append(table.values if isinstance(table, OwnedTensor) else table)
        return len(self.tensors) - 1

    def number(self, value: int | OwnedTensor) -> tuple[int, int]:
        """An encoded number, (kind, place): kind 0 is an int for all items, kind 1 a table with one for each."""
        return (0, value) if isinstance(value, int) else (1, self.table(value))

    def part(self, mask: Mask, scope: ProgramScope) -> None:
        mask = mask._in_kernels(scope)
        if has_program(mask) and not (scope.beyond and mask._tables_reach_back):
            mask.write(self, scope)
        else:
            self.work_out(mask, scope, self)


def has_program(mask: Mask) -> bool:
    """Whether the mask's own class defines its program. An inherited program may not fit the subclass."""
    return "write" in vars(type(mask))


def is_beyond(row: int, key: int) -> bool:
    """Whether a slice starts so far away that tables of everything before it would be too large."""
    return max(row, key) > _BEYOND
