"""Scores that were followed, as attention computations: which unit is which head of which batch item.

Shape legend: B batch, H heads, Lq / Lk lengths, D / Dv head widths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor

from ..findings._finding import Location
from ..subject._inputs import NamedInputs
from ._scores import ScoreProduct
from ._shadow import UNKNOWN, TensorShadow

Axis = Literal["key", "query", "head", "batch", "none", "unknown"]


@dataclass(frozen=True, eq=False)
class TracedAttention:
    """One attention computation. Keys and values are expanded to the query heads."""

    query: Tensor  # (B, H, Lq, D), as they entered the product, scaled or not
    key: Tensor  # (B, H, Lk, D)
    value: Tensor | None  # (B, H, Lk, Dv), None where nobody saw it
    logits: Tensor | None  # (B, H, Lq, Lk) that entered the softmax, masked ones as they were; None: not seen
    weights: Tensor  # (B, H, Lq, Lk) that multiplied the values
    normalised: Axis  # the axis that the softmax ran over
    source: Literal["by hand", "F.scaled_dot_product_attention", "probed"]
    softened: Tensor | None = None  # (B, H, Lq, Lk) as they came out of softmax(), None where none was called
    zeroed: Tensor | None = None  # (B, H, Lq, Lk) scores that were multiplied by 0, None where none was
    scaled: float = 1.0  # what queries and keys had been multiplied by before the product
    learned: bool = False  # whether queries, keys or logits were multiplied by a parameter
    mixed: bool = False  # whether a map made the logits of the scores of several heads
    joined: bool = False  # whether the softmax of each query ran over one number more, which is no score: a sink
    in_pieces: bool = False  # whether the rows are parts of rows: chunks that overlap, as in Longformer
    # "scores" "scale" "mask" "softmax" "dropout" "values" and more
    lines: Mapping[str, Location] = field(default_factory=dict)

    def line(self, *kinds: str) -> Location | None:
        """The source line of the first of these kinds that is known."""
        return next((self.lines[kind] for kind in kinds if kind in self.lines), None)


class TokenOwners:
    """A number for each input token, with its item, head, position and input; -1: no token."""

    def __init__(self, inputs: NamedInputs):
        self._shadows: list[tuple[Tensor, TensorShadow]] = []
        item, head, position, length = [], [], [], []
        side: list[Tensor] = []
        count = 0
        for tensor in {id(tensor): tensor for tensor in inputs.tensors.values()}.values():
            shape = tensor.shape if inputs.vocabulary else tensor.shape[:-1]
            numbers = torch.arange(count, count + shape.numel()).reshape(shape)
            count += shape.numel()
            self._shadows.append(
                (tensor, TensorShadow(numbers if inputs.vocabulary else numbers.unsqueeze(-1).expand(tensor.shape)))
            )
            own = torch.meshgrid(*(torch.arange(size) for size in shape), indexing="ij")
            item.append(own[0].reshape(-1))
            head.append((own[1] if len(shape) == 3 else torch.zeros_like(own[0])).reshape(-1))
            position.append(own[-1].reshape(-1))
            length.append(torch.full((shape.numel(),), shape[-1]))
            side.append(torch.full((shape.numel(),), len(side)))
        self.item, self.head, self.position, self.length, self.side = (
            torch.cat([*numbers, torch.tensor([UNKNOWN])]) for numbers in (item, head, position, length, side)
        )

    def __iter__(self) -> Iterator[tuple[Tensor, TensorShadow]]:
        return iter(self._shadows)


_MATRICES = ("weights", "logits", "softened", "zeroed")  # (rows, columns) of a unit; the others have rows of their own


@dataclass(frozen=True, eq=False)
class _WeightUnit:
    """One matrix of weights: a head of a batch item, or some of its rows."""

    item: int
    head: int
    rows: Tensor  # (rows,) positions of the queries, -1 unknown
    columns: Tensor
    lengths: tuple[int, int]  # of the sequences that queries and keys are of
    tensors: dict[str, Tensor]  # "query", "key", "weights", and those of the other matrices and "value" that were seen
    tiled: bool = False  # whether its rows came in parts, each with some of the keys

    @property
    def weights(self) -> Tensor:
        return self.tensors["weights"]

    @cached_property
    def places(self) -> Tensor | None:
        """(rows, columns) the numbers of its pairs in the whole matrix, None if positions are not known."""
        for known in (self.rows, self.columns):
            if bool((known == UNKNOWN).any()) or len(known.unique()) != len(known):
                return None
        return self.rows[:, None] * self.lengths[1] + self.columns


def attentions(products: Sequence[ScoreProduct], tokens: TokenOwners, batch: int) -> tuple[TracedAttention, ...]:
    """The attention computations among score products; the computations of one loop are joined."""
    groups: dict[object, list[ScoreProduct]] = {}
    softened = [scores for scores in products if scores.weights is not None or scores.softened is not None]
    softened = [scores for scores in softened if not _features(scores) and not _within_tokens(scores)]
    used = [scores for scores in softened if scores.weights is not None]
    for scores in used or softened:  # what meets no values is no attention where something else does
        groups.setdefault(_place(scores, tokens), []).append(scores)
    made = [_together(group, tokens, batch) for group in groups.values()]
    return tuple(attention for attention in made if attention is not None)


def _features(scores: ScoreProduct) -> bool:
    """Whether these are random features, as in Performer (arXiv 2009.14794): exp of a product with a fixed matrix,
    whose rows belong to no token. A softmax over learned queries or keys is a call of softmax instead."""
    sides = (scores.left_tokens, scores.right_tokens)
    return scores.softened is None and any(bool((side == UNKNOWN).all()) for side in sides)


def _within_tokens(scores: ScoreProduct) -> bool:
    """Whether the summed entries belong to one token, without a softmax: streams that are mixed, as in Gemma 3n, or
    heads that together choose keys, as in DeepSeek 3.2's index."""
    side = scores.left_tokens if scores.keys == "left" else scores.right_tokens
    known = side.shape[1] > 1 and bool((side[:, 0] != UNKNOWN).any())
    return scores.logits is None and known and bool((side == side[:, :1]).all())


