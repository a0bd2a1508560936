"""The wiring of heads: the channels of query, key, value and merged output that belong to each, and their order.

Shape legend: L positions, C channels of all projections, N elements of a merged row, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...findings._finding import Location
from ...tracing._wiring import AttentionWiring, MergedRow

Order = Literal["head by head", "interleaved", "mixed"]
Block = tuple[Order, tuple[int, ...]]


@dataclass(frozen=True)
class HeadLayout:
    """The layout of heads. Each role has an order and, for each query head by its place in the query, the place of its
    block.

    "head by head": head h is channels h*D to (h+1)*D - 1; "interleaved": h, h + H, h + 2H, ...
    """

    count: int
    query: Order
    key: Order
    value: Order
    merged: Order
    reads_key: tuple[int, ...]  # for query head h, its kv head
    reads_value: tuple[int, ...]
    keys: int  # how many key heads there are, read or not
    values: int
    lands: tuple[int, ...]  # its place in the merged row
    shared: bool  # whether keys and values are the same channels


@dataclass(frozen=True)
class MisplacedRow:
    """A merged row that holds the attention of another position's query."""

    row: int
    query: int
    elements: tuple[int, ...]  # of the row


def strayed(row: MergedRow) -> MisplacedRow | None:
    """Elements of the row whose query is of another position, all of one such position."""
    counts = row.made_from.sum(1)  # (N, C)
    for element in range(len(counts)):
        single = counts[element] == 1
        if not single.any() or not (counts[element] > 1).any():
            continue
        positions = row.made_from[element][:, single].any(-1).nonzero().flatten().tolist()
        if len(positions) == 1 and positions[0] != row.position:
            return MisplacedRow(row.position, positions[0], _alike(row, element))
    return None


def _alike(row: MergedRow, element: int) -> tuple[int, ...]:
    same = (row.made_from == row.made_from[element]).flatten(1).float().mean(1) > 0.9
    return tuple(row.elements[same].tolist())


@dataclass(frozen=True)
class ScatteredFactor:
    """A factor of the scores or of the output whose rows are of other positions in one head than in another."""

    role: str
    index: tuple[int, ...]
    position: int  # that it comes from
    expected: int  # that the same place of the first head comes from
    axis: int  # that counts positions
    location: Location | None


def scattered(wiring: AttentionWiring, length: int) -> ScatteredFactor | None:
    """A query, key or value in which one index along the axis of positions holds different positions."""
    for place, factor in enumerate(wiring.flow.factors):
        axes = [axis for axis, size in enumerate(factor.tensor.shape) if size == length]
        others = [flow.factors[place].tensor for flow in wiring.changed if place < len(flow.factors)]
        if (
            len(axes) != 1
            or not others
            or len(others) < len(wiring.changed)
            or any(o.shape != factor.tensor.shape for o in others)
        ):
            continue
        moved = torch.stack([factor.tensor != other for other in others])
        if not (moved.sum(0) == 1).all():
            continue
        position = moved.int().argmax(0) % length
        rows = position.movedim(axes[0], 0).reshape(length, -1)
        if (rows != rows[:, :1]).any():
            first = _first_along(position, axes[0])
            index = tuple((position != first).nonzero()[0].tolist())
            places = int(position[index]), int(first[index])
            return ScatteredFactor(factor.role, index, *places, axes[0], factor.location)
    return None


def _first_along(position: Tensor, axis: int) -> Tensor:
    """For every element, the label of the element with the same index along `axis` and 0 elsewhere."""
    first = position.movedim(axis, 0).reshape(position.shape[axis], -1)[:, 0]
    shape = [1] * position.dim()
    shape[axis] = -1
    return first.view(shape).expand(position.shape)


def heads(wiring: AttentionWiring) -> HeadLayout | None:
    """The heads, if each has its own channels; None if they cannot be distinguished."""
    row = wiring.rows[-1]
    reached = row.made_from.any(1)  # (N, C)
    labels = row.made_from.any(0).sum(0)  # (C,) positions that a channel counts at
    query = (labels == 1) & row.made_from[:, row.position].any(0)
    query = _busiest(query, reached.sum(0))
    by_head: dict[frozenset[int], list[int]] = {}
    for element, own in enumerate(reached & query):
        by_head.setdefault(_channels(own), []).append(element)
    if not _apart(list(by_head), int(query.sum())):
        return None
    key, value = _keys_and_values(wiring, reached, labels > 1, list(by_head.values()))
    return _described(row, by_head, query, key, value)


