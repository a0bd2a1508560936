"""Masks for the native kernels: a mask as numbers and tensors, and the object that is made of them.

The numbers are read by native/mask_reader.h; native/mask_program.h says what each operation's numbers are. Tiles of a
mask that is a program are computed here: intervals decide whole tiles, and only the pairs of the others are computed.

Shape legend: B batch, H query heads, Lq / Lk numbers of queries and keys, R x C tiles of 64 rows by 64 keys, n tiles
whose pairs are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._masks import Mask
from ..._masks._data import OwnedTensor, extent, lasting, per_item
from ..._masks._intervals import Region, Span
from ..._masks._program import Opcode, ProgramScope, ProgramWriter, has_program, is_beyond
from ..._masks._traced import TracedMask
from ._kernels import module

_PATCH = 1 << 18  # pairs that are worked out at once
_CODES = {torch.bool: 0, torch.int32: 1, torch.int64: 2}
SIDE = 64  # rows and keys of a tile that is worked out
EMPTY, FULL = -1, -2
_COARSE = 32  # tiles on a side of a patch
_AT_ONCE = 8  # tiles that are worked out together: more would go to several threads, which costs more than they save
Array = np.ndarray[Any, Any]


class MaskProgram(NamedTuple):
    """A mask as numbers and tensors, which a compiled graph can carry. Both depend on the lengths only for masks that
    `is_structured` excludes: predicates, tokens and edges that lie far away, and some slices that lie far away."""

    program: list[int]
    tensors: list[Tensor]


def lower(mask: Mask, Lq: int, Lk: int) -> MaskProgram:
    """The mask for Lq queries and Lk keys as numbers and tensors; its tables are passed on as they are, not copied."""
    program = ProgramWriter(_tiles)
    program.part(mask, ProgramScope((0, Lq), (0, Lk), Lk - Lq, mask))
    return MaskProgram(program.numbers, program.tensors)


def built(lowered: MaskProgram, Lq: int, Lk: int) -> Any:
    """The mask object of the kernels. It refers to the tensors without a copy, and keeps them alive."""
    tensors = lowered.tensors
    tables = [(t.data_ptr(), tuple(t.shape), t.stride(), _CODES[t.dtype]) for t in tensors]
    return module.Mask(lowered.program, tables, tensors, Lq, Lk)


def native_mask(mask: Mask, Lq: int, Lk: int) -> Any:
    """The object the kernels take, remembered by the mask: all layers of a model share it and its work lists."""
    known = mask._remembered("native", (Lq, Lk))
    if known is not None:
        return known
    made = built(_lasting_lower(mask, Lq, Lk), Lq, Lk)
    # What a compiler or a dispatch mode looks on may not be made of plain tensors.
    if not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()):
        mask._remember("native", (Lq, Lk), made)
    return made


_lasting_lower = lasting(lower)


def is_structured(mask: Mask) -> bool:
    """Whether the mask is lowered alike for all lengths, without working out pairs.

    It then holds no `Predicate`, no class unknown here, and nothing that is made for the rows and keys of a call.
    """
    return _is_structured(mask, is_beyond(*mask._origin()))


def _is_structured(mask: Mask, beyond: bool) -> bool:
    by_lengths = mask.by_lengths or (beyond and mask._tables_reach_back)
    return has_program(mask) and not by_lengths and all(_is_structured(part, beyond) for part in mask._children())


def _tiles(mask: Mask, scope: ProgramScope, program: ProgramWriter) -> None:
    """Lower a predicate to tiles of 64 x 64 bits. Equal tiles are stored once, and uniform tiles are not stored."""
    if isinstance(mask, TracedMask):
        tables = [program.table(torch.from_numpy(array)) for array in traced_tiles(mask, scope)]
        program.write(Opcode.TILES, *tables, *scope.rows, *scope.keys)
        return
    (top, bottom), (left, right) = scope.rows, scope.keys
    batch, heads = mask._batch_and_heads()
    if not isinstance(scope.offset, int):
        batch = max(batch, scope.offset.shape[0])
    which = np.full((batch, heads, -(-(bottom - top) // SIDE), -(-(right - left) // SIDE)), EMPTY, dtype=np.int32)
    known: dict[bytes, int] = {}
    most = max(math.isqrt(_PATCH // max(batch * heads, 1)) // SIDE, 1) * SIDE
    for rows, keys, undecided in _patches(scope, scope.rows, scope.keys, most):
        down, across = (slice((a - low) // SIDE, -(-(b - low) // SIDE)) for (a, b), low in ((rows, top), (keys, left)))
        if undecided:
            bits = _worked_out(mask, rows, keys, scope.offset, (batch, heads))
            which[:, :, down, across] = _numbered(bits, known)
        else:
            which[:, :, down, across] = _decided(mask, rows, keys, scope.offset, (batch, heads))[..., None, None]
    held = np.frombuffer(b"".join(known), dtype=np.int64).reshape(-1, SIDE)
    tables = [program.table(torch.from_numpy(array)) for array in (which, held.copy())]
    program.write(Opcode.TILES, *tables, top, bottom, left, right)


def _patches(scope: ProgramScope, rows: Span, keys: Span, most: int) -> Iterator[tuple[Span, Span, bool]]:
    """Rectangles that cover the rows and keys, and whether the pairs of each must be computed; such rectangles have at
    most `most` rows and keys."""
    if rows[0] >= rows[1] or keys[0] >= keys[1]:
        return
    high, wide = rows[1] - rows[0], keys[1] - keys[0]
    undecided = scope.undecided(rows, keys)
    if not undecided or (high <= most and wide <= most):
        yield rows, keys, undecided
        return
    for some_rows in _halves(rows) if high > most else (rows,):
        for some_keys in _halves(keys) if wide > most else (keys,):
            yield from _patches(scope, some_rows, some_keys, most)


def _halves(span: Span) -> tuple[Span, Span]:
    """Two parts, the first one of whole tiles."""
    middle = span[0] + -(-(span[1] - span[0]) // (2 * SIDE)) * SIDE
    return (span[0], middle), (middle, span[1])


def _decided(
    mask: Mask, rows: Span, keys: Span, offset: int | OwnedTensor, shape: tuple[int, int]
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The numbers (B or 1, H or 1) of a rectangle that is decided in the whole mask.

    Either this part decides the rectangle, too, or the other parts do without it, and any number is right.
    """
    numbers = np.full(shape, EMPTY, dtype=np.int32)
    for item, head in np.ndindex(*shape):
        at = extent(offset, item)[0]
        region = Region(rows, (rows[0] + at, rows[1] + at), keys, item, head)
        if mask.region_kind(region) == "full":
            numbers[item, head] = FULL
    return numbers