def _place(scores: ScoreProduct, tokens: TokenOwners) -> object:
    """The key by which computations of one loop are joined."""
    lines = tuple(scores.lines.get(name) for name in ("scores", "softmax", "values"))
    if lines[0] is None:
        return id(scores)
    sides = (tokens.side[scores.left_tokens[0, 0]].item(), tokens.side[scores.right_tokens[0, 0]].item())
    return lines, scores.depth, sides, scores.left.shape[-1], scores.source, scores.keys, scores.logits is None


def _together(group: Sequence[ScoreProduct], tokens: TokenOwners, batch: int) -> TracedAttention | None:
    units = [unit for scores in group for unit in _units(scores, tokens, batch)]
    heads = [_heads([unit for unit in units if unit.item == item]) for item in range(batch)]
    shapes = {tuple(head.weights.shape) for own in heads for head in own}
    if len({len(own) for own in heads}) != 1 or len(shapes) != 1:
        return None
    first = group[0]
    stacked: dict[str, Any] = {name: _stacked(name, heads) for name in ("query", "key", "value", *_MATRICES)}
    attention = TracedAttention(
        **stacked,
        normalised="unknown",
        source=first.source,
        scaled=first.scaled,
        learned=first.learned,
        mixed=first.mixed,
        joined=all(scores.joined for scores in group),
        in_pieces=any(_overlap([unit for unit in units if unit.item == item]) for item in range(batch)),
        lines=dict(first.lines),
    )
    if any(head.tiled for own in heads for head in own):
        return attention
    return replace(attention, normalised=_axis(first, attention))


def _overlap(units: Sequence[_WeightUnit]) -> bool:
    """Whether two units share some of their queries but not all, or a unit has a query twice. Heads have the same
    queries, and blocks have disjoint queries."""
    known = [[at for at in unit.rows.tolist() if at != UNKNOWN] for unit in units]
    rows = {frozenset(own) for own in known}
    repeated = len(rows) > 1 and any(len(set(own)) < len(own) for own in known)
    return repeated or any(block & other for block, other in combinations(rows, 2))


def _units(scores: ScoreProduct, tokens: TokenOwners, batch: int) -> Iterator[_WeightUnit]:
    turned = scores.keys == "left"
    sides = {"query": scores.left, "key": scores.right, "value": scores.values}
    names = (scores.left_tokens, scores.right_tokens)
    if turned:
        sides["query"], sides["key"], names = scores.right, scores.left, names[::-1]
    matrices = {name: getattr(scores, name) for name in _MATRICES}
    if matrices["weights"] is None:
        matrices["weights"] = scores.softened
    items = _items(tokens, names, batch)
    for unit in range(scores.shape[0]):
        rows, columns = (name[unit] for name in names)
        own = {name: tensor[unit] for name, tensor in sides.items() if tensor is not None}
        own |= {
            name: matrix[unit].mT if turned else matrix[unit] for name, matrix in matrices.items() if matrix is not None
        }
        lengths = (int(tokens.length[rows].max()), int(tokens.length[columns].max()))
        head = _common(tokens.head[rows])
        yield _WeightUnit(int(items[unit]), head, tokens.position[rows], tokens.position[columns], lengths, own)


