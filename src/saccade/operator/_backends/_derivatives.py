"""The derivatives of tiled attention, each a sum over tiles with its weights recomputed.

Given lse and delta, the backward pass is a sum over tiles of one small function, `_pull`. So its own derivatives are
sums over tiles of the derivatives of `_pull`: first and second derivatives, forward mode and any mix of two never hold
Lq x Lk. (From the third order on PyTorch records the tiles' own derivatives: right, but no longer in linear memory.)

    p = exp(s - lse)   dv_j += p_ij do_i   ds_ij = p_ij (do_i.v_j - delta_i)   dq_i += scale ds_ij k_j   dk_j likewise
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from .._biases import Span
from .._masks import keys_seen
from .._scores._score import Entries, ModifiedScores
from .._tiles import (
    NEGATIVE,
    PARAMETER,
    Tensors,
    TileProblem,
    TileVisibility,
    any_in,
    by_group,
    by_kv_head,
    collect,
    logits_of,
    look,
    poison,
    products,
    seen_bad,
    spread,
    weigh,
)


def backward(
    problem: TileProblem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameter: Tensor | None,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor,
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dparameter | None) from the cotangents of out and lse. Empty rows' cotangents are never read."""
    empty = lse == NEGATIVE
    d_out = torch.where(empty[..., None], 0.0, d_out)
    delta = torch.where(empty, 0.0, (d_out * out).sum(-1) - torch.where(empty, 0.0, d_lse))
    if parameter is None:
        problem = replace(problem, pulls_bias=False)
    # A non-finite entry of either cotangent makes delta non-finite too, and delta is the smallest to look at.
    problem = problem.guard_if(delta)
    grads = _Backward.apply(problem, query, key, value, parameter, lse, delta, d_out)
    return grads if problem.pulls_bias else (*grads, None)


