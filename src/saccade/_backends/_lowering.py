"""Masks for the native kernels: a mask as numbers and tensors, and the object that is made of them.

Shapes: B batch, H query heads, Lq / Lk numbers of queries and keys. The numbers are read by native/mask_reader.h;
native/mask_program.h says what each operation's numbers are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._masks import (
    Blocks,
    Causal,
    Chunks,
    Columns,
    Dilated,
    Documents,
    Edges,
    Fixed,
    FromTensor,
    Global,
    Mask,
    Padding,
    PerHead,
    Prefix,
    RandomBlocks,
    Strided,
    Window,
)
from .._masks._algebra import And, Not, Or
from .._masks._data import Subset, Table, extent, lasting, per_item
from .._masks._intervals import Region, Span
from .._masks._placement import At, Slice
from ._kernels import module

_FAR = 1 << 60  # an open side
_SIDE = 64  # rows and keys of a tile that is worked out here
_PATCH = 1 << 18  # pairs that are worked out at once
_CODES = {torch.bool: 0, torch.int32: 1, torch.int64: 2}
_EMPTY, _FULL = -1, -2
# The kernels make tables of all keys up to the last of a slice, one bit for each, for masks of these classes, and lists
# of all rows for some. Slices that begin beyond so many rows or keys are worked out instead.
_REACHING = (Strided, Fixed, Dilated, Columns, RandomBlocks)
_BEYOND = 1 << 24


class Operation(IntEnum):
    """What a part of the program is: the same numbers as in native/mask_program.h."""

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


class Lowered(NamedTuple):
    """A mask as numbers and tensors: what a compiled graph can carry. Both depend on the lengths only for what
    `is_structured` excludes: predicates, tokens and edges that lie far away, and some slices far away."""

    program: list[int]
    tensors: list[Tensor]


class _Standing(NamedTuple):
    """The rows and keys at which a part is asked, where its row 0 stands, and whose part it is.

    Row 0 and key 0 of the whole are row `rows[0]` and key `keys[0]` of the part.
    """

    rows: Span
    keys: Span
    offset: int | Table
    whole: Mask

    @property
    def beyond(self) -> bool:
        return _is_beyond(self.rows[0], self.keys[0])

    def undecided(self, rows: Span, keys: Span) -> bool:
        """Whether what the part says about a rectangle matters: for `Causal() & part` not above the diagonal."""
        (top, bottom), (left, right) = self.rows, self.keys
        asked = (rows[0] - top, rows[1] - top), (keys[0] - left, keys[1] - left)
        return self.whole._kind(*asked, bottom - top, right - left) == "partial"


def lower(mask: Mask, Lq: int, Lk: int) -> Lowered:
    """The mask for Lq queries and Lk keys as numbers and tensors; its tables are passed on as they are, not copied."""
    lowered = Lowered([], [])
    _lower(mask, _Standing((0, Lq), (0, Lk), Lk - Lq, mask), lowered)
    return lowered


def built(lowered: Lowered, Lq: int, Lk: int) -> Any:
    """The object the kernels take. It reads the tensors where they lie, and keeps them."""
    tensors = lowered.tensors
    tables = [(t.data_ptr(), tuple(t.shape), t.stride(), _CODES[t.dtype]) for t in tensors]
    return module.Mask(lowered.program, tables, tensors, Lq, Lk)


def native_mask(mask: Mask, Lq: int, Lk: int) -> Any:
    """The object the kernels take, remembered by the mask: all layers of a model share it and its work lists."""
    last = mask._native
    if last is not None and last[0] == Lq and last[1] == Lk:
        return last[2]
    made = built(_lasting_lower(mask, Lq, Lk), Lq, Lk)
    # What a compiler or a dispatch mode looks on may not be made of plain tensors.
    if not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()):
        mask._set(_native=(Lq, Lk, made))
    return made


_lasting_lower = lasting(lower)


def _lower(mask: Mask, standing: _Standing, out: Lowered) -> None:
    write = _WRITERS.get(type(mask), _tiles)
    if standing.beyond and isinstance(mask, _REACHING):
        write = _tiles
    write(mask, standing, out)


def _moved(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by


def _table(tensor: Tensor, out: Lowered) -> int:
    out.tensors.append(tensor)
    return len(out.tensors) - 1


def _number(value: int | Table, out: Lowered) -> tuple[int, int]:
    return (0, value) if isinstance(value, int) else (1, _table(value.values, out))


def _causal(mask: Causal, standing: _Standing, out: Lowered) -> None:
    out.program.extend((Operation.WINDOW, _FAR, 0))


def _window(mask: Window, standing: _Standing, out: Lowered) -> None:
    sides = (_FAR if side is None else side for side in (mask.left, mask.right))
    out.program.extend((Operation.WINDOW, *sides))


def _padding(mask: Padding, standing: _Standing, out: Lowered) -> None:
    rows = -1 if mask.queries is None else _table(mask.queries.table.values, out)
    out.program.extend((Operation.PADDING, _table(mask.keys.table.values, out), rows))


def _documents(mask: Documents, standing: _Standing, out: Lowered) -> None:
    queries = _table(mask.query_ids.values, out)
    keys = -1 if mask.key_ids is None else _table(mask.key_ids.values, out)
    out.program.extend((Operation.DOCUMENTS, queries, keys))


def _prefix(mask: Prefix, standing: _Standing, out: Lowered) -> None:
    out.program.extend((Operation.PREFIX, *_number(mask.length, out)))


def _global(mask: Global, standing: _Standing, out: Lowered) -> None:
    members = mask._members
    if isinstance(members, Subset):
        out.program.extend((Operation.GLOBAL, _table(members.table.values, out)))
    elif standing.beyond:
        _tiles(mask, standing, out)
    else:
        # The table is of the keys and, behind them, of the positions of this call's rows.
        asked = np.concatenate([np.arange(standing.keys[1]), _moved_near(standing, standing.keys[1], out)])
        marks = np.isin(asked, members.table.host)
        out.program.extend((Operation.GLOBAL, _table(torch.from_numpy(marks), out)))


def _strided(mask: Strided, standing: _Standing, out: Lowered) -> None:
    out.program.extend((Operation.STRIDED, mask.stride))


def _fixed(mask: Fixed, standing: _Standing, out: Lowered) -> None:
    out.program.extend((Operation.FIXED, mask.stride, mask.columns))


def _dilated(mask: Dilated, standing: _Standing, out: Lowered) -> None:
    out.program.extend((Operation.DILATED, mask.step))


def _chunks(mask: Chunks, standing: _Standing, out: Lowered) -> None:
    out.program.extend((Operation.CHUNKS, mask.size, mask.left, mask.right))


def _columns(mask: Columns, standing: _Standing, out: Lowered) -> None:
    out.program.extend((Operation.COLUMNS, mask.stride, mask.columns))


def _blocks(mask: Blocks, standing: _Standing, out: Lowered) -> None:
    out.program.extend((Operation.BLOCKS, _table(mask.layout.values, out), mask.size))


def _random(mask: RandomBlocks, standing: _Standing, out: Lowered) -> None:
    out.program.extend((Operation.RANDOM, mask._start, mask.size, mask.count, int(mask.symmetric)))


def _edges(mask: Edges, standing: _Standing, out: Lowered) -> None:
    starts, keys = mask._starts.values, mask.keys.values
    if mask.scattered:
        positions = _moved_near(standing, 0, out)
        first, last = np.searchsorted(mask.queries.host, [positions, positions + 1])
        counts = last - first
        ends = np.cumsum(counts)
        edges = np.arange(counts.sum()) + np.repeat(first - (ends - counts), counts)
        starts, keys = torch.from_numpy(np.append(0, ends)), torch.from_numpy(mask.keys.host[edges])
    out.program.extend((Operation.EDGES, _table(starts, out), _table(keys, out)))


def _moved_near(standing: _Standing, first: int, out: Lowered) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The positions of this call's rows, one span for each different offset; what follows gets them from `first` on.

    It is placed so that its position `first + n` is the n-th of these, however far away and apart they are.
    """
    top, bottom = standing.rows
    offsets = np.array([standing.offset]) if isinstance(standing.offset, int) else standing.offset.host
    distinct, which = np.unique(offsets, return_inverse=True)
    moved = which.reshape(-1) * (bottom - top) + first - top
    many = len(moved) != 1
    out.program.extend((Operation.AT, int(many), _table(torch.from_numpy(moved), out) if many else int(moved[0])))
    return (distinct[:, None] + np.arange(top, bottom)).ravel()


