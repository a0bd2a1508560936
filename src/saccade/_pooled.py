"""Attention weights of one head pooled over bins of rows and keys: sums, largest, and how many pairs are visible.

    p_ij = exp(s_ij - lse_i)      sums[n, m] = sum, largest[n, m] = max of p_ij over the visible pairs of bin (n, m)

Nothing of Lq x Lk is stored. The native kernels compute it where they take the call, tiles of plain PyTorch elsewhere.

Shape legend: B items, Hq query heads, Lq / Lk lengths, n / m bins of rows and keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._backends.chunked import attend
from ._backends.native import _pooled as native
from ._biases import Span
from ._call import CheckedCall, sink_lse, without_autocast
from ._tiles import TileProblem, logits_of, look

_CELLS = 2**20  # scores that are formed at once in plain PyTorch


class Pooled(NamedTuple):
    """(n, m) float32 each (float64 for float64)."""

    sums: Tensor
    largest: Tensor  # -inf in bins without a visible pair
    counts: Tensor  # visible pairs

    @property
    def mean(self) -> Tensor:
        """The mean over the visible pairs of each bin; NaN where there is none."""
        return torch.where(self.counts > 0, self.sums / self.counts, float("nan"))

    @property
    def top(self) -> Tensor:
        """The largest of each bin; NaN where there is none."""
        return torch.where(self.counts > 0, self.largest, float("nan"))


def pooled(
    call: CheckedCall,
    place: tuple[int, int],
    rows: range | Tensor,
    keys: range,
    bins: tuple[int, int],
    lse: Tensor | None = None,
    *,
    logits: bool = False,
) -> Pooled:
    """One head's weights, pooled.

    Args:
        place: (item, query head).
        rows: a range of query rows without gaps, or (r,) int64 row numbers; `bins[0]` consecutive ones form a bin.
        keys: a range of keys without gaps; each bin but the last holds `bins[1]` of them.
        lse: (Lq,) of that head, the sink counted; None: computed for these rows, over all keys.
        logits: pool the logits s_ij instead of the weights.
    """
    with torch.no_grad():
        if native.refuses(call, keys, bins) is None:
            return Pooled(*native.run(call, place, rows, keys, bins, lse, logits=logits))
        return _in_tiles(call, place, rows, keys, bins, lse, logits)


def _in_tiles(
    call: CheckedCall,
    place: tuple[int, int],
    rows: range | Tensor,
    keys: range,
    bins: tuple[int, int],
    lse: Tensor | None,
    logits: bool,
) -> Pooled:
    item, head = place
    at_rows = torch.arange(rows.start, rows.stop) if isinstance(rows, range) else rows
    at_rows = at_rows.to(call.device)
    problem, query, key, parameter = head_problem(call, item, head)
    query = query[:, :, at_rows]
    if lse is None:
        chosen = replace(problem, rows=tuple(at_rows.tolist()))
        part = None
        if call.bias is not None and parameter is not None:
            part = call.bias.part(parameter, at_rows, None, None)
        _, found = attend(chosen, query, key, key[..., :1], part)
        lse = sink_lse(found, None if call.sink is None else call.sink[head : head + 1])[0, 0]
    else:
        lse = lse.to(call.device)[at_rows]
    pivot = torch.where(lse == float("-inf"), 0.0, lse)[:, None]
    keys_at_once = _step(bins[1], 4096)
    rows_at_once = _step(bins[0], max(1, _CELLS // keys_at_once))
    lines = []
    for first in range(0, len(at_rows), rows_at_once):
        of_rows = at_rows[first : first + rows_at_once]
        row_span = Span(0, len(of_rows), of_rows, unbroken=False)
        line = []
        for start in range(keys.start, keys.stop, keys_at_once):
            stop = min(start + keys_at_once, keys.stop)
            key_span = Span(0, stop - start, torch.arange(start, stop, device=call.device))
            found, seen = _tile(
                call,
                problem,
                parameter,
                query[:, :, first : first + rows_at_once],
                key[:, :, start:stop],
                row_span,
                key_span,
            )
            values = found if logits else torch.exp(found - pivot[first : first + rows_at_once])
            line.append(binned(values, seen, bins))
        lines.append(Pooled(*(torch.cat(parts, 1) for parts in zip(*line, strict=True))))
    return Pooled(*(torch.cat(parts, 0) for parts in zip(*lines, strict=True)))


def head_problem(call: CheckedCall, item: int, head: int) -> tuple[TileProblem, Tensor, Tensor, Tensor | None]:
    """The problem of one head of one item, its query and key (1, 1, L, D) and its part of the bias's parameter."""
    problem = replace(TileProblem.of(call).group(item, item + 1), heads=(head,))
    of_key = head // (call.heads // call.kv_heads)
    query, key = call.query[item : item + 1, head : head + 1], call.key[item : item + 1, of_key : of_key + 1]
    if call.bias is None:
        return problem, query, key, None
    parameter = call.bias.part(call.bias.parameter, None, None, torch.tensor([head], device=call.device))
    if parameter.dim() == 4 and parameter.shape[0] > 1:
        parameter = parameter[item : item + 1]
    return problem, query, key, parameter


def _tile(
    call: CheckedCall,
    problem: TileProblem,
    parameter: Tensor | None,
    query: Tensor,
    key: Tensor,
    rows: Span,
    keys: Span,
) -> tuple[Tensor, Tensor]:
    """Logits (r, c), -inf where nothing is visible, and what is visible."""
    if call.bias is not None and parameter is not None:
        parameter = call.bias.part(parameter, rows.index, keys.index, None)
    (q, bad_q), (k, bad_k) = (
        problem.block(tensor, Span(0, tensor.shape[2], tensor.new_empty(0))) for tensor in (query, key)
    )
    scores = problem.bias_tile(parameter, rows, keys)
    sight = look(problem, rows, keys, "partial", scores, (bad_q, bad_k, None), 1)
    with without_autocast(call.device):
        found = logits_of(problem, sight, q, k, scores)[0][0, 0]
    seen = (
        torch.ones_like(found, dtype=torch.bool) if sight.visible is None else sight.visible[0, 0].expand(found.shape)
    )
    if scores is not None:
        seen = seen & (scores[0, 0].expand(found.shape) != float("-inf"))
    return found, seen


def _step(size: int, most: int) -> int:
    """The multiple of `size` that is at most `most`, or `size`."""
    return max(size, most // size * size)


def binned(values: Tensor, seen: Tensor, bins: tuple[int, int]) -> Pooled:
    """Values (r, c) and which of them are visible, pooled; the last bins may be smaller."""
    down, right = -values.shape[0] % bins[0], -values.shape[1] % bins[1]
    values, seen = F.pad(values, (0, right, 0, down)), F.pad(seen, (0, right, 0, down))
    shape = (values.shape[0] // bins[0], bins[0], values.shape[1] // bins[1], bins[1])
    values, seen = values.view(shape), seen.view(shape)
    sums = torch.where(seen, values, 0.0).sum((1, 3))
    largest = torch.where(seen, values, float("-inf")).amax((1, 3))
    return Pooled(sums, largest, seen.sum((1, 3)).to(sums.dtype))
