"""The derivatives of tiled attention, each a sum over tiles with its weights recomputed.

Given lse and delta, the backward pass is a sum over tiles of one small function, `_pull`. So its own derivatives are
sums over tiles of the derivatives of `_pull`, and no order of differentiation ever holds Lq x Lk.

    p = exp(s - lse)   dv_j += p_ij do_i   ds_ij = p_ij (do_i.v_j - delta_i)   dq_i += scale ds_ij k_j   dk_j likewise
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from .._biases import Span
from ._tiles import (
    NEGATIVE,
    Operand,
    Problem,
    Sight,
    by_group,
    collect,
    logits_of,
    look,
    poison,
    products,
    seen_bad,
    weigh,
)

Tensors = tuple[Tensor, ...]


def backward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, parameter: Tensor | None, out: Tensor, lse: Tensor,
    d_out: Tensor, d_lse: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dq, dk, dv, dparameter | None) from the cotangents of out and lse. Empty rows' cotangents are never read."""
    empty = lse == NEGATIVE
    d_out = torch.where(empty[..., None], 0.0, d_out)
    delta = torch.where(empty, 0.0, (d_out * out).sum(-1) - torch.where(empty, 0.0, d_lse))
    if not problem.guarded and query.device.type == "cpu" and problem.mask is not None:
        problem = problem.guard_if(d_out)
    grads = _Backward.apply(problem, query, key, value, parameter, lse, delta, d_out)  # type: ignore[no-untyped-call]
    return (*grads, None) if parameter is None else grads


# --- the backward pass as a function of its own -------------------------------------------------------------------


