"""Weights in tiles of whole rows, for functions of them: memory grows with the length, not with its square.

A tile is made in place, in memory that is used again for the next: fresh memory of that size costs as much as filling
it. Keys that a mask shows to no row of the tile are not multiplied.

Shape legend: B batch, Hq / Hkv query and key-value heads, n chosen heads, Lk keys, r rows of a tile, D / Dv widths.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .._biases import Span
from .._call import AttentionCall
from .._checks import make_call
from .._tiles import TileProblem
from .._weights import attention_weights

_TILE_BYTES = 2**24


def rows_of_tile(call: AttentionCall, heads: list[int]) -> int:
    """As many as `_TILE_BYTES` hold, in steps of 64: products of few rows run at half the speed."""
    rows = _TILE_BYTES // max(1, call.query.shape[0] * len(heads) * call.key.shape[2] * 4)
    return max(64, min(512, rows // 64 * 64))


def weighed(weights: Tensor, value: Tensor, tiles: WeightTiles) -> Tensor:
    """(B, n, r, Dv) from weights (B, n, r, Lk) and values (B, n, Lk, Dv), which are read where weights are not 0."""
    value, seen = value.to(weights.dtype), tiles.seen
    if _any(weights[..., : seen.start]) or _any(weights[..., seen.stop :]):
        tiles.written_beyond()
        return weights @ value
    return weights[..., seen] @ value[:, :, seen]


def _any(tensor: Tensor) -> bool:
    # extremes are found ten times as fast as `any`
    return bool(tensor.numel()) and bool((tensor.amax() != 0) | (tensor.amin() != 0))


class WeightTiles:
    """Weights of some heads of a call, some rows at a time; a tile lies in the memory of the one before.

    Attributes:
        seen: the keys that may have weights in the last tile.
    """

    def __init__(self, call: AttentionCall, heads: list[int]) -> None:
        checked = make_call(call.query, call.key, call.value, **call.scoring(), dropout=0.0)
        self._call, self._heads = call, heads
        self._problem = replace(TileProblem.of(checked), heads=tuple(heads))
        self.seen = self._left = slice(0, checked.length_k)
        # Poison is put where it belongs, and float64 summed, by the slower way.
        self._plain = not self._problem.guarded and self._problem.dtype == torch.float32
        if not self._plain:
            return
        at = torch.tensor(heads, device=call.query.device)
        self._query = checked.query[:, at].float() * checked.scale  # (B, n, Lq, D)
        self._key = checked.key[:, at // (checked.heads // checked.kv_heads)].float().transpose(-1, -2)  # (B, n, D, Lk)
        bias, sink = checked.bias, checked.sink
        self._parameter = None if bias is None else bias.part(bias.parameter, None, None, at).float()
        self._sink = None if sink is None else sink[at].float().view(-1, 1, 1)
        size = checked.batch * len(heads) * rows_of_tile(call, heads) * checked.length_k
        self._memory = self._query.new_empty(2, size)
        self._rows = 0  # of the last tile, whose weights are 0 but for the keys `_left`

    def rows(self, rows: Tensor) -> Tensor:
        """(B, n, r, Lk) of rows that follow each other, to be written into; the next tile takes their memory."""
        if not self._plain:
            return attention_weights(
                self._call.query, self._call.key, rows=rows, heads=self._heads, **self._call.scoring()
            )
        batch, heads, _, keys = *self._query.shape[:3], self._key.shape[3]
        first, last = int(rows[0]), int(rows[-1]) + 1
        span = Span(first, last, rows)
        whole = _part(self._memory[0], batch, heads, len(rows), keys)
        blocks = [(block, kind) for _, block, kind in self._problem.tiles(span, self._problem.key_spans())]
        self.seen = seen = slice(blocks[0][0].start, blocks[-1][0].stop) if blocks else slice(0, 0)
        if not blocks:
            self._rows = 0
            return whole.zero_()
        shown = Span(seen.start, seen.stop, torch.arange(seen.start, seen.stop, device=rows.device))
        weights = whole if len(shown) == keys else _part(self._memory[1], batch, heads, len(rows), len(shown))
        torch.matmul(self._query[:, :, first:last], self._key[..., seen], out=weights)
        self._finish(weights, span, shown, [block for block, kind in blocks if kind != "full"])
        if weights is not whole:
            # What the tile before has left. Where a function wrote beyond its keys, or rows lie otherwise: everything.
            left = self._left if len(rows) == self._rows else slice(0, keys)
            whole[..., left.start : seen.start] = 0.0
            whole[..., seen.stop : left.stop] = 0.0
            whole[..., seen] = weights
        self._left, self._rows = seen, len(rows)
        return whole

    def written_beyond(self) -> None:
        """A function has written where no key is seen."""
        self._left = slice(0, self._call.key.shape[2])

    def _finish(self, weights: Tensor, rows: Span, keys: Span, partial: list[Span]) -> None:
        """Weights from products, in place; rows that see nothing are 0. Only `partial` blocks of keys need a mask."""
        problem = self._problem
        if problem.softcap is not None:
            weights.div_(problem.softcap).tanh_().mul_(problem.softcap)
        bias, some = problem.bias_tile(self._parameter, rows, keys), len(keys) > sum(map(len, partial))
        if bias is not None:
            weights += bias
        for block in partial:
            visible = problem.visible(rows, block, "partial")
            assert visible is not None
            # ten times as fast as to fill by a mask that is broadcast
            hidden = torch.zeros(visible.shape, device=weights.device).masked_fill_(~visible, float("-inf"))
            weights[..., block.start - keys.start : block.stop - keys.start] += hidden
        top = None if self._sink is None else weights.amax(-1, keepdim=True)
        torch.softmax(weights, -1, out=weights)  # four times as fast as its own steps
        if bias is not None or not some:  # else every row sees a block
            weights.nan_to_num_(0.0)
        if top is not None and self._sink is not None:
            total = 1 / weights.amax(-1, keepdim=True)  # of exp(logit - top): the largest weight is 1 / total
            weights.mul_(torch.where(top == float("-inf"), 0.0, total / (total + torch.exp(self._sink - top))))


def _part(memory: Tensor, *shape: int) -> Tensor:
    return memory[: math.prod(shape)].view(shape)