def _worked_out(
    mask: Mask, rows: Span, keys: Span, offset: int | OwnedTensor, shape: tuple[int, int]
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The bits (B or 1, H or 1, r, c) of a rectangle."""
    b, h = torch.arange(shape[0]).view(-1, 1, 1, 1), torch.arange(shape[1]).view(1, -1, 1, 1)
    row, key = torch.arange(*rows).view(1, 1, -1, 1), torch.arange(*keys).view(1, 1, 1, -1)
    bits = mask.allows(b, h, row, row + per_item(offset, b), key)
    return bits.expand(*shape, rows[1] - rows[0], keys[1] - keys[0]).cpu().numpy()


def _numbered(bits: np.ndarray[Any, Any], known: dict[bytes, int]) -> np.ndarray[Any, Any]:
    """The numbers (B, H, rows / 64, keys / 64) of the tiles of a patch (B, H, r, c). New tiles are added to `known`."""
    packed = _packed(bits)
    numbers = np.where(np.logical_or.reduce(packed != 0, axis=-1), 0, EMPTY)
    numbers[np.logical_and.reduce(packed == _packed(np.ones_like(bits)), axis=-1)] = FULL
    for at in zip(*np.nonzero(numbers == 0), strict=True):
        numbers[at] = known.setdefault(packed[at].tobytes(), len(known))
    return numbers


def _packed(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bits (B, H, r, c) as tiles of 64 words, one for each row: (B, H, r / 64, c / 64, 64). 0 beyond the edge."""
    batch, heads, rows, keys = bits.shape
    high, wide = -(-rows // SIDE), -(-keys // SIDE)
    whole = np.zeros((batch, heads, high * SIDE, wide * SIDE), dtype=np.bool_)
    whole[:, :, :rows, :keys] = bits
    words = np.packbits(whole, axis=3, bitorder="little").view("<i8").reshape(batch, heads, high, SIDE, wide)
    return np.ascontiguousarray(words.swapaxes(3, 4))


def traced_tiles(mask: TracedMask, scope: ProgramScope) -> tuple[Array, Array]:
    """The number of each tile (B, H, R, C), and the bits of the tiles that are neither full nor empty, 64 words
    each."""
    offsets = np.array([scope.offset]) if isinstance(scope.offset, int) else scope.offset.host
    batch, heads = max(mask.batch, len(offsets)), mask.heads
    rows, keys = _ends(scope.rows, SIDE), _ends(scope.keys, SIDE)
    which = np.full((batch, heads, len(rows), len(keys)), EMPTY, dtype=np.int32)
    known: dict[bytes, int] = {}
    wide = _ends(scope.rows, SIDE * _COARSE), _ends(scope.keys, SIDE * _COARSE)
    full, empty = mask.decided(_standing(wide[0], offsets), wide[1])
    for down, across in np.ndindex(len(wide[0]), len(wide[1])):
        patch = slice(down * _COARSE, (down + 1) * _COARSE), slice(across * _COARSE, (across + 1) * _COARSE)
        there = which[:, :, patch[0], patch[1]]
        if (full | empty)[:, :, down, across].all():
            there[full[:, :, down, across]] = FULL
            continue
        spans = tuple((int(first), int(last) + 1) for first, last in (wide[0][down], wide[1][across]))
        if scope.whole is not mask and not scope.undecided(*spans):
            there[:] = FULL  # the whole mask is sure without it, or says what this part says
            there[empty[:, :, down, across]] = EMPTY
            continue
        _work_out(mask, _standing(rows[patch[0]], offsets), keys[patch[1]], there, known)
    held = np.frombuffer(b"".join(known), dtype=np.int64).reshape(-1, SIDE)
    return which, held.copy()


def _ends(span: Span, size: int) -> Array:
    """The first and the last of each part of a span, (parts, 2)."""
    first = np.arange(span[0], span[1], size, dtype=np.int64)
    return np.stack([first, np.minimum(first + size, span[1]) - 1], axis=1)


def _standing(rows: Array, offsets: Array) -> Array:
    """The positions of rows, (B or 1, R, 2)."""
    return rows[None] + offsets[:, None, None]


def _work_out(mask: TracedMask, positions: Array, keys: Array, which: Array, known: dict[bytes, int]) -> None:
    """Compute a patch of tiles: write the number of each tile to `which`, and add new tiles to `known`."""
    full, empty = mask.decided(positions, keys)
    which[full] = FULL
    which[empty] = EMPTY
    at = np.nonzero(~(full | empty))
    for start in range(0, len(at[0]), _AT_ONCE):
        some = tuple(places[start : start + _AT_ONCE] for places in at)
        items, heads, down, across = some
        bits, real = _bits(mask, items, heads, positions[items if len(positions) > 1 else 0, down], keys[across])
        packed = np.packbits(bits, axis=2, bitorder="little").view("<i8")[:, :, 0]
        numbers = np.where(bits.any((1, 2)), 0, EMPTY)
        numbers[(bits | ~real).all((1, 2))] = FULL
        for n in np.nonzero(numbers == 0)[0]:
            numbers[n] = known.setdefault(packed[n].tobytes(), len(known))
        which[some] = numbers


def _bits(mask: TracedMask, items: Array, heads: Array, positions: Array, keys: Array) -> tuple[Array, Array]:
    """The bits (n, 64, 64) of tiles, False beyond the edge, and which of them are not."""
    steps = np.arange(SIDE)
    q, k = (np.minimum(ends[:, :1] + steps, ends[:, 1:]) for ends in (positions, keys))
    real = (positions[:, :1] + steps <= positions[:, 1:])[:, :, None] & (keys[:, :1] + steps <= keys[:, 1:])[:, None]
    where = [torch.from_numpy(np.ascontiguousarray(index)) for index in (items, heads, q, k)]
    b, h, position, key = where[0][:, None, None], where[1][:, None, None], where[2][:, :, None], where[3][:, None]
    bits = mask.allows(b, h, position, position, key).expand(len(items), SIDE, SIDE).numpy()
    return bits & real, real
