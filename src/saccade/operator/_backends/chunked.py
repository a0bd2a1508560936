"""Attention over tiles in plain PyTorch: linear memory forward, backward, forward-mode and double backward, any device.

    s_ij = softcap(scale q_i.k_j) + bias_ij     lse_i = log sum_j exp s_ij      p_ij = exp(s_ij - lse_i)
    out_i = sum_j p_ij v_j                      ds_ij = p_ij (do_i.v_j - delta_i),  delta_i = do_i.out_i - dlse_i

The forward is the online softmax (Milakov & Gimelshein 2018; Dao et al. 2022, FlashAttention, algorithm 1). The
derivatives recompute p from lse tile by tile and stand in `_derivatives.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._biases import Span
from .._call import CheckedCall, add_sink, without_autocast
from .._costs import Costs, output_bytes, share_of_tiles, wide_bytes
from .._masks._data import traced
from .._tiles import (
    GROUP,
    KEYS,
    NEGATIVE,
    PARAMETER,
    ROWS,
    TileProblem,
    by_group,
    logits_of,
    look,
    poison,
    seen_bad,
    weigh,
)
from . import _derivatives

Pair = tuple[Tensor, Tensor]


def refuses(call: CheckedCall) -> str | None:
    """None: this backend takes every call of the contract."""
    return None


def costs(call: CheckedCall) -> Costs:
    """Sums of all rows, and the tiles of one group of items that are held at once."""
    rows, wide = call.batch * call.heads * call.length_q, wide_bytes(call)
    tile = min(GROUP, call.batch * call.heads * min(ROWS, call.length_q) * min(KEYS, call.length_k))
    sums = rows * (call.value.shape[3] + 2) * wide + 6 * tile * wide
    out = output_bytes(call) if call.query.element_size() != wide else 0
    return Costs(share_of_tiles(call, ROWS, KEYS), sums + out)


def run(call: CheckedCall) -> Pair:
    """out (B, Hq, Lq, Dv) in the input dtype, lse (B, Hq, Lq) in the accumulator's."""
    out, lse = attend(
        TileProblem.of(call), call.query, call.key, call.value, call.bias.parameter if call.bias else None
    )
    out, lse = add_sink(out, lse, call.sink)
    return out.to(call.query.dtype), lse


def attend(problem: TileProblem, query: Tensor, key: Tensor, value: Tensor, parameter: Tensor | None) -> Pair:
    """out and lse in the accumulator's dtype, without the sink. They can be differentiated any number of times."""
    if traced():
        raise ValueError(
            "torch.jit.trace cannot record this call: it takes chunked, whose derivatives are its own. "
            "Use torch.compile or torch.export; backend='reference' can be recorded, and is dense"
        )
    with without_autocast(query.device):
        return _ChunkedAttention.apply(problem, query, key, value, parameter)


class _ChunkedAttention(torch.autograd.Function):
    """(query, key, value, parameter) -> (out, lse), with recomputing derivatives of every kind."""

    generate_vmap_rule = True

    @staticmethod
    def forward(problem: TileProblem, query: Tensor, key: Tensor, value: Tensor, parameter: Tensor | None) -> Pair:
        return by_group(_forward, problem, query, key, value, parameter)  # type: ignore[return-value]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
        ctx.problem = inputs[0]
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.save_for_forward(*inputs[1:], *output)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        problem = replace(ctx.problem, pulls_bias=ctx.needs_input_grad[1 + PARAMETER])
        query, key, value, parameter, out, lse = ctx.saved_tensors
        grads = _derivatives.backward(problem, query, key, value, parameter, out, lse, d_out, d_lse)
        return None, *grads

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Pair:
        *primals, out, lse = ctx.saved_tensors
        given = _derivatives.zeros_for(primals, tangents)
        problem = ctx.problem.guard_if(*given)
        return by_group(_derivatives.tangent, problem, *primals, *given, out, lse)  # type: ignore[return-value]


def _forward(problem: TileProblem, query: Tensor, key: Tensor, value: Tensor, parameter: Tensor | None) -> Pair:
    key_spans = problem.key_spans()
    shape = (query.shape[0], query.shape[1], 0)
    outs = [query.new_zeros(*shape, value.shape[3], dtype=problem.dtype)]
    lses = [query.new_zeros(shape, dtype=problem.dtype)]
    for rows in problem.row_spans():
        out, lse = _forward_rows(problem, query, key, value, parameter, rows, key_spans)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _forward_rows(
    problem: TileProblem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameter: Tensor | None,
    rows: Span,
    key_spans: list[Span],
) -> Pair:
    q, bad_q = problem.block(query, rows)
    top = q.new_full(q.shape[:3], NEGATIVE)
    total = torch.zeros_like(top)
    summed = q.new_zeros(*q.shape[:3], value.shape[3])
    for _, keys, kind in problem.tiles(rows, key_spans):
        (k, bad_k), (v, bad_v) = problem.block(key, keys), problem.block(value, keys)
        scores = problem.bias_tiles(parameter, rows, keys, kind)
        sight = look(problem, rows, keys, kind, scores, (bad_q, bad_k, bad_v), q.shape[1])
        logits, _ = logits_of(problem, sight, q, k, scores)
        higher = torch.maximum(top, logits.amax(-1))
        pivot = torch.where(higher == NEGATIVE, 0.0, higher)  # -inf - -inf is NaN
        weights, carry = torch.exp(logits - pivot[..., None]), torch.exp(top - pivot)
        total = total * carry + weights.sum(-1)
        kept = weights if sight.factor is None else weights * sight.factor
        summed = summed * carry[..., None] + weigh(kept, v)
        summed = poison(summed, seen_bad(sight, q.shape[1], problem.dtype))
        top = higher
    empty = total == 0
    out = torch.where(empty[..., None], 0.0, summed / torch.where(empty, 1.0, total)[..., None])
    return out, torch.where(empty, NEGATIVE, top + torch.log(torch.where(empty, 1.0, total)))