def _tensor(mask: FromTensor, standing: _Standing, out: Lowered) -> None:
    out.program.extend((Operation.TENSOR, _table(mask.tensor, out)))


def _at(mask: At, standing: _Standing, out: Lowered) -> None:
    out.program.extend((Operation.AT, *_number(mask.offset, out)))
    _lower(mask.part, standing._replace(offset=mask.offset), out)


def _slice(mask: Slice, standing: _Standing, out: Lowered) -> None:
    lengths = mask.lengths
    out.program.extend((Operation.SLICE, mask.rows[0], mask.keys[0], *(lengths or (0, 0)), int(lengths is not None)))
    rows, keys = _moved(standing.rows, mask.rows[0]), _moved(standing.keys, mask.keys[0])
    _lower(mask.part, standing._replace(rows=rows, keys=keys, offset=mask._offset()), out)


def _and(mask: And, standing: _Standing, out: Lowered) -> None:
    _several(Operation.ALL, mask.parts, standing, out)


def _or(mask: Or, standing: _Standing, out: Lowered) -> None:
    _several(Operation.ANY, mask.parts, standing, out)


def _several(operation: Operation, parts: tuple[Mask, ...], standing: _Standing, out: Lowered) -> None:
    out.program.extend((operation, len(parts)))
    for part in parts:
        _lower(part, standing, out)


