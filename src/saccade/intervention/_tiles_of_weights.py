"""Weights in tiles of whole rows, for functions of them: memory grows with the length, not with its square.

A tile is made in place, in memory that is used again for the next: fresh memory of that size costs as much as filling
it. Keys that a mask shows to no row of the tile are not multiplied.

Shape legend: B batch, Hq / Hkv query and key-value heads, n chosen heads, L / Lk lengths, r rows of a tile, D / Dv
widths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._biases import Span
from .._call import AttentionCall, CheckedCall
from .._checks import make_call
from .._tiles import TileProblem
from .._weights import attention_weights
from ._edit import Part
from ._edits import FORWARD_ONLY, applied

_TILE_BYTES = 2**23


def output_of_functions(part: Part) -> Tensor:
    """(B, Hq, Lq, Dv): the heads of a part whose weights a function makes; zeros elsewhere."""
    call = part.call
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (call.query, call.key, call.value)):
        raise ValueError(FORWARD_ONLY)
    heads = call.query.shape[1]
    chosen = part.share[:, :, :, 0].any(2).any(0).expand(heads).nonzero()[:, 0]
    value = call.value[:, chosen // (heads // call.key.shape[1])].float()
    out = call.query.new_zeros(*call.query.shape[:3], value.shape[3])
    for rows, seen, weights in _tiles(call, chosen):
        for edit in part.functions:
            inside = edit.share[:, chosen]
            whole = bool(inside.all())
            changed = applied(edit.function, weights if whole else weights.clone(), rows.index)
            weights = changed if whole else torch.where(inside, changed, weights)
        read = seen if not (_any(weights[..., : seen.start]) or _any(weights[..., seen.stop :])) else slice(None)
        out[:, chosen, rows.start : rows.stop] = (weights[..., read] @ value[:, :, read]).to(out.dtype)
    return out


def _any(tensor: Tensor) -> bool:
    # extremes are found ten times as fast as `any`
    return bool(tensor.numel()) and bool((tensor.amax() != 0) | (tensor.amin() != 0))


def _tiles(call: AttentionCall, heads: Tensor) -> Iterator[tuple[Span, slice, Tensor]]:
    """Rows, the keys that may have weights, and the weights (B, n, r, Lk), which may be written into."""
    checked = make_call(call.query, call.key, call.value, **call.scoring(), dropout=0.0)
    problem = replace(TileProblem.of(checked), heads=tuple(heads.tolist()))
    batch, _, length, _ = call.query.shape
    keys = call.key.shape[2]
    rows = max(1, _TILE_BYTES // max(1, batch * len(heads) * keys * 4))
    if problem.guarded or problem.dtype != torch.float32:
        for start in range(0, length, rows):
            span = _span(start, min(start + rows, length), call)
            weights = attention_weights(call.query, call.key, rows=span.index, heads=heads, **call.scoring())
            yield span, slice(0, keys), weights
        return
    made = _TileMaker.of(problem, checked, heads, rows)
    for start in range(0, length, rows):
        yield made.tile(_span(start, min(start + rows, length), call))


def _span(start: int, stop: int, call: AttentionCall) -> Span:
    return Span(start, stop, torch.arange(start, stop, device=call.query.device))


@dataclass(frozen=True, eq=False)
class _TileMaker:
    """Tiles of one call, each in the memory of the one before. float32."""

    problem: TileProblem
    query: Tensor  # (B, n, Lq, D), scaled
    key: Tensor  # (B, n, D, Lk)
    parameter: Tensor | None
    sink: Tensor | None  # (n, 1, 1)
    memory: Tensor  # (2, B n r Lk)

    @classmethod
    def of(cls, problem: TileProblem, call: CheckedCall, heads: Tensor, rows: int) -> _TileMaker:
        group = call.heads // call.kv_heads
        parameter = None if call.bias is None else call.bias.part(call.bias.parameter, None, None, heads).float()
        return cls(
            problem,
            call.query[:, heads].float() * call.scale,
            call.key[:, heads // group].float().transpose(-1, -2),
            parameter,
            None if call.sink is None else call.sink[heads].float().view(-1, 1, 1),
            call.query.new_empty(2, call.batch * len(heads) * rows * call.length_k, dtype=torch.float32),
        )

    def tile(self, rows: Span) -> tuple[Span, slice, Tensor]:
        problem, (batch, heads, _, keys) = self.problem, (*self.query.shape[:3], self.key.shape[3])
        whole = _part(self.memory[0], batch, heads, len(rows), keys)
        blocks = [(block, kind) for _, block, kind in problem.tiles(rows, problem.key_spans())]
        if not blocks:
            return rows, slice(0, 0), whole.zero_()
        seen = slice(blocks[0][0].start, blocks[-1][0].stop)
        shown = Span(seen.start, seen.stop, torch.arange(seen.start, seen.stop, device=whole.device))
        weights = whole if len(shown) == keys else _part(self.memory[1], batch, heads, len(rows), len(shown))
        torch.matmul(self.query[:, :, rows.start : rows.stop], self.key[..., seen], out=weights)
        if problem.softcap is not None:
            weights.div_(problem.softcap).tanh_().mul_(problem.softcap)
        bias = problem.bias_tile(self.parameter, rows, shown)
        if bias is not None:
            weights += bias
        kind = "full" if len(blocks) == 1 and blocks[0][1] == "full" else "partial"
        self._normalise(weights, problem.visible(rows, shown, kind), bias is not None)
        if weights is not whole:
            whole[..., : seen.start] = 0.0
            whole[..., seen] = weights
            whole[..., seen.stop :] = 0.0
        return rows, seen, whole

    def _normalise(self, weights: Tensor, visible: Tensor | None, biased: bool) -> None:
        """Softmax in place; rows that see nothing are 0."""
        if visible is not None:  # ten times as fast as to fill by a mask that is broadcast
            weights += torch.zeros(visible.shape, device=weights.device).masked_fill_(~visible, float("-inf"))
        top = None if self.sink is None else weights.amax(-1, keepdim=True)
        torch.softmax(weights, -1, out=weights)  # four times as fast as its own steps
        if biased or (visible is not None and not bool(visible.any(-1).all())):
            weights.nan_to_num_(0.0)
        if top is not None and self.sink is not None:
            total = 1 / weights.amax(-1, keepdim=True)  # of exp(logit - top): the largest weight is 1 / total
            weights.mul_(torch.where(top == float("-inf"), 0.0, total / (total + torch.exp(self.sink - top))))


def _part(memory: Tensor, *shape: int) -> Tensor:
    return memory[: math.prod(shape)].view(shape)