class _Backward(torch.autograd.Function):
    """(q, k, v, parameter, lse, delta, do) -> (dq, dk, dv[, dparameter])."""

    generate_vmap_rule = True

    @staticmethod
    def forward(problem: Problem, *inputs: Tensor | None) -> Tensors:
        return by_group(_backward, problem, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.problem = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        grads = by_group(_double_backward, ctx.problem, *inputs, *cotangents)
        return (None, *grads) if inputs[3] is not None else (None, *grads[:3], None, *grads[3:])

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensors:
        inputs = ctx.saved_tensors
        given = [
            torch.zeros_like(x) if t is None and x is not None else t for x, t in zip(inputs, tangents, strict=True)
        ]
        return by_group(_backward_tangent, ctx.problem, *inputs, *given)


def _pull(problem: Problem, sight: Sight, bad_do: Tensor | None) -> Callable[..., Tensors]:
    """The tile's function (q, k, v, lse, delta, do[, parameter]) -> (dq_i, dk_j, dv_j, ds)."""

    def pull(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, d_out: Tensor, *rest: Tensor) -> Tensors:
        logits, tanh = logits_of(problem, sight, q, k, rest[0] if rest else None)
        p = sight.only(torch.exp(logits - torch.where(lse == NEGATIVE, 0.0, lse)[..., None]))
        dp = products(d_out, v)
        kept = p
        if sight.factor is not None:
            kept, dp = p * sight.factor, dp * sight.factor
        ds = p * (dp - delta[..., None])
        if sight.bad_v is not None and bad_do is not None:
            touched = bad_do.any(-1)[..., :, None] | _spread_any(sight.bad_v, q.shape[1])
            ds = sight.only(poison(ds, touched))
            kept = sight.only(poison(kept, bad_do.any(-1)[..., None]))
        dl = ds * problem.scale if tanh is None else ds * (problem.scale * (1 - tanh * tanh))
        return weigh(dl, k), collect(dl, q, k.shape[1]), collect(kept, d_out, k.shape[1]), ds

    return pull


def _spread_any(bad: Tensor, heads: int) -> Tensor:
    """(B, Hkv, c, n) to (B, Hq, 1, c): keys with any bad entry."""
    return bad.any(-1).repeat_interleave(heads // bad.shape[1], dim=1)[..., None, :]


Visit = Callable[[Callable[..., Tensors], Tensors, Span, Span, int, int], None]


def _visit(problem: Problem, inputs: tuple[Tensor | None, ...], visit: Visit) -> tuple[list[Span], list[Span]]:
    """Call `visit(pull, its arguments, rows, keys, row number, key number)` on every tile that has work."""
    query, key, value, parameter, lse, delta, d_out = inputs
    assert query is not None and key is not None and value is not None
    assert lse is not None and delta is not None and d_out is not None
    row_spans, key_spans = problem.row_spans(), problem.key_spans()
    rest = () if parameter is None else (parameter.to(problem.dtype),)
    for i, rows in enumerate(row_spans):
        (q, bad_q), (do, bad_do) = Operand(query, problem).block(rows), Operand(d_out, problem).block(rows)
        lse_i, delta_i = lse.narrow(2, rows.start, len(rows)), delta.narrow(2, rows.start, len(rows))
        for j, keys, kind in problem.tiles(rows, key_spans):
            (k, bad_k), (v, bad_v) = Operand(key, problem).block(keys), Operand(value, problem).block(keys)
            sight = look(problem, rows, keys, kind, rest[0] if rest else None, (bad_q, bad_k, bad_v), q.shape[1])
            visit(_pull(problem, sight, bad_do), (q, k, v, lse_i, delta_i, do, *rest), rows, keys, i, j)
    return row_spans, key_spans


class _Sums:
    """Sums of blocks by number, joined at the end; a block nobody added to is zero."""

    def __init__(self) -> None:
        self.blocks: dict[int, Tensor] = {}

    def add(self, number: int, block: Tensor) -> None:
        self.blocks[number] = self.blocks[number] + block if number in self.blocks else block

    def join(self, spans: list[Span], like: Tensor) -> Tensor:
        """Concatenated along axis 2 in `like`'s shape and dtype."""
        cells = [
            self.blocks[n].to(like.dtype) if n in self.blocks else torch.zeros_like(like.narrow(2, s.start, len(s)))
            for n, s in enumerate(spans)
        ]
        return torch.cat(cells, 2) if cells else torch.zeros_like(like)


def _backward(problem: Problem, *inputs: Tensor | None, map_tile: Any = None) -> Tensors:
    """The backward pass; `map_tile(pull, arguments, rows, keys)` may stand in for the plain call of a tile."""
    query, key, value, parameter = inputs[:4]
    assert query is not None and key is not None and value is not None
    dq, dk, dv = _Sums(), _Sums(), _Sums()
    parts: dict[tuple[int, int], Tensor] = {}

    def visit(pull: Any, given: Tensors, rows: Span, keys: Span, i: int, j: int) -> None:
        dq_i, dk_j, dv_j, ds = pull(*given) if map_tile is None else map_tile(pull, given, rows, keys)
        dq.add(i, dq_i)
        dk.add(j, dk_j)
        dv.add(j, dv_j)
        if parameter is not None:
            assert problem.bias is not None
            parts[i, j] = problem.bias.pull(ds, parameter, rows, keys, problem.placement)

    row_spans, key_spans = _visit(problem, inputs, visit)
    grads = dq.join(row_spans, query), dk.join(key_spans, key), dv.join(key_spans, value)
    if parameter is None:
        return grads
    assert problem.bias is not None
    table = [[parts.get((i, j)) for j in range(len(key_spans))] for i in range(len(row_spans))]
    widths = [len(s) for s in row_spans], [len(s) for s in key_spans]
    return *grads, problem.bias.gather(table, parameter, widths).to(parameter.dtype)


# --- its derivatives ----------------------------------------------------------------------------------------------


def _backward_tangent(problem: Problem, *given: Tensor | None) -> Tensors:
    """Forward mode over the backward pass.

    Each tile's directional derivative is taken as the transpose of its transpose: nested forward mode is refused by
    PyTorch inside a dual level, two reverse passes are not.
    """
    inputs, tangents = given[:7], given[7:]
    query, key, value, parameter, lse, delta, d_out = (cast(Tensor, t) for t in tangents)

    def map_tile(pull: Any, arguments: Tensors, rows: Span, keys: Span) -> Tensors:
        moved = [_rows_of(x, span).to(problem.dtype) for x, span in
                 ((query, rows), (key, keys), (value, keys), (lse, rows), (delta, rows), (d_out, rows))]  # fmt: skip
        if len(arguments) > 6:
            moved.append(parameter.to(problem.dtype))
        values, transpose, *_ = torch.func.vjp(pull, *arguments)
        _, again, *_ = torch.func.vjp(lambda *u: transpose(u), *(torch.zeros_like(x) for x in values))
        return again(tuple(moved))  # type: ignore[no-any-return]

    return _backward(problem, *inputs, map_tile=map_tile)


def _double_backward(problem: Problem, *given: Tensor | None) -> Tensors:
    """Cotangents of (q, k, v[, parameter], lse, delta, do) from those of (dq, dk, dv[, dparameter])."""
    inputs, cotangents = given[:7], given[7:]
    query, key, value, parameter, lse, delta, d_out = inputs
    sums = [_Sums() for _ in range(6)]
    totals: list[Tensor] = []

    def visit(pull: Any, arguments: Tensors, rows: Span, keys: Span, i: int, j: int) -> None:
        (_, _, _, ds), transpose, *_ = torch.func.vjp(pull, *arguments)
        up = [_rows_of(c, s).to(problem.dtype) for c, s in zip(cotangents[:3], (rows, keys, keys), strict=True)]
        # <c, pull(ds)> = <tile(c), ds>: the bias is linear in its parameter.
        if parameter is None:
            up.append(torch.zeros_like(ds))
        else:
            up.append(problem.bias_tile(cotangents[3], rows, keys).expand_as(ds))  # type: ignore[arg-type]
        back = transpose(tuple(up))
        for total, part, number in zip(sums, back, (i, j, j, i, i, i), strict=False):
            total.add(number, part)
        if len(back) > 6:
            totals[:] = [totals[0] + back[6]] if totals else [back[6]]

    row_spans, key_spans = _visit(problem, inputs, visit)
    spans = (row_spans, key_spans, key_spans, row_spans, row_spans, row_spans)
    likes = (query, key, value, lse, delta, d_out)
    grads = [total.join(span, cast(Tensor, like)) for total, span, like in zip(sums, spans, likes, strict=True)]
    if parameter is not None:
        grads.insert(3, totals[0].to(parameter.dtype) if totals else torch.zeros_like(parameter))
    return tuple(grads)


def _rows_of(tensor: Tensor | None, span: Span) -> Tensor:
    return cast(Tensor, tensor).narrow(2, span.start, len(span))


# --- forward mode over the forward pass ---------------------------------------------------------------------------


def tangent(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, parameter: Tensor | None, d_query: Tensor,
    d_key: Tensor, d_value: Tensor, d_parameter: Tensor | None, out: Tensor, lse: Tensor,
) -> Tensors:  # fmt: skip
    """lse' = sum p s',  out' = sum p (s' v + v') - lse' out."""
    key_spans = problem.key_spans()
    outs, lses = [torch.zeros_like(out.narrow(2, 0, 0))], [torch.zeros_like(lse.narrow(2, 0, 0))]
    for rows in problem.row_spans():
        q, bad_q = Operand(query, problem).block(rows)
        dq, _ = Operand(d_query, problem).block(rows)
        lse_i, out_i = _rows_of(lse, rows), _rows_of(out, rows)
        empty = lse_i == NEGATIVE
        t, u = torch.zeros_like(lse_i), torch.zeros_like(out_i)
        for _, keys, kind in problem.tiles(rows, key_spans):
            (k, bad_k), (v, bad_v) = Operand(key, problem).block(keys), Operand(value, problem).block(keys)
            (dk, _), (dv, _) = Operand(d_key, problem).block(keys), Operand(d_value, problem).block(keys)
            sight = look(problem, rows, keys, kind, parameter, (bad_q, bad_k, bad_v), q.shape[1])
            logits, tanh = logits_of(problem, sight, q, k, parameter)
            p = sight.only(torch.exp(logits - torch.where(empty, 0.0, lse_i)[..., None]))
            ds = (products(dq, k) + products(q, dk)) * problem.scale
            if tanh is not None:
                ds = ds * (1 - tanh * tanh)
            if d_parameter is not None:
                ds = ds + problem.bias_tile(d_parameter.to(problem.dtype), rows, keys)
            ds = sight.only(ds)
            t = t + (p * ds).sum(-1)
            kept = p if sight.factor is None else p * sight.factor
            u = u + weigh(kept * ds, v) + weigh(kept, dv)
            u = poison(u, seen_bad(sight, q.shape[1], problem.dtype))
        outs.append(torch.where(empty[..., None], 0.0, u - t[..., None] * out_i))
        lses.append(torch.where(empty, 0.0, t))
    return torch.cat(outs, 2), torch.cat(lses, 2)