def _not(mask: Not, standing: _Standing, out: Lowered) -> None:
    out.program.append(Operation.INVERT)
    _lower(mask.part, standing, out)


def _heads(mask: PerHead, standing: _Standing, out: Lowered) -> None:
    out.program.extend((Operation.HEADS, len(mask._distinct), len(mask._which), *mask._which))
    for part in mask._distinct:
        _lower(part, standing, out)


# By the very class: what a subclass means is not known here.
_WRITERS: dict[type[Mask], Callable[[Any, _Standing, Lowered], None]] = {
    Causal: _causal,
    Window: _window,
    Padding: _padding,
    Documents: _documents,
    Prefix: _prefix,
    Global: _global,
    Strided: _strided,
    Fixed: _fixed,
    Dilated: _dilated,
    Chunks: _chunks,
    Columns: _columns,
    Blocks: _blocks,
    RandomBlocks: _random,
    Edges: _edges,
    FromTensor: _tensor,
    At: _at,
    Slice: _slice,
    And: _and,
    Or: _or,
    Not: _not,
    PerHead: _heads,
}


def is_structured(mask: Mask) -> bool:
    """Whether the mask is lowered alike for all lengths, without working out pairs.

    It then holds no `Predicate`, no class unknown here, and nothing that is made for the rows and keys of a call.
    """
    return _is_structured(mask, _is_beyond(*mask._origin()))


def _is_structured(mask: Mask, beyond: bool) -> bool:
    by_lengths = mask.scattered if isinstance(mask, Global | Edges) else beyond and isinstance(mask, _REACHING)
    return type(mask) in _WRITERS and not by_lengths and all(_is_structured(part, beyond) for part in mask._parts())


def _is_beyond(row: int, key: int) -> bool:
    """Whether a slice that begins there is too far away for tables of what lies before it."""
    return max(row, key) > _BEYOND


