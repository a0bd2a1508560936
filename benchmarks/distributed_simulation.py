"""Ranks that share a sequence, simulated event by event: an independent check of what `saccade.distributed` predicts.

Keys are counted in the rows themselves, and pairs in tiles of 64 x 64, not in blocks. Each rank is a program that posts
messages, computes and waits. A message goes over the link of its sender and that of its receiver, which carry one
message at a time in each direction: the first of those that find both free. It occupies them for latency +
bytes / bandwidth seconds.

Every row i sees the keys first[i] to i: causal attention, windows and packed documents are of this kind.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.distributed._blocks import BlockTable
from saccade.distributed._costs import CallSizes, RankSpeed
from saccade.distributed._dealing import dealt

Key = tuple[Any, ...]
TILE = 64


@dataclass
class Exact:
    """Pairs in tiles with visible ones, and the keys that rows see, of each rank (row) with each rank's keys (column),
    both (R, R)."""

    pairs: np.ndarray
    needs: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, table: BlockTable, first: np.ndarray, ranks: int, everything: bool = False) -> Exact:
        """Counts of the rows as they are dealt; whole blocks travel, or `everything` that another rank holds."""
        length, size = table.length, table.size
        owner = np.repeat(dealt(table, ranks), size)[:length]
        rows = np.bincount(owner, minlength=ranks)
        pairs, needs = np.zeros((ranks, ranks)), np.zeros((ranks, ranks))
        starts = np.arange(0, length, size)
        tiles = np.arange(0, length, TILE)
        left = np.repeat(np.minimum.reduceat(first, tiles) // TILE * TILE, TILE)[:length]
        right = np.minimum((np.arange(length) // TILE + 1) * TILE, length)
        for rank in range(ranks):
            mine = np.flatnonzero(owner == rank)
            pairs[rank] = np.bincount(owner, _rows_of_keys(left[mine], right[mine], length), ranks)
            seen = np.add.reduceat(_rows_of_keys(first[mine], mine + 1, length), starts) > 0
            needs[rank] = np.bincount(owner[starts[seen]], table.rows[seen], ranks)
        return cls(pairs, np.tile(rows, (ranks, 1)) if everything else needs, rows)


def _rows_of_keys(starts: np.ndarray, stops: np.ndarray, length: int) -> np.ndarray:
    """How many of the intervals have each key, (L,)."""
    edges = np.bincount(starts, minlength=length + 1) - np.bincount(stops, minlength=length + 1)
    return np.cumsum(edges)[:length]


def simulated(exact: Exact, layout: str, sizes: CallSizes, speed: RankSpeed) -> tuple[float, float]:
    """Seconds of a forward and of a backward pass under "ring" or "gathered", which begin together on all ranks."""
    ranks = len(exact.rows)
    row = sum(sizes.widths) * sizes.key_heads * sizes.batch * sizes.dtype.itemsize
    work = exact.pairs * 2 * sum(sizes.widths) * sizes.heads * sizes.batch
    compared = speed.latency * int(np.ceil(np.log2(ranks)))
    program = _gathered if layout == "gathered" else _ring
    forward = _run(lambda rank: program(rank, exact.needs * row, work / speed.rate, False), ranks, speed)
    backward = _run(lambda rank: program(rank, exact.needs * row, 2.5 * work / speed.backward_rate, True), ranks, speed)
    return compared + forward, backward


def _ring(rank: int, needs: np.ndarray, work: np.ndarray, back: bool) -> Iterator[Any]:
    ranks = len(needs)
    returned: list[Key] = []
    sent: list[list[Key]] = [[], []]
    for step in range(ranks):
        source, here = (rank - step) % ranks, []
        yield "wait", sent[-2]  # copies of no more than two steps are held
        if step + 1 < ranks:
            to, following = (rank + step + 1) % ranks, (rank - step - 1) % ranks
            yield "post", (rank, to, "keys"), needs[to, rank]
            yield "post", (following, rank, "keys"), needs[rank, following]
            here = [(following, rank, "keys")] if needs[rank, following] else []
            sent.append([(rank, to, "keys")] if needs[to, rank] else [])
        yield "compute", work[rank, source]
        yield "wait", returned
        returned = []
        if back and step:
            user = (rank + step) % ranks
            yield "post", (rank, source, "gradients"), needs[rank, source]
            yield "post", (user, rank, "gradients"), needs[user, rank]
            returned = [(user, rank, "gradients")] if needs[user, rank] else []
        yield "wait", here
    yield "wait", returned


def _gathered(rank: int, needs: np.ndarray, work: np.ndarray, back: bool) -> Iterator[Any]:
    others = [(rank + step) % len(needs) for step in range(1, len(needs))]
    if back:
        yield "compute", work[rank].sum()
        needs = needs.T
    for other in others:
        yield "post", (rank, other, back), needs[other, rank]
    for other in reversed(others):
        yield "post", (other, rank, back), needs[rank, other]
    yield "wait", [(other, rank, back) for other in others if needs[rank, other]]
    if not back:
        yield "compute", work[rank].sum()


class _Links:
    """Messages that both ends have posted, and the links that are free."""

    def __init__(self, ranks: int) -> None:
        self.leaving, self.entering = [True] * ranks, [True] * ranks
        self.of_sender: list[dict[Key, float]] = [{} for _ in range(ranks)]
        self.of_receiver: list[dict[Key, float]] = [{} for _ in range(ranks)]

    def add(self, key: Key, size: float) -> Iterator[tuple[Key, float]]:
        self.of_sender[key[0]][key] = self.of_receiver[key[1]][key] = size
        yield from self._begun({key: size})

    def end(self, key: Key) -> Iterator[tuple[Key, float]]:
        """The messages that begin when this one ends."""
        self.leaving[key[0]] = self.entering[key[1]] = True
        yield from self._begun(self.of_sender[key[0]])
        yield from self._begun(self.of_receiver[key[1]])

    def _begun(self, waiting: dict[Key, float]) -> Iterator[tuple[Key, float]]:
        begun = next((key for key in waiting if self.leaving[key[0]] and self.entering[key[1]]), None)
        if begun is not None:
            self.leaving[begun[0]] = self.entering[begun[1]] = False
            self.of_receiver[begun[1]].pop(begun)
            yield begun, self.of_sender[begun[0]].pop(begun)


def _run(program: Callable[[int], Iterator[Any]], ranks: int, speed: RankSpeed) -> float:
    """Run the program of every rank; the time at which the last one ends."""
    programs, links = [program(rank) for rank in range(ranks)], _Links(ranks)
    posted: set[Key] = set()
    arrived: set[Key] = set()
    waiting: dict[Key, list[int]] = {}
    missing = [0] * ranks
    events: list[tuple[float, int, int, Key | None]] = [(0.0, rank, rank, None) for rank in range(ranks)]
    count, now = ranks, 0.0

    def begin(messages: Iterator[tuple[Key, float]]) -> None:
        nonlocal count
        for key, size in messages:
            count += 1
            heapq.heappush(events, (now + speed.latency + size / speed.bandwidth, count, key[1], key))

    def go_on(rank: int) -> None:
        """Run one rank until it computes or waits."""
        nonlocal count
        for action, *details in programs[rank]:
            if action == "post":
                key, size = details
                if not size:
                    continue
                if key in posted:  # by the other one of its two ranks
                    begin(links.add(key, size))
                posted.add(key)
            elif action == "compute":
                count += 1
                heapq.heappush(events, (now + details[0], count, rank, None))
                return
            else:
                awaited = [key for key in details[0] if key not in arrived]
                for key in awaited:
                    waiting.setdefault(key, []).append(rank)
                missing[rank] = len(awaited)
                if awaited:
                    return

    while events:
        now, _, rank, message = heapq.heappop(events)
        if message is None:
            go_on(rank)
            continue
        arrived.add(message)
        begin(links.end(message))
        for rank in waiting.pop(message, []):
            missing[rank] -= 1
            if not missing[rank]:
                go_on(rank)
    return now
