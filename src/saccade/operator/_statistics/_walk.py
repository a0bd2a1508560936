"""Tiles of a call in plain PyTorch: any dtype and device, every mask and bias, linear memory.

Shape legend: B items, Hq / Hkv query and key-value heads, r x c a tile of rows by keys, G named groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _tiles
from .._biases import Placement, Span
from .._call import CheckedCall
from .._scores._score import ModifiedScores
from .._tiles import NEGATIVE, TileProblem, logits_of, look, shown
from ._request import StatisticsRequest
from ._rows import RowStatistics


class WeightTile(NamedTuple):
    """One tile: its logits, -inf for hidden pairs, and the visible pairs (None if all are visible)."""

    keys: Span
    logits: Tensor  # (B, Hq, r, c)
    seen: Tensor | None  # (B|1, H|1, r, c)


@dataclass(frozen=True)
class TileWalk:
    """Some batch items of a call."""

    problem: TileProblem
    query: Tensor
    key: Tensor
    parameter: Tensor | None  # of the bias
    sink: Tensor | None  # (Hq,)
    standing: Placement
    first: Tensor  # (B|1,)
    names: tuple[str, ...]  # of the groups
    members: Tensor | None  # (B|1, Lk, G) in the accumulator's dtype
    top: int

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    def zeros(self, *shape: int) -> Tensor:
        return self.query.new_zeros(self.query.shape[0], self.heads, *shape, dtype=self.problem.dtype)

    def pieces(self, rows: Span, key_spans: list[Span]) -> Iterator[WeightTile]:
        problem = self.problem
        q, bad_q = problem.block(self.query, rows)
        for _, keys, kind in problem.tiles(rows, key_spans):
            k, bad_k = problem.block(self.key, keys)
            scores = problem.bias_tiles(self.parameter, rows, keys, kind)
            sight = look(problem, rows, keys, kind, scores, (bad_q, bad_k, None), self.heads)
            logits, _ = logits_of(problem, sight, q, k, scores)
            seen = sight.visible
            allowed = shown(problem, scores, logits)
            if allowed is not None and (problem.guarded or isinstance(problem.bias, ModifiedScores)):
                # Guarded, as every problem is whose bias holds -inf.
                seen = allowed if seen is None else seen & allowed
            yield WeightTile(keys, logits, seen)

    def weights(self, rows: RowStatistics) -> Iterator[tuple[WeightTile, Tensor]]:
        """Every tile with its weights (B, Hq, r, c), 0 where nothing is seen, once the rows are known."""
        items = slice(*self.problem.batch)
        pivots = torch.zeros_like(rows.rest)[items] if rows.pivot is None else rows.pivot[items]
        rests = torch.where(rows.rest == NEGATIVE, 0.0, rows.rest)[items]
        key_spans = self.problem.key_spans()
        for span in self.problem.row_spans():
            pivot, rest = (x[:, :, span.start : span.stop, None] for x in (pivots, rests))
            for piece in self.pieces(span, key_spans):
                weights = torch.exp((piece.logits - pivot) - rest)
                yield piece, weights if piece.seen is None else torch.where(piece.seen, weights, 0.0)


def walks(call: CheckedCall, asked: StatisticsRequest, standing: Placement, first: Tensor) -> list[TileWalk]:
    """The call in groups of items, so that memory does not grow with the batch."""
    tile = call.heads * min(_tiles.ROWS, max(1, call.length_q)) * min(_tiles.KEYS, max(1, call.length_k))
    size = max(1, _tiles.GROUP // tile)
    parameter = None if call.bias is None else call.bias.parameter
    members = None if asked.members is None else asked.members.transpose(1, 2).to(call.accumulator)
    whole = TileWalk(
        TileProblem.of(call),
        call.query,
        call.key,
        parameter,
        call.sink,
        standing,
        first,
        asked.groups,
        members,
        asked.top,
    )
    return [_items(whole, start, min(start + size, call.batch)) for start in range(0, max(1, call.batch), size)]


def _items(walk: TileWalk, start: int, stop: int) -> TileWalk:
    def cut(tensor: Tensor) -> Tensor:
        return tensor if tensor.shape[0] == 1 else tensor[start:stop]

    shared = walk.parameter is None or walk.parameter.dim() <= 2  # slopes, a table
    return replace(
        walk,
        problem=walk.problem.group(start, stop),
        query=walk.query[start:stop],
        key=walk.key[start:stop],
        parameter=walk.parameter if walk.parameter is None or shared else cut(walk.parameter),
        standing=walk.standing if isinstance(walk.standing, int) else cut(walk.standing),
        first=cut(walk.first),
        members=None if walk.members is None else cut(walk.members),
    )
