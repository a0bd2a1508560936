"""What a mask shows, in blocks of rows by blocks of keys: who must receive which keys, and how much work a row is.

Shape legend: L length, n blocks, B and H the items and heads for which the mask differs, r x c a leaf of pairs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..operator._masks import Mask

_LEAF = 256  # rows and keys of the squares whose pairs are looked at
_LOOKED_AT = 2**31  # pairs; beyond them, what is not decided counts as seen
_FEWEST, _MOST = 256, 2048  # blocks of a sequence, where it has as many rows
_OF_A_RANK = 8  # blocks of a rank, however many ranks there are
TILE = 64  # rows of a block, unless that makes too many: the kernels' own grain

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Attributes:
    size: rows of a block (the last one may have fewer).
    seen: bool (n, n), whether some row of a block sees some key of another, in any item and head.
    pairs: float64 (n,), visible pairs of the rows of a block, averaged over items and heads.
    digest: of all that the mask shows.
    """

    length: int
    size: int
    seen: Array
    pairs: Array
    digest: str

    @property
    def rows(self) -> Array:
        """Rows of each block, (n,)."""
        return np.diff(np.append(np.arange(len(self.pairs)) * self.size, self.length))


def block_size(length: int, ranks: int = 1) -> int:
    """A power of two."""
    size, most = 1, max(_MOST, _OF_A_RANK * ranks)
    while (size < TILE and 2 * _FEWEST * size <= length) or size * most < length:
        size *= 2
    return size


def survey(mask: Mask | None, length: int, size: int | None = None) -> BlockTable:
    """The blocks of a mask over `length` rows and as many keys, of `size` rows each, a power of two.

    Squares that the mask decides as a whole are not looked into. ValueError: the mask does not fit the length.
    """
    size = size or block_size(length)
    count = -(-length // size)
    table = BlockTable(length, size, np.zeros((count, count), dtype=np.bool_), np.zeros(count), "")
    digest = hashlib.sha256(f"{length} {size}".encode())
    if mask is None:
        table.seen[:] = True
        table.pairs[:] = table.rows * float(length)
    else:
        mask.check(None, None, length, length, None)
        _walk(mask, table, digest)
    return BlockTable(length, size, table.seen, table.pairs, digest.hexdigest())


def _walk(mask: Mask, table: BlockTable, digest: Any) -> None:
    length, size, leaf = table.length, table.size, max(_LEAF, table.size)
    side, looked_at = leaf, 0
    while side < length:
        side *= 2
    squares = [(0, 0, side)]
    while squares:
        top, left, side = squares.pop()
        rows, keys = (top, min(top + side, length)), (left, min(left + side, length))
        if rows[0] >= rows[1] or keys[0] >= keys[1]:
            continue
        kind = mask.kind(rows, keys, length, length)
        digest.update(f"{top} {left} {kind}".encode())
        if kind == "partial" and side > leaf:
            half = side // 2
            squares += [(top + down, left + right, half) for down in (0, half) for right in (0, half)]
            continue
        here = slice(top // size, -(-rows[1] // size)), slice(left // size, -(-keys[1] // size))
        if kind == "full" or (kind == "partial" and looked_at > _LOOKED_AT):
            table.seen[here] = True
            table.pairs[here[0]] += table.rows[here[0]] * ((keys[1] - keys[0]) * (1.0 if kind == "full" else 0.5))
        elif kind == "partial":
            bits = _bits(mask, rows, keys, length)
            looked_at += bits.size
            digest.update(np.packbits(bits).tobytes())
            table.seen[here] |= _any_in_blocks(np.any(bits, (0, 1)), size)
            table.pairs[here[0]] += _in_blocks(bits.mean((0, 1)).sum(1, keepdims=True), size).sum((1, 2, 3))


def _bits(mask: Mask, rows: tuple[int, int], keys: tuple[int, int], length: int) -> Array:
    """(B, H, r, c)."""
    device = mask._device()
    bits = mask._grid(torch.arange(*rows, device=device), torch.arange(*keys, device=device), length, length)
    return bits.cpu().numpy()


def _in_blocks(square: Array, size: int) -> Array:
    """(r, c) as (r / size, size, c / size, size), with zeros beyond the edge."""
    down, across = (-(-n // size) for n in square.shape)
    whole = np.zeros((down * size, across * size), dtype=square.dtype)
    whole[: square.shape[0], : square.shape[1]] = square
    return whole.reshape(down, size, across, size)


def _any_in_blocks(square: Array, size: int) -> Array:
    return np.any(_in_blocks(square, size), (1, 3))