def _tiles(mask: Mask, standing: _Standing, out: Lowered) -> None:
    """A predicate, worked out: tiles of 64 x 64 bits, of which equal ones are kept once and uniform ones not at all."""
    (top, bottom), (left, right) = standing.rows, standing.keys
    batch, heads = mask._shape()
    if not isinstance(standing.offset, int):
        batch = max(batch, standing.offset.shape[0])
    which = np.full((batch, heads, -(-(bottom - top) // _SIDE), -(-(right - left) // _SIDE)), _EMPTY, dtype=np.int32)
    known: dict[bytes, int] = {}
    most = max(math.isqrt(_PATCH // max(batch * heads, 1)) // _SIDE, 1) * _SIDE
    for rows, keys, undecided in _patches(standing, standing.rows, standing.keys, most):
        down, across = (
            slice((a - low) // _SIDE, -(-(b - low) // _SIDE)) for (a, b), low in ((rows, top), (keys, left))
        )
        if undecided:
            bits = _worked_out(mask, rows, keys, standing.offset, (batch, heads))
            which[:, :, down, across] = _numbered(bits, known)
        else:
            which[:, :, down, across] = _decided(mask, rows, keys, standing.offset, (batch, heads))[..., None, None]
    held = np.frombuffer(b"".join(known), dtype=np.int64).reshape(-1, _SIDE)
    tables = [_table(torch.from_numpy(array), out) for array in (which, held.copy())]
    out.program.extend((Operation.TILES, *tables, top, bottom, left, right))


def _patches(standing: _Standing, rows: Span, keys: Span, most: int) -> Iterator[tuple[Span, Span, bool]]:
    """Rectangles, and whether they have to be worked out: these are halved until they are at most `most` on a side."""
    if rows[0] >= rows[1] or keys[0] >= keys[1]:
        return
    high, wide = rows[1] - rows[0], keys[1] - keys[0]
    undecided = standing.undecided(rows, keys)
    if not undecided or (high <= most and wide <= most):
        yield rows, keys, undecided
        return
    for some_rows in _halves(rows) if high > most else (rows,):
        for some_keys in _halves(keys) if wide > most else (keys,):
            yield from _patches(standing, some_rows, some_keys, most)


def _halves(span: Span) -> tuple[Span, Span]:
    """Two parts, the first one of whole tiles."""
    middle = span[0] + -(-(span[1] - span[0]) // (2 * _SIDE)) * _SIDE
    return (span[0], middle), (middle, span[1])


def _decided(
    mask: Mask, rows: Span, keys: Span, offset: int | Table, shape: tuple[int, int]
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The numbers (B or 1, H or 1) of a rectangle about which the whole mask is sure.

    Then either this part is sure, too, or the others are whatever it says, and any number does.
    """
    numbers = np.full(shape, _EMPTY, dtype=np.int32)
    for item, head in np.ndindex(*shape):
        at = extent(offset, item)[0]
        region = Region(rows, (rows[0] + at, rows[1] + at), keys, item, head)
        if mask._region(region) == "full":
            numbers[item, head] = _FULL
    return numbers


def _worked_out(
    mask: Mask, rows: Span, keys: Span, offset: int | Table, shape: tuple[int, int]
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The bits (B or 1, H or 1, r, c) of a rectangle."""
    b, h = torch.arange(shape[0]).view(-1, 1, 1, 1), torch.arange(shape[1]).view(1, -1, 1, 1)
    row, key = torch.arange(*rows).view(1, 1, -1, 1), torch.arange(*keys).view(1, 1, 1, -1)
    bits = mask._allow(b, h, row, row + per_item(offset, b), key)
    return bits.expand(*shape, rows[1] - rows[0], keys[1] - keys[0]).cpu().numpy()


def _numbered(bits: np.ndarray[Any, Any], known: dict[bytes, int]) -> np.ndarray[Any, Any]:
    """The numbers (B, H, rows / 64, keys / 64) of the tiles of a patch (B, H, r, c), new ones added to `known`."""
    packed = _packed(bits)
    numbers = np.where(np.logical_or.reduce(packed != 0, axis=-1), 0, _EMPTY)
    numbers[np.logical_and.reduce(packed == _packed(np.ones_like(bits)), axis=-1)] = _FULL
    for at in zip(*np.nonzero(numbers == 0), strict=True):
        numbers[at] = known.setdefault(packed[at].tobytes(), len(known))
    return numbers


def _packed(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bits (B, H, r, c) as tiles of 64 words, one for each row: (B, H, r / 64, c / 64, 64). 0 beyond the edge."""
    batch, heads, rows, keys = bits.shape
    high, wide = -(-rows // _SIDE), -(-keys // _SIDE)
    whole = np.zeros((batch, heads, high * _SIDE, wide * _SIDE), dtype=np.bool_)
    whole[:, :, :rows, :keys] = bits
    words = np.packbits(whole, axis=3, bitorder="little").view("<i8").reshape(batch, heads, high, _SIDE, wide)
    return np.ascontiguousarray(words.swapaxes(3, 4))
