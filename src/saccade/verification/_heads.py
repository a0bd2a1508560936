"""Heads as they are wired: which channels of query, key, value and merged output belong to each, and in what order.

Shapes: L positions, C channels of all projections, N elements of a merged row, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ._wiring import Row, Wiring

Order = Literal["head by head", "interleaved", "mixed"]
Block = tuple[Order, tuple[int, ...]]


@dataclass(frozen=True)
class Heads:
    """How heads lie. Each role has an order and, for each query head by its place in the query, the place of its block.

    "head by head": head h is channels h*D to (h+1)*D - 1; "interleaved": h, h + H, h + 2H, ...
    """

    count: int
    keys: int  # how many different key heads there are
    values: int
    query: Order
    key: Order
    value: Order
    merged: Order
    reads_key: tuple[int, ...]  # for query head h, its kv head
    reads_value: tuple[int, ...]
    lands: tuple[int, ...]  # its place in the merged row
    shared: bool  # whether keys and values are the same channels


@dataclass(frozen=True)
class Strayed:
    """A merged row that holds the attention of another position's query."""

    row: int
    query: int
    elements: tuple[int, ...]  # of the row


@dataclass(frozen=True)
class Uneven:
    """A head whose keys are other channels at one position than at another."""

    row: int
    element: int
    few: int  # a position that gives few channels
    many: int  # one that gives more than a head has
    channels: tuple[int, int]  # how many


def strayed(row: Row) -> Strayed | None:
    """Elements of the row whose query is of another position, all of one such position."""
    counts = row.made_from.sum(1)  # (N, C)
    for element in range(len(counts)):
        single = counts[element] == 1
        if not single.any() or not (counts[element] > 1).any():
            continue
        positions = row.made_from[element][:, single].any(-1).nonzero().flatten().tolist()
        if len(positions) == 1 and positions[0] != row.position:
            return Strayed(row.position, positions[0], _alike(row, element))
    return None


def _alike(row: Row, element: int) -> tuple[int, ...]:
    same = (row.made_from == row.made_from[element]).flatten(1).float().mean(1) > 0.9
    return tuple(row.elements[same].tolist())


def uneven(row: Row) -> Uneven | None:
    """A head that takes more key and value channels from one position than it has, and fewer from another."""
    for element, made in zip(row.elements.tolist(), row.made_from, strict=True):
        counts = made.sum(0)
        own = int((counts == 1).sum())
        taken = made[:, counts > 1].sum(-1)
        seen = taken[taken > 0]
        if own and len(seen) > 1 and seen.max() > own + 1 and seen.min() < seen.max():
            few = int(taken.masked_fill(taken == 0, int(taken.max()) + 1).argmin())
            return Uneven(row.position, element, few, int(taken.argmax()), (int(seen.min()), int(seen.max())))
    return None


def heads(found: Wiring) -> Heads | None:
    """The heads, where each has channels of its own; None where they cannot be told apart."""
    row = found.rows[-1]
    counts = row.made_from.sum(1)  # (N, C) positions
    reaching = (counts > 0).sum(0)  # (C,) elements that a channel reaches
    from_many = (row.made_from.any(0)).sum(0) > 1  # (C,)
    query = _busiest((row.made_from.any(0).sum(0) == 1) & row.made_from[:, row.position].any(0), reaching)
    value = from_many & (reaching == _least(reaching, from_many))
    key = from_many & ~value
    sets = [frozenset(one.nonzero().flatten().tolist()) for one in (counts > 0) & query]
    by_head: dict[frozenset[int], list[int]] = {}
    for element, own in enumerate(sets):
        by_head.setdefault(own, []).append(element)
    if len(by_head) < 1 or not _apart(list(by_head), int(query.sum())):
        return None
    return _described(row, by_head, query, key, value)


def _busiest(chosen: Tensor, reaching: Tensor) -> Tensor:
    """Without channels that reach fewer elements than others: gates, which stand beside the query."""
    return chosen & (reaching == reaching[chosen].max()) if chosen.any() else chosen


def _least(reaching: Tensor, chosen: Tensor) -> int:
    return int(reaching[chosen].min()) if chosen.any() else 0


def _apart(sets: Sequence[frozenset[int]], total: int) -> bool:
    """Whether sets have nothing in common, are of one size and are all there is."""
    return len({len(one) for one in sets}) == 1 and sum(map(len, sets)) == total == len(frozenset().union(*sets))


def _described(
    row: Row, by_head: dict[frozenset[int], list[int]], query: Tensor, key: Tensor, value: Tensor
) -> Heads | None:
    counts = row.made_from.any(1)  # (N, C)
    shared = not key.any()
    keys = value if shared else key

    def reached(elements: list[int], role: Tensor) -> frozenset[int]:
        return frozenset((counts[elements].any(0) & role).nonzero().flatten().tolist())

    queries = _blocks([*by_head], query)
    if queries is None:
        return None
    order = sorted(by_head, key=lambda own: queries[1][own])
    key_sets, value_sets = ([reached(by_head[own], role) for own in order] for role in (keys, value))
    key_blocks, value_blocks = _blocks(key_sets, keys), _blocks(value_sets, value)
    lands = [frozenset(row.elements[by_head[own]].tolist()) for own in order]
    complete = len(row.elements) == row.width
    merged = _blocks(lands, torch.ones(row.width, dtype=torch.bool)) if complete else None
    if key_blocks is None or value_blocks is None or (complete and merged is None):
        return None
    places = tuple(merged[1][own] for own in lands) if merged else tuple(range(len(order)))
    return Heads(
        len(order), len(set(key_sets)), len(set(value_sets)), queries[0], key_blocks[0], value_blocks[0],
        merged[0] if merged else "head by head",
        tuple(key_blocks[1][one] for one in key_sets), tuple(value_blocks[1][one] for one in value_sets), places, shared,
    )  # fmt: skip


def _blocks(sets: Sequence[frozenset[int]], role: Tensor) -> tuple[Order, dict[frozenset[int], int]] | None:
    """The order in which sets of channels lie among the channels of a role, and the place of each."""
    distinct = list(dict.fromkeys(sets))
    if not distinct or not _apart(distinct, int(role.sum())):
        return None
    rank = {channel: at for at, channel in enumerate(role.nonzero().flatten().tolist())}
    ranked = {one: sorted(rank[channel] for channel in one) for one in distinct}
    places = {one: at for at, one in enumerate(sorted(distinct, key=lambda one: ranked[one][0]))}
    size, count = len(distinct[0]), len(distinct)
    if all(ranked[one] == list(range(places[one] * size, (places[one] + 1) * size)) for one in distinct):
        return "head by head", places
    if all(ranked[one] == list(range(places[one], count * size, count)) for one in distinct):
        return "interleaved", places
    return "mixed", places
