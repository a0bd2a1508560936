"""Weights in tiles of whole rows, for functions of weights: memory grows with the length, not with its square.

Shape legend: B batch, Hq / Hkv query and key-value heads, n chosen heads, Lk keys, r rows of a tile, D / Dv widths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...operator._backends.native import _weight_tiles as native
from ...operator._biases import Span
from ...operator._call import AttentionCall
from ...operator._checks import make_call
from ...operator._scores._score import ModifiedScores
from ...operator._tiles import TileProblem
from ...operator._weights import attention_weights

_TILE_BYTES = 2**22
_ROWS = 48  # rows that the kernels take at once; products of fewer rows run at half the speed


def tiles_of_rows(call: AttentionCall, heads: list[int]) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of the query rows of each tile: as many as fit `_TILE_BYTES`, and `_ROWS` in 16 times that."""
    length, step = call.query.shape[2], _rows_of_tile(call, heads)
    return ((first, min(first + step, length)) for first in range(0, length, step))


def _rows_of_tile(call: AttentionCall, heads: list[int]) -> int:
    row = max(1, call.query.shape[0] * len(heads) * call.key.shape[2] * 4)
    if row * _ROWS <= _TILE_BYTES:
        return min(_TILE_BYTES // row, 512) // _ROWS * _ROWS
    return max(1, min(_ROWS, 16 * _TILE_BYTES // row))


class WeightTiles:
    """Weights of some heads of a call, a few rows at a time.

    Attributes:
        native: whether the compiled kernels compute them.
        differentiable: whether a gradient is needed, which they do not have.
    """

    def __init__(self, call: AttentionCall, heads: list[int]) -> None:
        checked = make_call(call.query, call.key, call.value, **call.scoring(), dropout=0.0)
        self._call, self._heads = call, heads
        self._problem = replace(TileProblem.of(checked), heads=tuple(heads))
        self.differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in checked.tensors())
        # The slowest way handles NaN and infinities exactly, and sums float64.
        added = not isinstance(checked.bias, ModifiedScores)
        self._plain = not self._problem.guarded and self._problem.dtype == torch.float32 and added
        self.native = self._plain and native.refuses(checked) is None
        if self.native:
            self._tiles = native.NativeTiles(checked, heads)
        elif self._plain:
            at = torch.tensor(heads, device=call.query.device)
            of_key = at // (checked.heads // checked.kv_heads)
            self._query = checked.query[:, at].float() * checked.scale  # (B, n, Lq, D)
            self._key = checked.key[:, of_key].float().transpose(-1, -2)  # (B, n, D, Lk)
            bias, sink = checked.bias, checked.sink
            self._parameter = None if bias is None else bias._part(bias.parameter, None, None, at).float()
            self._sink = None if sink is None else sink[at].float().view(-1, 1, 1)

    def rows(self, first: int, last: int) -> Tensor:
        """(B, n, r, Lk) weights of rows first to last - 1."""
        if self.native:
            return self._tiles.rows(first, last)
        rows = torch.arange(first, last, device=self._call.query.device)
        if not self._plain:
            return attention_weights(
                self._call.query, self._call.key, rows=rows, heads=self._heads, **self._call.scoring()
            )
        keys = Span(0, self._key.shape[3], torch.arange(self._key.shape[3], device=rows.device))
        return self._softmax(self._query[:, :, first:last] @ self._key, Span(first, last, rows), keys)

    def _softmax(self, logits: Tensor, rows: Span, keys: Span) -> Tensor:
        """Weights from products, in place; 0 in rows without visible keys."""
        problem = self._problem
        if problem.softcap is not None:
            logits.div_(problem.softcap).tanh_().mul_(problem.softcap)
        scores, visible = problem.bias_tiles(self._parameter, rows, keys), problem.visible(rows, keys, "partial")
        if scores:
            logits += scores[0]
        if visible is not None:
            logits.masked_fill_(~visible, float("-inf"))
        blind = None if not scores and visible is None else logits.amax(-1, keepdim=True) == float("-inf")
        if self._sink is not None:
            logits = torch.cat([logits, self._sink.expand(*logits.shape[:3], 1)], -1)
        weights = torch.softmax(logits, -1)[..., : len(keys)]
        return weights if blind is None else weights.masked_fill(blind, 0.0)


class TileValues:
    """Values (B, n, Lk, Dv) to multiply with tiles of weights. NaN and inf are read only by weights other than 0."""

    def __init__(self, value: Tensor, by_kernel: bool) -> None:
        self._width, self._bad = value.shape[3], None
        if not bool(value.sum(dtype=torch.promote_types(value.dtype, torch.float32)).isfinite()):
            self._bad = ~value.isfinite()
            value = value.masked_fill(self._bad, 0.0)
        self._by_kernel = by_kernel
        self._value = native.padded(value) if by_kernel else value

    def times(self, weights: Tensor) -> Tensor:
        """(B, n, r, Dv) from weights (B, n, r, Lk)."""
        if self._by_kernel and weights.dtype == torch.float32:
            out = native.times(weights, self._value)[..., : self._width]
        else:
            out = weights @ self._value[..., : self._width].to(weights.dtype)
        if self._bad is None:
            return out
        reached = (weights != 0).to(out.dtype) @ self._bad.to(out.dtype)
        return out.masked_fill(reached > 0, float("nan"))
