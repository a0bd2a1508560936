"""Exact attention weights of chosen rows, keys and heads, without forming more than that slice.

Shape legend: B batch, Hq query heads, Lq / Lk lengths, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from ._backends.chunked import attend
from ._biases import Bias, Span
from ._call import CheckedCall, share_of_keys, sink_lse, without_autocast
from ._checks import make_call
from ._masks import Mask
from ._masks._data import whole
from ._tiles import TileProblem, by_group, logits_of, look
from ._unknown_arguments import named, refused

_COARSE = 2.0**11  # an lse beyond it is known to 2^-13 at best in float32

Chosen = int | slice | range | Sequence[int] | Tensor | None


@named
def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    rows: Chosen = None,
    keys: Chosen = None,
    heads: Chosen = None,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """The exact attention weights p_ij = exp(s_ij - lse_i) of chosen rows, keys and heads.

    Each lse_i runs over all keys, in linear memory. `query`, `key`, `mask`, `bias`, `scale`, `softcap` and `sink` are
    as in `attention`.

    Args:
        rows: which query rows, in the order given: an int, a slice, a range, ints (negative ones count from the end),
            an integer or boolean tensor; None is all.
        keys: which keys, the same.
        heads: which query heads, the same.

    Returns:
        (B, heads, rows, keys), float32 (float64 for float64), differentiable. Over all keys a row sums to 1 (less the
        sink's share); a row that sees no key sums to 0.

    Raises:
        IndexError: an index out of range.
        TypeError: as in `attention`.
        ValueError: as in `attention`.

    Example:
        >>> import torch, saccade
        >>> query = key = torch.zeros(1, 2, 4, 16)
        >>> saccade.attention_weights(query, key, saccade.Causal(), rows=[1, 3], heads=0)
        tensor([[[[0.5000, 0.5000, 0.0000, 0.0000],
                  [0.2500, 0.2500, 0.2500, 0.2500]]]])
    """
    if unknown:
        raise refused(attention_weights, unknown)
    fits = isinstance(key, Tensor) and key.dim() == 4 and key.layout is torch.strided and not key.is_nested
    value = key.new_zeros(()).expand(*key.shape[:3], 1) if fits else key
    call = make_call(
        query, key, value, mask, bias=bias, scale=scale, softcap=softcap, sink=sink, dropout=0.0, needs_lse=True
    )
    chosen_rows = _indices(rows, call.length_q, "rows")
    chosen_keys = _indices(keys, call.length_k, "keys")
    chosen_heads = _indices(heads, call.heads, "heads")
    return _slice(call, chosen_rows, chosen_keys, chosen_heads)


def _slice(call: CheckedCall, rows: list[int] | None, keys: list[int] | None, heads: list[int] | None) -> Tensor:
    problem = replace(
        TileProblem.of(call),
        rows=None if rows is None else tuple(rows),
        heads=None if heads is None else tuple(heads),
    )
    at_rows, at_keys, at_heads = (_tensor(x, call.device) for x in (rows, keys, heads))
    query, key, value, sink = call.query, call.key, call.value, call.sink
    if at_heads is not None:
        of_key = at_heads // (call.heads // call.kv_heads)
        query, key, value = query[:, at_heads], key[:, of_key], value[:, of_key]
        sink = None if sink is None else sink[at_heads]
    query = query if at_rows is None else query[:, :, at_rows]
    bias = call.bias
    parameter = None if bias is None else bias._part(bias.parameter, at_rows, None, at_heads)
    _, lse = attend(problem, query, key, value, parameter)
    rest = _rest(problem, query, key, parameter, lse)
    # The sink's part of the denominator is a factor of its own: beside it, what rounding took from the lse is nothing.
    share = None if sink is None else share_of_keys(lse, sink_lse(lse, sink))
    key = key if at_keys is None else key[:, :, at_keys]
    if bias is not None and parameter is not None:
        parameter = bias._part(parameter, None, at_keys, None)
    with without_autocast(call.device):
        weights = _weights(problem, query, key, parameter, lse, rest, at_keys)
    return weights if share is None else weights * share[..., None]


def _finite(lse: Tensor) -> Tensor:
    """The lse, with 0 in rows that see no key and have no weights, so that no -inf - -inf is formed."""
    return torch.where(lse == float("-inf"), 0.0, lse)


def _rest(problem: TileProblem, query: Tensor, key: Tensor, parameter: Tensor | None, lse: Tensor) -> Tensor | None:
    """(B, Hq, r): the rounding error of a large lse; None if it is negligible.

    Beside logits of -1e9 in a whole row (what some write for a mask) the log of n keys is lost, and n weights of 1/n
    would become n weights of 1. It is found again as log sum_j exp(s_ij - lse_i), constant under derivatives.
    """
    can_look = problem.device.type == "cpu" and not torch._C._are_functorch_transforms_active()
    if can_look and not torch.compiler.is_compiling() and not bool((_finite(lse.detach()).abs() > _COARSE).any()):
        return None
    with torch.no_grad(), without_autocast(query.device):
        given = [None if x is None else x.detach() for x in (query, key, key, parameter, lse)]
        (total,) = by_group(_totals, problem, *given)
    return torch.where(total > 0, torch.log(torch.where(total > 0, total, 1.0)), 0.0)


def _totals(problem: TileProblem, *given: Tensor | None) -> tuple[Tensor]:
    """(B, Hq, r): sum_j exp(s_ij - lse_i) over all keys; by rounding it is not quite 1."""
    query, key, _, parameter, lse = given
    assert query is not None and key is not None and lse is not None
    key_spans, totals = problem.key_spans(), [lse.new_zeros(*lse.shape[:2], 0)]
    for rows in problem.row_spans():
        q, bad_q = problem.block(query, rows)
        total, pivot = lse.new_zeros(*lse.shape[:2], len(rows)), _finite(lse)[:, :, rows.start : rows.stop]
        for _, keys, kind in problem.tiles(rows, key_spans):
            k, bad_k = problem.block(key, keys)
            scores = problem.bias_tiles(parameter, rows, keys)
            sight = look(problem, rows, keys, kind, scores, (bad_q, bad_k, None), q.shape[1])
            logits, _ = logits_of(problem, sight, q, k, scores)
            total = total + sight.only(torch.exp(logits - pivot[..., None])).sum(-1)
        totals.append(total)
    return (torch.cat(totals, 2),)


def _weights(
    problem: TileProblem,
    query: Tensor,
    key: Tensor,
    parameter: Tensor | None,
    lse: Tensor,
    rest: Tensor | None,
    at_keys: Tensor | None,
) -> Tensor:
    count, length = query.shape[2], key.shape[2]
    row_ids = torch.arange(count, device=query.device) if problem.rows is None else _tensor(problem.rows, query.device)
    key_ids = torch.arange(length, device=query.device) if at_keys is None else at_keys
    assert row_ids is not None
    rows = Span(0, count, row_ids, unbroken=problem.rows is None)
    keys = Span(0, length, key_ids, unbroken=at_keys is None)
    (q, bad_q), (k, bad_k) = problem.block(query, rows), problem.block(key, keys)
    scores = problem.bias_tiles(parameter, rows, keys)
    sight = look(problem, rows, keys, "partial", scores, (bad_q, bad_k, None), query.shape[1])
    logits, _ = logits_of(problem, sight, q, k, scores)
    shifted = logits - _finite(lse)[..., None]
    return sight.only(torch.exp(shifted if rest is None else shifted - rest[..., None]))


def _tensor(indices: Sequence[int] | None, device: torch.device) -> Tensor | None:
    return None if indices is None else torch.tensor(list(indices), dtype=torch.int64, device=device)


def _indices(chosen: Chosen, size: int, name: str) -> list[int] | None:
    """The chosen indices as ints in [0, size); None for all."""
    if chosen is None or (isinstance(chosen, slice) and chosen == slice(None)):
        return None
    if isinstance(chosen, slice):
        return list(range(size))[chosen]
    if isinstance(chosen, Tensor):
        chosen = _from_tensor(chosen, size, name)
    given = [chosen] if hasattr(chosen, "__index__") else list(chosen)
    indices = [whole(index, name) for index in given]
    for index in indices:
        if not -size <= index < size:
            raise IndexError(f"{name} must lie in [-{size}, {size}), got {index}")
    return [index % size for index in indices]


def _from_tensor(chosen: Tensor, size: int, name: str) -> list[int]:
    if chosen.dim() > 1 or chosen.is_floating_point():
        raise TypeError(f"{name} must be a 1-D integer or boolean tensor, got {chosen.dtype} {tuple(chosen.shape)}")
    if chosen.dtype == torch.bool:
        if chosen.shape != (size,):
            raise ValueError(f"{name} as booleans must have shape ({size},), got {tuple(chosen.shape)}")
        chosen = chosen.nonzero()[:, 0]
    return [int(index) for index in chosen.reshape(-1).tolist()]
