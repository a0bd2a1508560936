"""Deals the blocks of a sequence to ranks, so that each computes as much and holds about as many rows.

Candidates: consecutive parts of equal work; and c chunks of equal rows for each rank, heavy and light ones together
(for causal attention and c = 2 that is the zigzag: chunks i and 2R - 1 - i). Edges of all of them move until work is
even.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ._blocks import Array, BlockTable

BALANCED = 0.03  # work of the busiest rank above the mean that is not worth more chunks
_ROWS = 0.10  # the same of rows held, which are the work of the rest of a model
_PAIRS_OF_A_KEY = 64  # that are computed while a key and its value travel, about
_PAIRS_OF_A_ROW = 250  # that are computed while a row begins and ends with one span of keys, about
_CHEAPER = 0.9  # share of the cost at which another deal is worth more than an even one
_CHUNKS = (1, 2, 4, 8, 16)  # of a rank
_SWAPS = 256


def dealt(table: BlockTable, ranks: int) -> Array:
    """The rank of each block, int (n,): the cheapest balanced deal, or one half as balanced that is a tenth cheaper."""
    candidates = [_evened(owner, table, ranks) for owner in _candidates(table, ranks)]
    rows = [imbalance(owner, table.rows, ranks) for owner in candidates]
    candidates = [owner for owner, more in zip(candidates, rows, strict=True) if more <= max(_ROWS, min(rows))]
    work = [imbalance(owner, table.pairs, ranks) for owner in candidates]
    costs = [_cost(owner, table, ranks) for owner in candidates]

    def cheapest(most: float) -> int:
        return min((n for n, more in enumerate(work) if more <= max(most, min(work))), key=costs.__getitem__)

    balanced, other = cheapest(BALANCED), cheapest(2 * BALANCED)
    return candidates[other if costs[other] < _CHEAPER * costs[balanced] else balanced]


def _cost(owner: Array, table: BlockTable, ranks: int) -> float:
    """Pairs of the rank with most to do, with the pairs that could be computed while keys travel, and while rows begin
    and end with each span of keys that they see."""
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    spans = np.logical_or.reduceat(table.seen, starts, 1).sum(1)
    work = np.bincount(owner, table.pairs + _PAIRS_OF_A_ROW * table.rows * spans, ranks)
    return float((work + _PAIRS_OF_A_KEY * np.array(received(owner, table, ranks))).max())


def in_grid(table: BlockTable, grid: tuple[int, int]) -> Array:
    """The rank of each block, int (n,), in a grid of s rows of h ranks: dealt to the rows, and evenly within each."""
    width, rows = grid
    owner = dealt(table, rows) * width
    for row in range(rows):
        blocks = np.flatnonzero(owner == row * width)
        owner[blocks] += _chunks(len(blocks), width)
    return owner


def imbalance(owner: Array, amounts: Array, ranks: int) -> float:
    """The share by which the rank with most exceeds the mean; 0 of nothing."""
    held = np.bincount(owner, amounts, ranks)
    return float(held.max() / held.mean() - 1) if held.any() else 0.0


def received(owner: Array, table: BlockTable, ranks: int, holder: Array | None = None) -> list[int]:
    """For each rank the number of others' keys that its rows see, in whole blocks.

    Args:
        holder: the rank of each block of keys, (m,), where rows have other owners.
    """
    holder = owner if holder is None else holder
    return [int(table.keys[needed(owner, table, rank) & (holder != rank)].sum()) for rank in range(ranks)]


def needed(owner: Array, table: BlockTable, rank: int) -> Array:
    """The blocks of keys that the rows of a rank see, bool (m,)."""
    seen: Array = table.seen[owner == rank].any(0)
    return seen


def _candidates(table: BlockTable, ranks: int) -> Iterator[Array]:
    blocks = len(table.pairs)
    for each in _CHUNKS:
        if each == 1 or each * ranks <= blocks:
            chunks = _chunks(blocks, each * ranks)
            work = np.bincount(chunks, table.pairs, each * ranks)
            yield (np.arange(ranks) if each == 1 else _in_turns(work, ranks))[chunks]
    total = table.pairs.sum()
    if total > 0:
        middle = np.cumsum(table.pairs) - table.pairs / 2
        yield np.minimum((middle * (ranks / total)).astype(np.int64), ranks - 1)


def _evened(owner: Array, table: BlockTable, ranks: int) -> Array:
    """Blocks at the edges of spans change to the neighbour, while work is not even and as long as that helps."""
    owner, most_rows = owner.copy(), (1 + _ROWS) * table.rows.sum() / ranks
    work, rows = np.bincount(owner, table.pairs, ranks), np.bincount(owner, table.rows, ranks)
    for _ in range(2 * len(owner)):
        if work.max() <= (1 + BALANCED) * work.mean():
            break
        edges = np.flatnonzero(owner[1:] != owner[:-1])
        blocks, others = np.concatenate((edges, edges + 1)), np.concatenate((edges + 1, edges))
        givers, takers, pairs = owner[blocks], owner[others], table.pairs[blocks]
        less = pairs * (work[givers] - work[takers] - pairs)  # half of what the sum of squares falls by
        less[rows[takers] + table.rows[blocks] > most_rows] = 0
        if not len(less) or less.max() <= 0:
            break
        block, giver, taker = (of[less.argmax()] for of in (blocks, givers, takers))
        for amounts, of_blocks in ((work, table.pairs), (rows, table.rows)):
            amounts[giver] -= of_blocks[block]
            amounts[taker] += of_blocks[block]
        owner[block] = taker
    return owner


def _chunks(blocks: int, count: int) -> Array:
    """The chunk of each block, of `count` chunks of consecutive blocks."""
    edges = np.rint(np.arange(1, count) * (blocks / count)).astype(np.int64)
    return np.searchsorted(edges, np.arange(blocks), side="right")


def _in_turns(work: Array, ranks: int) -> Array:
    """The rank of each chunk, as many for each: dealt heaviest first, there and back, then exchanged where it helps."""
    turn = np.arange(len(work)) % (2 * ranks)
    owner = np.empty(len(work), dtype=np.int64)
    owner[np.argsort(-work, kind="stable")] = np.where(turn < ranks, turn, 2 * ranks - 1 - turn)
    for _ in range(_SWAPS):
        held = np.bincount(owner, work, ranks)
        most, least = int(held.argmax()), int(held.argmin())
        ours, theirs = np.flatnonzero(owner == most), np.flatnonzero(owner == least)
        # What exchanging a pair leaves of the difference between the two ranks.
        left = np.abs(held[most] - held[least] - 2 * (work[ours][:, None] - work[theirs][None]))
        at = np.unravel_index(int(left.argmin()), left.shape)
        if left[at] >= (held[most] - held[least]) * (1 - 1e-9):
            break
        owner[ours[at[0]]], owner[theirs[at[1]]] = least, most
    return owner
