"""Attention weights of one head pooled over bins of rows and keys: sums, largest, and how many pairs are visible.

    p_ij = exp(s_ij - lse_i)      sums[n, m] = sum, largest[n, m] = max of p_ij over the visible pairs of bin (n, m)

Nothing of Lq x Lk is stored. The native kernels compute it where they take the call, tiles of plain PyTorch elsewhere.

Shape legend: B items, Hq query heads, Lq / Lk lengths, n / m bins of rows and keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._backends.native import _pooled as native
from ._biases import Span
from ._call import CallSettings, CheckedCall, without_autocast
from ._tiles import TileProblem, logits_of, look, shown

_CELLS, _KEYS = 2**20, 4096  # scores, and keys, that are formed at once in plain PyTorch


class Pooled(NamedTuple):
    """(n, m) float32 each (float64 for float64)."""

    sums: Tensor
    largest: Tensor  # -inf in bins without a visible pair
    counts: Tensor  # visible pairs

    @property
    def mean(self) -> Tensor:
        """The mean over the visible pairs of each bin; NaN for bins without any."""
        return torch.where(self.counts > 0, self.sums / self.counts, float("nan"))

    @property
    def top(self) -> Tensor:
        """The largest of each bin; NaN for bins without visible pairs."""
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
    precise: bool = False,
) -> Pooled:
    """One head's weights, pooled. NaN logits make their bins NaN.

    A bin's sum is one of float32 numbers: it errs by up to 2^-24 times the pairs of a bin / 16. A float32 logit s errs
    by some 2^-24 |s|, and the weight by as much of itself.

    Args:
        place: (item, query head).
        rows: a range of query rows without gaps, or (r,) int64 row numbers; `bins[0]` consecutive ones form a bin.
        keys: a range of keys without gaps; each bin but the last holds `bins[1]` of them.
        lse: (Lq,) float64 of that head, as `row_lse` gives it; None: computed for these rows, over all keys.
        logits: pool the logits s_ij instead of the weights.
        precise: logits in float64, by plain PyTorch: for a few rows. Weights then err by 2^-23 of themselves.
    """
    with torch.no_grad():
        if not precise and native.refuses(call, keys, bins) is None:
            return Pooled(*native.run(call, place, rows, keys, bins, lse, logits=logits))
        return _in_tiles(_HeadTiles.of(call, place, rows, precise), keys, bins, lse, logits)


def row_lse(call: CheckedCall, place: tuple[int, int], rows: range | Tensor, *, precise: bool = False) -> Tensor:
    """(r,) float64: log of the rows' softmax denominators, the sink counted; -inf for rows that see nothing.

    Exact to the scores it is made of, which `pooled` forms again: rounded to float32, an lse of 1,000 would shift the
    weights of its row by 3e-5 of themselves.
    """
    with torch.no_grad():
        if not precise and native.refuses(call, range(call.length_k), (1, 1)) is None:
            return native.row_lse(call, place, rows)
        head = _HeadTiles.of(call, place, rows, precise)
        return torch.cat([head.lse(part) for part in head.parts(1)])


def _in_tiles(head: _HeadTiles, keys: range, bins: tuple[int, int], lse: Tensor | None, logits: bool) -> Pooled:
    keys_at_once = _step(bins[1], _KEYS)
    lines = []
    for part in head.parts(bins[0], keys_at_once):
        known = None if logits else head.lse(part) if lse is None else lse.to(head.rows.device)[head.rows[part]]
        line = []
        for start in range(keys.start, keys.stop, keys_at_once):
            found, seen = head.tile(part, range(start, min(start + keys_at_once, keys.stop)))
            if known is not None:
                pivot = torch.where(known == float("-inf"), 0.0, known)[:, None]
                found = torch.exp(found.double() - pivot).to(found.dtype)
            line.append(binned(found, seen, bins))
        lines.append(Pooled(*(torch.cat(parts, 1) for parts in zip(*line, strict=True))))
    return Pooled(*(torch.cat(parts, 0) for parts in zip(*lines, strict=True)))


@dataclass(frozen=True, eq=False)
class _HeadTiles:
    """Tiles of the logits of some rows of one head, in plain PyTorch."""

    call: CheckedCall
    place: tuple[int, int]
    problem: TileProblem
    rows: Tensor  # (r,)
    query: Tensor  # (1, 1, r, D)
    key: Tensor  # (1, 1, Lk, D)
    parameter: Tensor | None
    sink: Tensor | None  # ()

    @classmethod
    def of(cls, call: CheckedCall, place: tuple[int, int], rows: range | Tensor, precise: bool) -> _HeadTiles:
        item, head = place
        at_rows = torch.arange(rows.start, rows.stop) if isinstance(rows, range) else rows
        at_rows = at_rows.to(call.device)
        problem, query, key, parameter = head_problem(call, item, head)
        query = query[:, :, at_rows]
        problem = problem.guard_if(query, key, parameter)
        if precise:
            problem = replace(problem, dtype=torch.float64)
        sink = None if call.sink is None else call.sink[head].double()
        return cls(call, place, problem, at_rows, query, key, parameter, sink)

    def parts(self, bin: int, keys: int = _KEYS) -> Iterator[slice]:
        """The rows in parts of whole bins, as many as are formed at once with so many keys."""
        step = _step(bin, max(1, _CELLS // keys))
        return (slice(start, start + step) for start in range(0, len(self.rows), step))

    def lse(self, part: slice) -> Tensor:
        """(r,) float64: the lse of these rows over all keys."""
        total = self.rows[part].new_full((), float("-inf"), dtype=torch.float64).expand(len(self.rows[part]))
        for start in range(0, self.key.shape[2], _KEYS):
            keys = range(start, min(start + _KEYS, self.key.shape[2]))
            if self._kind(part, keys) == "empty":
                continue
            found = self.tile(part, keys)[0]
            top = found.amax(1)
            top = torch.where(top == float("-inf"), 0.0, top)
            # Terms are float32 numbers: exp takes half the time, and they err by 2^-24 of themselves at any logit.
            terms = torch.exp((found - top[:, None]).float()).sum(1, dtype=torch.float64)
            total = torch.logaddexp(total, top + terms.log())
        if self.sink is None:
            return total
        return torch.where(total == float("-inf"), total, torch.logaddexp(total, self.sink))

    def _kind(self, part: slice, keys: range) -> str:
        call, rows = self.call, self.rows[part]
        if call.mask is None:
            return "full"
        hull, (item, head) = (int(rows.min()), int(rows.max()) + 1), self.place
        return call.mask.kind(hull, (keys.start, keys.stop), call.length_q, call.length_k, item=item, head=head)

    def tile(self, part: slice, keys: range) -> tuple[Tensor, Tensor]:
        """Logits (r, c), -inf for hidden pairs, and which pairs are visible."""
        call, at_rows = self.call, self.rows[part]
        row_span = Span(0, len(at_rows), at_rows, unbroken=False)
        key_span = Span(0, len(keys), torch.arange(keys.start, keys.stop, device=call.device))
        parameter = self.parameter
        if call.bias is not None and parameter is not None:
            parameter = call.bias._part(parameter, row_span.index, key_span.index, None)
        query, key = self.query[:, :, part], self.key[:, :, keys.start : keys.stop]
        (q, bad_q), (k, bad_k) = (
            self.problem.block(tensor, Span(0, tensor.shape[2], tensor.new_empty(0))) for tensor in (query, key)
        )
        scores = self.problem.bias_tiles(parameter, row_span, key_span)
        kind = "partial" if self._kind(part, keys) != "full" else "full"
        sight = look(self.problem, row_span, key_span, kind, scores, (bad_q, bad_k, None), 1)
        with without_autocast(call.device):
            logits, _ = logits_of(self.problem, sight, q, k, scores)
        found, allowed = logits[0, 0], shown(self.problem, scores, logits)
        if sight.visible is None:
            seen = torch.ones_like(found, dtype=torch.bool)
        else:
            seen = sight.visible[0, 0].expand(found.shape)
        if allowed is not None:
            seen = seen & allowed[0, 0].expand(found.shape)
        return found, seen


def head_problem(call: CheckedCall, item: int, head: int) -> tuple[TileProblem, Tensor, Tensor, Tensor | None]:
    """The problem of one head of one item, its query and key (1, 1, L, D) and its part of the bias's parameter."""
    problem = TileProblem.with_settings(call.settings(CallSettings), call.query, call.key)
    problem = replace(problem.group(item, item + 1), heads=(head,))
    of_key = head // (call.heads // call.kv_heads)
    query, key = call.query[item : item + 1, head : head + 1], call.key[item : item + 1, of_key : of_key + 1]
    if call.bias is None:
        return problem, query, key, None
    parameter = call.bias._part(call.bias.parameter, None, None, torch.tensor([head], device=call.device))
    if parameter.dim() == 4 and parameter.shape[0] > 1:
        parameter = parameter[item : item + 1]
    return problem, query, key, parameter


def _step(size: int, most: int) -> int:
    """The multiple of `size` that is at most `most`, or `size`."""
    return max(size, most // size * size)


def binned(values: Tensor, visible: Tensor, bins: tuple[int, int]) -> Pooled:
    """Values (r, c) and which of them are visible, pooled; the last bins may be smaller."""
    down, right = -values.shape[0] % bins[0], -values.shape[1] % bins[1]
    values, visible = F.pad(values, (0, right, 0, down)), F.pad(visible, (0, right, 0, down))
    shape = (values.shape[0] // bins[0], bins[0], values.shape[1] // bins[1], bins[1])
    values, visible = values.view(shape), visible.view(shape)
    sums = torch.where(visible, values, 0.0).sum((1, 3))
    largest = torch.where(visible, values, float("-inf")).amax((1, 3))
    return Pooled(sums, largest, visible.sum((1, 3)).to(sums.dtype))