def zeros_for(primals: Sequence[Tensor | None], tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tangents, with zeros where PyTorch leaves one out."""
    return [
        torch.zeros_like(primal) if tangent is None and primal is not None else tangent
        for primal, tangent in zip(primals, tangents, strict=True)
    ]


# --- the backward pass as a function of its own -------------------------------------------------------------------


class _Backward(torch.autograd.Function):
    """(q, k, v, parameter, lse, delta, do) -> (dq, dk, dv[, dparameter])."""

    generate_vmap_rule = True

    @staticmethod
    def forward(problem: TileProblem, *inputs: Tensor | None) -> Tensors:
        return by_group(_backward, problem, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.problem = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        d_query, d_key, d_value, *rest = cotangents
        d_query, d_key, d_value = _unread(ctx.problem, inputs[4], d_query, d_key, d_value)
        problem = ctx.problem.guard_if(d_query, d_key, d_value)
        # Without a gradient of the bias its cotangent is absent, but its place is kept.
        grads = by_group(_double_backward, problem, *inputs, d_query, d_key, d_value, *(rest or (None,)))
        return (None, *grads) if inputs[PARAMETER] is not None else (None, *grads[:PARAMETER], None, *grads[PARAMETER:])

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensors:
        inputs = ctx.saved_tensors
        given = zeros_for(inputs, tangents)
        return by_group(_backward_tangent, ctx.problem.guard_if(*given), *inputs, *given)


def _unread(problem: TileProblem, lse: Tensor, d_query: Tensor, d_key: Tensor, d_value: Tensor) -> Tensors:
    """The cotangents of dq, dk, dv, with 0 in empty rows and at keys that no row sees: those entries are never read."""
    if not problem.guard_if(d_query, d_key, d_value).guarded or problem.mask is None:
        return d_query, d_key, d_value
    d_query = torch.where((lse == NEGATIVE)[..., None], 0.0, d_query)
    seen = keys_seen(problem.mask, problem.length_q, problem.length_k, device=problem.device)
    if seen is None:
        return d_query, d_key, d_value
    seen = by_kv_head(seen, d_key.shape[1])
    return d_query, torch.where(seen[..., None], d_key, 0.0), torch.where(seen[..., None], d_value, 0.0)


def _pull(problem: TileProblem, sight: TileVisibility, bad_do: Tensor | None) -> Callable[..., Tensors]:
    """The tile's function (q, k, v, lse, delta, do, *scores) -> (dq_i, dk_j, dv_j, *dscores)."""

    def pull(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, d_out: Tensor, *scores: Tensor) -> Tensors:
        logits, derivative = logits_of(problem, sight, q, k, scores)
        p = sight.only(torch.exp(logits - torch.where(lse == NEGATIVE, 0.0, lse)[..., None]))
        dp, row = products(d_out, v), None
        if sight.bad_v is not None and bad_do is not None:
            row = any_in(bad_do)[..., :, None]
            hit = row | spread(any_in(sight.bad_v), q.shape[1])[..., None, :]
            # Added, not chosen: dp is linear in v and do, so its own derivatives are sound where it is not.
            dp = dp + torch.where(hit, float("nan"), 0.0)
        kept = p
        if sight.factor is not None:
            kept, dp = p * sight.factor, dp * sight.factor
        ds = p * (dp - delta[..., None])
        if row is not None:
            ds, kept = sight.only(ds), sight.only(poison(kept, row))
        dl, d_scores = derivative.pull(ds)
        dl = dl * problem.scale
        return weigh(dl, k), collect(dl, q, k.shape[1]), collect(kept, d_out, k.shape[1]), *d_scores

    return pull


# --- walking the tiles --------------------------------------------------------------------------------------------

Visit = Callable[[Callable[..., Tensors], Tensors, Span, Span, int, int], None]


def _visit(problem: TileProblem, inputs: tuple[Tensor | None, ...], visit: Visit) -> tuple[list[Span], list[Span]]:
    """Call `visit(pull, its arguments, rows, keys, row number, key number)` on every tile that has work."""
    query, key, value, parameter, lse, delta, d_out = inputs
    query, key, value = cast(Tensor, query), cast(Tensor, key), cast(Tensor, value)
    lse, delta, d_out = cast(Tensor, lse), cast(Tensor, delta), cast(Tensor, d_out)
    row_spans, key_spans = problem.row_spans(), problem.key_spans()
    for i, rows in enumerate(row_spans):
        (q, bad_q), (do, bad_do) = problem.block(query, rows), problem.block(d_out, rows)
        lse_i, delta_i = _cut(lse, rows), _cut(delta, rows)
        for j, keys, kind in problem.tiles(rows, key_spans):
            (k, bad_k), (v, bad_v) = problem.block(key, keys), problem.block(value, keys)
            scores = problem.bias_tiles(parameter, rows, keys, kind)
            sight = look(problem, rows, keys, kind, scores, (bad_q, bad_k, bad_v), q.shape[1])
            given = (q, k, v, lse_i, delta_i, do, *scores)
            visit(_pull(problem, sight, bad_do), given, rows, keys, i, j)
    return row_spans, key_spans


def _cut(tensor: Tensor | None, span: Span) -> Tensor:
    return cast(Tensor, tensor).narrow(2, span.start, len(span))


class _BlockSums:
    """Sums of blocks by number, joined at the end; a block without summands is zero."""

    def __init__(self) -> None:
        self.blocks: dict[int, Tensor] = {}

    def add(self, number: int, block: Tensor) -> None:
        self.blocks[number] = self.blocks[number] + block if number in self.blocks else block

    def join(self, spans: list[Span], like: Tensor | None) -> Tensor:
        """Concatenated along axis 2 in `like`'s shape and dtype."""
        like = cast(Tensor, like)
        cells = [
            self.blocks[n].to(like.dtype) if n in self.blocks else torch.zeros_like(_cut(like, s))
            for n, s in enumerate(spans)
        ]
        return torch.cat(cells, 2) if cells else torch.zeros_like(like)


class _BiasSums:
    """The parameter's gradient from cotangents of its tiles."""

    def __init__(self, problem: TileProblem, parameter: Tensor | None) -> None:
        self.problem, self.parameter = problem, parameter
        self.parts: dict[tuple[int, int], Tensor] = {}

    def add(self, i: int, j: int, cotangents: Tensors, rows: Span, keys: Span) -> None:
        bias = self.problem.bias
        if bias is not None and self.parameter is not None:
            self.parts[i, j] = bias._pull(cotangents[0], self.parameter, rows, keys, self.problem.placement)

    def join(self, row_spans: list[Span], key_spans: list[Span]) -> Tensor:
        assert self.problem.bias is not None and self.parameter is not None
        table = [[self.parts.get((i, j)) for j in range(len(key_spans))] for i in range(len(row_spans))]
        widths = [len(s) for s in row_spans], [len(s) for s in key_spans]
        return self.problem.bias._gather(table, self.parameter, widths).to(self.parameter.dtype)


class _LoadSums:
    """The same of a `Score`: the entries that a block of rows loads are added at once, in order."""

    def __init__(self, problem: TileProblem, parameter: Tensor) -> None:
        self.problem, self.parameter = problem, parameter
        self.total = torch.zeros_like(parameter, dtype=problem.dtype)
        self.block, self.entries = 0, Entries([], [], [])

    def add(self, i: int, j: int, cotangents: Tensors, rows: Span, keys: Span) -> None:
        bias = self.problem.bias
        assert isinstance(bias, ModifiedScores)
        if i != self.block:
            self._close(i)
        leaves, visible = self.problem.leaves(rows, keys), self.problem.visible(rows, keys, "partial")
        self.entries.extend(bias._pull_loads(cotangents, self.parameter, leaves, visible))

    def _close(self, block: int) -> None:
        self.total, self.block, self.entries = self.entries.added_to(self.total), block, Entries([], [], [])

    def join(self, row_spans: list[Span], key_spans: list[Span]) -> Tensor:
        self._close(0)
        return self.total.to(self.parameter.dtype)


def _bias_sums(problem: TileProblem, parameter: Tensor | None) -> _BiasSums | _LoadSums:
    if isinstance(problem.bias, ModifiedScores) and parameter is not None:
        return _LoadSums(problem, parameter)
    return _BiasSums(problem, parameter)


def _backward(problem: TileProblem, *inputs: Tensor | None, map_tile: Any = None) -> Tensors:
    """The backward pass; `map_tile(pull, arguments, rows, keys)` may stand in for the plain call of a tile."""
    query, key, value, parameter = inputs[:4]
    dq, dk, dv, db = _BlockSums(), _BlockSums(), _BlockSums(), _bias_sums(problem, parameter)

    def visit(pull: Any, given: Tensors, rows: Span, keys: Span, i: int, j: int) -> None:
        dq_i, dk_j, dv_j, *d_scores = pull(*given) if map_tile is None else map_tile(pull, given, rows, keys)
        dq.add(i, dq_i)
        dk.add(j, dk_j)
        dv.add(j, dv_j)
        if problem.pulls_bias:
            db.add(i, j, tuple(d_scores), rows, keys)

    row_spans, key_spans = _visit(problem, inputs, visit)
    grads = dq.join(row_spans, query), dk.join(key_spans, key), dv.join(key_spans, value)
    return (*grads, db.join(row_spans, key_spans)) if problem.pulls_bias else grads


# --- its derivatives ----------------------------------------------------------------------------------------------


def _backward_tangent(problem: TileProblem, *given: Tensor | None) -> Tensors:
    """Forward mode over the backward pass.

    Each tile's directional derivative is taken as the transpose of its transpose: nested forward mode is not
    supported by PyTorch inside a dual level, two reverse passes are not.
    """
    inputs, tangents = given[:7], given[7:]
    query, key, value, parameter, lse, delta, d_out = tangents

    def map_tile(pull: Any, arguments: Tensors, rows: Span, keys: Span) -> Tensors:
        places = ((query, rows), (key, keys), (value, keys), (lse, rows), (delta, rows), (d_out, rows))
        moved = [_cut(tensor, span).to(problem.dtype) for tensor, span in places]
        moved += problem.bias_tiles(parameter, rows, keys)
        values, transpose, *_ = torch.func.vjp(pull, *arguments)
        _, again, *_ = torch.func.vjp(lambda *u: transpose(u), *(torch.zeros_like(x) for x in values))
        return again(tuple(moved))

    return _backward(problem, *inputs, map_tile=map_tile)


def _double_backward(problem: TileProblem, *given: Tensor | None) -> Tensors:
    """Cotangents of (q, k, v[, parameter], lse, delta, do) from those of (dq, dk, dv[, dparameter])."""
    inputs, cotangents = given[:7], given[7:]
    query, key, value, parameter, lse, delta, d_out = inputs
    sums, db = [_BlockSums() for _ in range(6)], _bias_sums(problem, parameter)

    def visit(pull: Any, arguments: Tensors, rows: Span, keys: Span, i: int, j: int) -> None:
        (_, _, _, *d_scores), transpose, *_ = torch.func.vjp(pull, *arguments)
        up = [_cut(c, s).to(problem.dtype) for c, s in zip(cotangents[:3], (rows, keys, keys), strict=True)]
        # <c, pull(ds)> = <tile(c), ds>: the bias's tiles are linear in its parameter.
        shifts = problem.bias_tiles(cotangents[PARAMETER], rows, keys)
        up += [shift.expand_as(ds) for shift, ds in zip(shifts, d_scores, strict=False)]
        up += [torch.zeros_like(ds) for ds in d_scores[len(shifts) :]]
        back = transpose(tuple(up))
        for total, part, number in zip(sums, back, (i, j, j, i, i, i), strict=False):
            total.add(number, part)
        if len(back) > len(sums):
            db.add(i, j, back[len(sums) :], rows, keys)

    row_spans, key_spans = _visit(problem, inputs, visit)
    spans = (row_spans, key_spans, key_spans, row_spans, row_spans, row_spans)
    likes = (query, key, value, lse, delta, d_out)
    grads = [total.join(span, like) for total, span, like in zip(sums, spans, likes, strict=True)]
    if parameter is not None:
        grads.insert(PARAMETER, db.join(row_spans, key_spans))
    return tuple(grads)


# --- forward mode over the forward pass ---------------------------------------------------------------------------


def tangent(
    problem: TileProblem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameter: Tensor | None,
    d_query: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    d_parameter: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> Tensors:
    """lse' = sum p s',  out' = sum p (s' v + v') - lse' out."""
    key_spans = problem.key_spans()
    outs, lses = [torch.zeros_like(out.narrow(2, 0, 0))], [torch.zeros_like(lse.narrow(2, 0, 0))]
    for rows in problem.row_spans():
        (q, bad_q), (dq, bad_dq) = problem.block(query, rows), problem.block(d_query, rows)
        lse_i, out_i = _cut(lse, rows), _cut(out, rows)
        empty = lse_i == NEGATIVE
        t, u = torch.zeros_like(lse_i), torch.zeros_like(out_i)
        for _, keys, kind in problem.tiles(rows, key_spans):
            (k, bad_k), (v, bad_v) = problem.block(key, keys), problem.block(value, keys)
            (dk, bad_dk), (dv, bad_dv) = problem.block(d_key, keys), problem.block(d_value, keys)
            scores = problem.bias_tiles(parameter, rows, keys, kind)
            bad = _either(bad_q, bad_dq), _either(bad_k, bad_dk), _either(bad_v, bad_dv)
            sight = look(problem, rows, keys, kind, scores, bad, q.shape[1])
            logits, derivative = logits_of(problem, sight, q, k, scores)
            p = sight.only(torch.exp(logits - torch.where(empty, 0.0, lse_i)[..., None]))
            moved = (products(dq, k) + products(q, dk)) * problem.scale
            ds = sight.only(derivative.push(moved, problem.bias_tiles(d_parameter, rows, keys, kind)))
            t = t + (p * ds).sum(-1)
            kept = p if sight.factor is None else p * sight.factor
            u = u + weigh(kept * ds, v) + weigh(kept, dv)
            u = poison(u, seen_bad(sight, q.shape[1], problem.dtype))
        outs.append(torch.where(empty[..., None], 0.0, u - t[..., None] * out_i))
        lses.append(torch.where(empty, 0.0, t))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _either(tensor: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if tensor is None or other is None else tensor | other