def _channels(chosen: Tensor) -> frozenset[int]:
    return frozenset(chosen.nonzero().flatten().tolist())


def _keys_and_values(
    wiring: AttentionWiring, reached: Tensor, many: Tensor, elements: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Channels of keys and of values: a key counts for a whole head, a value for one element of it. Inputs are known by
    name."""
    share = torch.stack([reached[list(own)].float().mean(0) for own in elements])  # (H, C)
    whole = torch.tensor([len(own) > 1 for own in elements])
    key = many & (((share == 1) | (share == 0)) | ~whole[:, None]).all(0)
    value = many & ~key
    names = [wiring.projections[p].name if wiring.projections[p].place < 0 else "" for p, _ in wiring.channels]
    key = key | torch.tensor([name == "key" for name in names])
    value = (value | torch.tensor([name == "value" for name in names])) & ~torch.tensor([n == "key" for n in names])
    return key & ~value, value


def _busiest(chosen: Tensor, reaching: Tensor) -> Tensor:
    """The chosen channels that reach most elements, without channels such as gates that are computed with the query."""
    return chosen & (reaching == reaching[chosen].max()) if chosen.any() else chosen


def _apart(sets: Sequence[frozenset[int]], total: int) -> bool:
    """Whether sets have nothing in common, are of one size and are all there is."""
    return (
        bool(sets)
        and len({len(channels) for channels in sets}) == 1
        and sum(map(len, sets)) == total == len(frozenset().union(*sets))
    )


def _described(
    row: MergedRow, by_head: dict[frozenset[int], list[int]], query: Tensor, key: Tensor, value: Tensor
) -> HeadLayout | None:
    reached = row.made_from.any(1)  # (N, C)
    shared = not key.any()
    keys = value if shared else key
    queries = _blocks([*by_head], query)
    if queries is None:
        return None
    order = sorted(by_head, key=lambda own: queries[1][own])
    key_sets, value_sets = ([_channels(reached[by_head[own]].any(0) & role) for own in order] for role in (keys, value))
    key_blocks, value_blocks = _blocks(key_sets, keys), _blocks(value_sets, value)
    lands = [frozenset(row.elements[by_head[own]].tolist()) for own in order]
    complete = len(row.elements) == row.width
    merged = _blocks(lands, torch.ones(row.width, dtype=torch.bool)) if complete else None
    if key_blocks is None or value_blocks is None or (complete and merged is None):
        return None
    return HeadLayout(
        len(order),
        queries[0],
        key_blocks[0],
        value_blocks[0],
        merged[0] if merged else "head by head",
        tuple(key_blocks[1][channels] for channels in key_sets),
        tuple(value_blocks[1][channels] for channels in value_sets),
        int(keys.sum()) // len(key_sets[0]),
        int(value.sum()) // len(value_sets[0]),
        tuple(merged[1][own] for own in lands) if merged else tuple(range(len(order))),
        shared,
    )


def _blocks(sets: Sequence[frozenset[int]], role: Tensor) -> tuple[Order, dict[frozenset[int], int]] | None:
    """The layout of sets of channels (such as heads) among the channels of a role, and the place of each set; None if
    they have no common layout. Some channels may belong to no set."""
    distinct = list(dict.fromkeys(sets))
    size, total = len(distinct[0]), int(role.sum())
    if not _apart(distinct, sum(map(len, distinct))) or size == 0 or total % size:
        return None
    rank = {channel: at for at, channel in enumerate(role.nonzero().flatten().tolist())}
    ranked = {channels: sorted(rank[channel] for channel in channels) for channels in distinct}
    count = total // size
    if all(own == list(range(own[0], own[0] + size)) and own[0] % size == 0 for own in ranked.values()):
        return "head by head", {channels: own[0] // size for channels, own in ranked.items()}
    if all(own == list(range(own[0], total, count)) for own in ranked.values()):
        return "interleaved", {channels: own[0] for channels, own in ranked.items()}
    return "mixed", {channels: at for at, channels in enumerate(sorted(distinct, key=lambda key: ranked[key][0]))}
