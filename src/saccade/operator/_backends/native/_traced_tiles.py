"""Tiles of a mask that is a program: intervals decide whole tiles, and the pairs of the others are computed.

Shape legend: B batch, H query heads, R x C tiles of 64 rows by 64 keys, n tiles whose pairs are computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..._masks._intervals import Span
from ..._masks._program import ProgramScope
from ..._masks._traced import TracedMask

SIDE = 64  # rows and keys of a tile that is worked out
EMPTY, FULL = -1, -2
_COARSE = 32  # tiles on a side of a patch
_AT_ONCE = 8  # tiles that are worked out together: more would go to several threads, which costs more than they save
Array = np.ndarray[Any, Any]


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
