"""Predicts the cost of a call from the blocks of its mask. No process group is needed.

A message of b bytes takes latency + b / bandwidth seconds; a rank sends and receives at the same time. A rectangle
takes 2 (D + Dv) operations for each pair and head in the tiles of 64 x 64 that have visible pairs; its sums are added
to others' in memory. Ranks wait for each other as in `_ring.py` and `_ulysses.py`: the ring is followed step by step,
all ranks at once.

Shape legend: S parts of the sequence, with U ranks each; t step of the ring, in which part s has the keys of s - t.
Arrays of ranks are (S, U), of steps (S, S, U).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ._blocks import TILE, Array, BlockTable
from ._costs import BACKWARD, CallSizes, Grid, LayoutCost, Passes, RankSpeed
from ._dealing import in_grid, needed
from ._heads import deal_heads


def predicted(
    table: BlockTable, sizes: CallSizes, speed: RankSpeed, layouts: Sequence[tuple[str, Grid]]
) -> list[LayoutCost]:
    """The cost of each layout, given as a name and a grid."""
    shares = {grid: _shares(table, grid) for grid in {grid for _, grid in layouts}}
    return [_Layout(name, grid, shares[grid], sizes).cost(speed) for name, grid in layouts]


class _Shares(NamedTuple):
    """Rows of each rank (S, U); and for each part's rows and keys (S, S): pairs that are computed, keys that travel in
    whole blocks, and rows that see some of them."""

    held: Array
    pairs: Array
    needs: Array
    seeing: Array


def _shares(table: BlockTable, grid: Grid) -> _Shares:
    across, parts = grid
    ranks = in_grid(table, grid)
    owner = ranks // across
    pairs, needs, seeing = np.zeros((3, parts, parts))
    area = table.rows * (table.seen @ table.rows)
    # Kernels compute whole tiles, where the edges of what is seen leave pairs unused.
    computed = np.minimum(table.pairs + (area - table.pairs) * (TILE / table.size), table.rows * float(table.length))
    even = computed / np.maximum(table.seen.sum(1), 1)  # as if a row saw as much of each block that it sees
    by_owner = np.argsort(owner, kind="stable")
    present, starts = np.unique(owner[by_owner], return_index=True)
    for part in range(parts):
        mine, blocks = owner == part, needed(owner, table, part)
        pairs[part] = np.bincount(owner, even[mine] @ table.seen[mine], parts)
        needs[part] = np.bincount(owner[blocks], table.rows[blocks], parts)
        some = np.logical_or.reduceat(table.seen[mine][:, by_owner], starts, 1)
        seeing[part, present] = table.rows[mine] @ some
    return _Shares(np.bincount(ranks, table.rows, across * parts).reshape(parts, across), pairs, needs, seeing)


class _Layout:
    """One layout: its operations and bytes, and with a speed its cost."""

    def __init__(self, name: str, grid: Grid, shares: _Shares, sizes: CallSizes) -> None:
        self.name, self.grid, self.sizes = name, grid, sizes
        (across, parts), (width, value_width) = grid, sizes.widths
        self.held = shares.held.astype(float)  # rows of a rank's shards
        self.rows = self.held.sum(1, keepdims=True) + np.zeros(across)  # that it computes
        heads, key_heads = deal_heads(sizes.heads, sizes.key_heads, across)
        self.queries, keys = (np.array([len(mine) for mine in of]) for of in (heads, key_heads))
        self.number, self.lse = sizes.batch * sizes.dtype.itemsize, sizes.batch * max(sizes.dtype.itemsize, 4)
        key = self.number * (width + value_width)  # bytes of a key and its value, of one head
        self.before = self.number * width * self.queries + key * keys  # bytes of a row of query, key and value
        self.after = (self.number * value_width + self.lse) * self.queries  # of out and lse
        # Key heads that a rank shares with others are repeated for each query head.
        repeated = np.where(self.queries == sizes.heads // sizes.key_heads * keys, keys, self.queries)
        self.swapped = self.number * (width + value_width) * self.queries + key * repeated
        self.shard = self.number * sizes.heads * (width + value_width) + key * sizes.key_heads + self.lse * sizes.heads
        part, step = np.arange(parts)[None], np.arange(parts)[:, None]
        self.source, self.user = (part - step) % parts, (part + step) % parts  # of keys in a step
        operations = 2.0 * (width + value_width) * sizes.batch * self.queries
        self.operations = shares.pairs[part, self.source][..., None] * operations
        self.arriving = shares.needs[part, self.source][..., None] * key * repeated
        self.leaving = shares.needs[self.user, part][..., None] * key * repeated
        self.used = self.arriving.sum(0)  # with a rank's own keys, which do not travel
        # Bytes read and written: out is scaled and added to, and so are gradients of query and of the keys of others.
        seeing = shares.seeing[part, self.source][..., None] * sizes.batch * max(sizes.dtype.itemsize, 4) * self.queries
        self.summed = [5 * seeing * value_width, 3 * (seeing * width + self.leaving)]
        self.summed[0][0] = self.summed[1][0] = 0.0  # the first sums are of the own keys
        if name == "gathered":
            self.summed = [np.zeros_like(seeing), np.zeros_like(seeing)]
            self.summed[0][0], self.summed[1][0] = 2 * self.used, 3 * self.leaving[1:].sum(0)
        self.arriving[0] = self.leaving[0] = 0.0

    def cost(self, speed: RankSpeed) -> LayoutCost:
        sums, back_sums = (x / speed.memory for x in self.summed)
        compute = self.operations / speed.rate + sums, self.operations * BACKWARD / speed.backward_rate + back_sums
        turns = self._gathered if self.name == "gathered" else self._ring
        (forward, links), (backward, back_links) = (turns(x, speed, bool(back)) for back, x in enumerate(compute))
        in_time, out_time = self._swap_time(self.before, speed), self._swap_time(self.after, speed)
        compared = speed.latency * math.ceil(math.log2(self.grid[0] * self.grid[1]))  # the calls of all ranks
        shards, kept, in_flight = self._memory()
        arriving, returning = self.arriving.sum(0), self.leaving.sum(0)
        if self.name != "gathered":
            returning = returning + arriving
        work = Passes(*(x.sum(0).ravel() for x in compute))
        return LayoutCost(
            self.name,
            self.grid,
            shards.ravel(),
            kept.ravel(),
            in_flight.ravel(),
            received=Passes(
                (self._to_heads(self.before) + self._to_rows(self.after) + arriving).ravel(),
                (self._to_heads(self.after) + self._to_rows(self.before) + returning).ravel(),
            ),
            compute=work,
            links=Passes(*((in_time + out_time + x).ravel() for x in (links, back_links))),
            ends=Passes(
                (compared + in_time + forward.max(1, keepdims=True) + out_time).ravel(),
                (out_time + backward.max(1, keepdims=True) + in_time).ravel(),
            ),
            imbalance=float(work.both.max() / work.both.mean() - 1) if work.both.any() else 0.0,
        )

    # --- heads in place of rows, and back ---------------------------------------------------------------------------

    def _to_heads(self, row: Array) -> Array:
        """Bytes that a rank receives when the rows of its heads become whole; `row` are bytes of a row, (U,)."""
        return (self.rows - self.held) * row

    def _to_rows(self, row: Array) -> Array:
        """The same when the heads of its rows become whole. A rank sends as much in the other direction."""
        return self.held * (row.sum() - row)

    def _swap_time(self, row: Array, speed: RankSpeed) -> Array:
        bytes_moved = np.maximum(self._to_heads(row), self._to_rows(row)).max(1, keepdims=True)
        return speed.latency * (self.grid[0] - 1) + bytes_moved / speed.bandwidth + np.zeros_like(self.rows)

    # --- keys from part to part, and gradients back -----------------------------------------------------------------

    def _ring(self, compute: Array, speed: RankSpeed, back: bool) -> tuple[Array, Array]:
        """Seconds at which each rank ends, and in which its link is busy. The messages of the next step, and the
        gradients of the one before, travel while a step is computed."""
        nothing = np.zeros_like(self.rows)
        ends, busy, leaving, entering = nothing, nothing, nothing, nothing  # links are free from then on
        sent = [nothing, nothing]
        for step in range(len(compute) + back):
            work = compute[step] if step < len(compute) else nothing
            begin = np.maximum(ends, sent[-2])  # no more than the last two messages are held
            arrived, taken = begin, nothing
            for received, sender in self._messages(step, back):
                there, seconds = received > 0, speed.latency + received / speed.bandwidth
                first = np.maximum(np.maximum(begin, begin[sender]), np.maximum(leaving[sender], entering))
                entering = np.where(there, first + seconds, entering)
                leaving = leaving.copy()
                leaving[sender] = np.where(there, entering, leaving[sender])
                arrived, taken = np.maximum(arrived, entering), taken + there * seconds
            sent.append(leaving)
            ends = np.maximum(begin + work, arrived) + (1 - speed.overlap) * np.minimum(work, taken)
            busy = busy + taken
        return ends, busy

    def _messages(self, step: int, back: bool) -> Iterator[tuple[Array, Array]]:
        """Bytes that arrive during a step, and from which part."""
        if step + 1 < len(self.arriving):
            yield self.arriving[step + 1], self.source[step + 1]
        if back and step > 1:
            yield self.leaving[step - 1], self.user[step - 1]

    def _gathered(self, compute: Array, speed: RankSpeed, back: bool) -> tuple[Array, Array]:
        """As `_ring`, with all keys before the computation, or all gradients after it."""
        work = compute.sum(0)
        received, sent, sender = self.arriving, self.leaving, self.source
        if back:
            received, sent, sender = self.leaving, self.arriving, self.user
        start = work if back else np.zeros_like(work)
        # A message is complete when its sender, too, has sent everything.
        longest, first = received.sum(0), start
        for step in range(1, len(compute)):
            there = received[step] > 0
            longest = np.maximum(longest, np.where(there, sent.sum(0)[sender[step]], 0.0))
            first = np.maximum(first, np.where(there, start[sender[step]], 0.0))
        taken = speed.latency * (received > 0).sum(0) + longest / speed.bandwidth
        return (first if back else work) + taken, taken

    def _memory(self) -> tuple[Array, Array, Array]:
        """Bytes of the shards, of what the backward pass keeps besides, and of messages at a time."""
        kept = 8.0 * self.sizes.batch * self.rows * self.queries  # the lse of rows, in float64 or two floats
        in_flight = 2 * (_at_a_time(self.arriving) + _at_a_time(self.leaving))  # keys, and gradients of as many
        if self.grid[0] > 1:
            kept = kept + self.rows * self.swapped
            in_flight = np.maximum(in_flight, self._to_heads(self.before) + self._to_rows(self.before))
        if self.name == "gathered":
            kept, in_flight = kept + self.used, self.arriving.sum(0) + self.leaving.sum(0)
        return self.held * self.shard, kept, in_flight


def _at_a_time(messages: Array) -> Array:
    """The most bytes of two consecutive steps."""
    return np.max(messages + np.append(messages[1:], messages[:1], 0), 0)