def _items(tokens: TokenOwners, names: tuple[Tensor, Tensor], batch: int) -> Tensor:
    """(U,) the batch item of each unit: its queries', else its keys', else by its place."""
    units = names[0].shape[0]
    sides = [tokens.item[name] for name in names]
    for side in sides:
        same = (side == side[:, :1]).all(-1) & (side[:, 0] != UNKNOWN)
        if same.all():
            return side[:, 0]
    return torch.arange(units).div(max(1, units // batch), rounding_mode="floor")


def _common(numbers: Tensor) -> int:
    return int(numbers[0]) if (numbers == numbers[0]).all() else UNKNOWN


def _heads(units: Sequence[_WeightUnit]) -> list[_WeightUnit]:
    """The heads of one batch item. Units that have some of the pairs each are put together."""
    groups: list[list[_WeightUnit]] = []
    for unit in units:
        own = next((group for group in groups if _continues(group, unit)), None)
        if own is None:
            groups.append([unit])
        else:
            own.append(unit)
    whole = [_whole(group) if len(group) > 1 else _in_order(group[0]) for group in groups]
    known = [unit.head for unit in whole]
    if len(set(known)) == len(known) and UNKNOWN not in known:
        whole.sort(key=lambda unit: unit.head)
    return whole


def _continues(group: Sequence[_WeightUnit], unit: _WeightUnit) -> bool:
    """Whether a unit has pairs of the same head that the group lacks."""
    if group[0].head != unit.head or unit.weights.numel() >= math.prod(unit.lengths):
        return False
    places = [part.places for part in (*group, unit)]
    known = [place.reshape(-1) for place in places if place is not None]
    return len(known) == len(places) and not bool(torch.isin(known[-1], torch.cat(known[:-1])).any())


def _whole(group: Sequence[_WeightUnit]) -> _WeightUnit:
    """One unit from units that are parts of one matrix. For tiles, whose softmax continues from tile to tile, the
    weights are computed from the logits."""
    first, (rows, columns) = group[0], group[0].lengths
    places = [unit.places for unit in group]
    made: dict[str, Tensor] = {}
    for name in ("query", "key", "value", "weights", "logits"):
        if any(name not in unit.tensors for unit in group):
            continue
        shape = (rows if name == "query" else columns, first.tensors[name].shape[-1])
        made[name] = first.tensors[name].new_zeros(shape)
        if name in _MATRICES:
            made[name] = first.weights.new_full((rows * columns,), -math.inf if name == "logits" else 0.0)
        for unit, place in zip(group, places, strict=True):
            at = place if name in _MATRICES else unit.rows if name == "query" else unit.columns
            assert at is not None
            made[name][at] = unit.tensors[name].to(made[name].dtype)
    made |= {name: made[name].reshape(rows, columns) for name in _MATRICES if name in made}
    tiled = sum(len(unit.rows) for unit in group) > len(torch.cat([unit.rows for unit in group]).unique())
    if tiled and "logits" in made:
        made["weights"] = made["logits"].softmax(-1)
    return _WeightUnit(first.item, first.head, torch.arange(rows), torch.arange(columns), first.lengths, made, tiled)


def _in_order(unit: _WeightUnit) -> _WeightUnit:
    """Rows and columns by their positions, where these are known and differ."""
    rows, columns = _order(unit.rows), _order(unit.columns)
    made = {
        name: tensor[rows][:, columns] if name in _MATRICES else tensor[rows if name == "query" else columns]
        for name, tensor in unit.tensors.items()
    }
    return replace(unit, tensors=made)


def _order(positions: Tensor) -> Tensor:
    known = bool((positions != UNKNOWN).all()) and len(positions.unique()) == len(positions)
    return positions.argsort() if known else torch.arange(len(positions))


def _stacked(name: str, heads: Sequence[Sequence[_WeightUnit]]) -> Tensor | None:
    """The tensor of this name of all heads, (B, H, ., .); None if a head lacks it."""
    if any(name not in head.tensors for own in heads for head in own):
        return None
    return torch.stack([torch.stack([head.tensors[name] for head in own]) for own in heads])


def _axis(scores: ScoreProduct, traced: TracedAttention) -> Axis:
    """The axis of the weights that the softmax ran over: by its call, else the axis along which weights sum to one."""
    along = scores.normalised
    if along in ("left", "right"):
        return "key" if along == (scores.keys or "right") else "query"
    summing = summed_axis(traced.weights)
    if along is None:
        return "none" if scores.logits is None and summing == "unknown" else summing
    if along == "unit":
        return summing if summing in ("head", "batch") else "head" if traced.weights.shape[1] > 1 else "batch"
    return "key" if along == "none" and traced.weights.shape[-1] == 1 else "unknown"


def summed_axis(weights: Tensor) -> Axis:
    """The axis along which weights (B, H, Lq, Lk) sum to one, "unknown" if they do along none."""
    names: tuple[tuple[Axis, int], ...] = (("key", 3), ("query", 2), ("head", 1), ("batch", 0))
    for name, axis in names:
        sums = weights.double().sum(axis)
        if torch.allclose(sums, torch.ones_like(sums), rtol=0, atol=1e-3):
            return name
    return "unknown"
