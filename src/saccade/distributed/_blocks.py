"""What a mask shows, in blocks of rows by blocks of keys: who must receive which keys, and how much work a row is.

Shape legend: n blocks of rows, m of keys, B and H the items and heads for which the mask differs, r x c pairs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
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
    length, key_length: number of rows and of keys.
    size, key_size: rows and keys of a block (the last one may have fewer).
    seen: bool (n, m), whether some row of a block sees some key of another, in any item and head.
    pairs: float64 (n,), visible pairs of the rows of a block, averaged over items and heads.
    digest: of all that the mask shows.
    """

    length: int
    size: int
    key_length: int
    key_size: int
    seen: Array
    pairs: Array
    digest: str

    @property
    def rows(self) -> Array:
        """Rows of each block, (n,)."""
        return in_blocks(self.length, self.size)

    @property
    def keys(self) -> Array:
        """Keys of each block, (m,)."""
        return in_blocks(self.key_length, self.key_size)


def in_blocks(length: int, size: int) -> Array:
    """Rows of each block, of `size` rows but for the last."""
    return np.diff(np.append(np.arange(-(-length // size)) * size, length))


def block_size(length: int, ranks: int = 1) -> int:
    """A power of two."""
    size, most = 1, max(_MOST, _OF_A_RANK * ranks)
    while (size < TILE and 2 * _FEWEST * size <= length) or size * most < length:
        size *= 2
    return size


def survey(mask: Mask | None, length: int, size: int | None = None, keys: tuple[int, int] | None = None) -> BlockTable:
    """The blocks of a mask over `length` rows, of `size` rows each, a power of two.

    Squares that the mask decides as a whole are not looked into. ValueError: the mask does not fit the length.

    Args:
        keys: number of keys, and keys of a block; None: those of the rows.
    """
    size = size or block_size(length)
    key_length, key_size = keys or (length, size)
    blocks = len(in_blocks(length, size)), len(in_blocks(key_length, key_size))
    digest = hashlib.sha256(f"{length} {size} {key_length} {key_size}".encode())
    table = BlockTable(length, size, key_length, key_size, np.zeros(blocks, dtype=np.bool_), np.zeros(blocks[0]), "")
    if mask is None:
        table.seen[:] = True
        table.pairs[:] = table.rows * float(key_length)
    else:
        mask.check(None, None, length, key_length, None)
        _walk(mask, table, digest)
    return replace(table, digest=digest.hexdigest())


def _walk(mask: Mask, table: BlockTable, digest: Any) -> None:
    length, key_length, size, key_size = table.length, table.key_length, table.size, table.key_size
    side = leaf = max(_LEAF, size, key_size)
    looked_at = 0
    while side < max(length, key_length):
        side *= 2
    squares = [(0, 0, side)]
    while squares:
        top, left, side = squares.pop()
        rows, keys = (top, min(top + side, length)), (left, min(left + side, key_length))
        if rows[0] >= rows[1] or keys[0] >= keys[1]:
            continue
        kind = mask.kind(rows, keys, length, key_length)
        digest.update(f"{top} {left} {kind}".encode())
        if kind == "partial" and side > leaf:
            half = side // 2
            squares += [(top + down, left + right, half) for down in (0, half) for right in (0, half)]
            continue
        here = slice(top // size, -(-rows[1] // size)), slice(left // key_size, -(-keys[1] // key_size))
        if kind == "full" or (kind == "partial" and looked_at > _LOOKED_AT):
            table.seen[here] = True
            table.pairs[here[0]] += table.rows[here[0]] * ((keys[1] - keys[0]) * (1.0 if kind == "full" else 0.5))
        elif kind == "partial":
            bits = _bits(mask, rows, keys, (length, key_length))
            looked_at += bits.size
            digest.update(np.packbits(bits).tobytes())
            table.seen[here] |= np.any(_cut(np.any(bits, (0, 1)), size, key_size), (1, 3))
            table.pairs[here[0]] += _cut(bits.mean((0, 1)).sum(1, keepdims=True), size, 1).sum((1, 2, 3))


def _bits(mask: Mask, rows: tuple[int, int], keys: tuple[int, int], lengths: tuple[int, int]) -> Array:
    """(B, H, r, c)."""
    device = mask._device()
    bits = mask._grid(torch.arange(*rows, device=device), torch.arange(*keys, device=device), *lengths)
    return bits.cpu().numpy()


def _cut(pairs: Array, size: int, key_size: int) -> Array:
    """(r, c) as (r / size, size, c / key_size, key_size), with zeros beyond the edge."""
    down, across = -(-pairs.shape[0] // size), -(-pairs.shape[1] // key_size)
    whole = np.zeros((down * size, across * key_size), dtype=pairs.dtype)
    whole[: pairs.shape[0], : pairs.shape[1]] = pairs
    return whole.reshape(down, size, across, key_size)
