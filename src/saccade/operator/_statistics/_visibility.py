"""The number of keys that each row of a call sees, and the keys that some row sees, without forming Lq x Lk.

Shape legend: B items, H heads, Lq / Lk lengths.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .._biases import Placement, Span
from .._call import CheckedCall, _stands_at
from .._masks import Causal, FromTensor, Mask, Padding, Window, keys_seen
from .._masks._algebra import And
from .._masks._data import lasting
from .._masks._placement import At
from .._scores._score import ModifiedScores
from .._tiles import TileProblem, logits_of, look
from ._rows import padded_rows, positions, standing

_ROWS, _KEYS = 256, 2048


class RowVisibility(NamedTuple):
    """Counts of visible keys. They depend only on the mask and the lengths, unless a bias of -inf hides more."""

    seen: Tensor  # int64 (B|1, H|1, Lq|1), how many keys each row sees
    keys: Tensor | None  # bool (B|1, H|1, Lk), seen by some row; None: all
    first: Tensor  # int64 (B|1,), the first key that any row of the item sees; 0 where there is none
    padded: Tensor  # bool (B|1, 1, Lq|1), rows that are no tokens
    standing: Placement  # row i stands at key index i + standing


def row_visibility(call: CheckedCall) -> RowVisibility:
    """The visibility of rows by the mask and a bias of -inf.

    The mask keeps the last answer, on a CPU only: elsewhere a kept tensor would have to know of streams and of graphs
    being captured.
    """
    mask, sizes = call.mask, (call.length_q, call.length_k)
    if mask is None and call.bias is None and call.device.type == "cpu" and not torch.compiler.is_compiling():
        known = _unmasked(*sizes)
        return known._replace(seen=known.seen.clone(), padded=known.padded.clone())  # which results give away
    if mask is None or call.bias is not None or call.device.type != "cpu" or torch.compiler.is_compiling():
        return _worked_out(call)
    kept: RowVisibility | None = mask._remembered("visibility", sizes)
    if kept is None:
        kept = _worked_out(call)
        mask._remember("visibility", sizes, kept)
    return kept


@functools.lru_cache(maxsize=8)
@lasting
def _unmasked(rows: int, keys: int) -> RowVisibility:
    """Where each row sees all keys."""
    none = torch.zeros(1, 1, 1, dtype=torch.bool, device="cpu")
    first = torch.zeros(1, dtype=torch.int64, device="cpu")
    return RowVisibility(torch.full((1, 1, 1), keys, device="cpu"), None, first, none, keys - rows)


@lasting
def _worked_out(call: CheckedCall) -> RowVisibility:
    hidden = _hides(call)
    seen = None if hidden else _counted(call)
    if seen is None:
        seen, keys = _walked(call, hidden)
    else:
        keys = keys_seen(call.mask, call.length_q, call.length_k, device=call.device)
    return RowVisibility(
        seen, keys, _first(keys, call.device), padded_rows(call.mask, call.length_q, call.device), standing(call)
    )


def first_key(call: CheckedCall) -> Tensor:
    """`RowVisibility.first`, without counting the visible keys of each row."""
    if _hides(call):
        return row_visibility(call).first
    return _first(keys_seen(call.mask, call.length_q, call.length_k, device=call.device), call.device)


def _first(keys: Tensor | None, device: torch.device) -> Tensor:
    if keys is None or not keys.shape[2]:
        return torch.zeros(1, dtype=torch.int64, device=device)
    return keys.any(1).to(torch.uint8).argmax(1)


def _hides(call: CheckedCall) -> bool:
    """Whether the bias may hold -inf somewhere."""
    if isinstance(call.bias, ModifiedScores) and call.bias._may_hide:
        return True
    if call.bias is None or not call.bias.parameter.numel():
        return False
    return not bool(call.bias.parameter.amin() > -torch.inf)


# --- by arithmetic ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _DistanceRule:
    """Row i sees the keys j with `keys[j]` and -left <= j - pos(i) <= right, if `rows[i]`; None sets no limit."""

    left: int | None = None
    right: int | None = None
    keys: Tensor | None = None  # bool (B|1, Lk)
    rows: Tensor | None = None  # bool (B|1, Lq)


def _counted(call: CheckedCall) -> Tensor | None:
    """Keys seen per row, if the mask is a band, padding, a tensor, or bands with padding; else None."""
    mask = call.mask
    if mask is None:
        return torch.full((1, 1, 1), call.length_k, device=call.device)
    if isinstance(mask, FromTensor):
        return mask.tensor.sum(-1) * (1 if mask.tensor.shape[3] == call.length_k else call.length_k)
    rule = _rule(mask, _DistanceRule(), call)
    if rule is None:
        return None
    placement = _stands_at(mask, call.length_k - call.length_q, call.device)
    assert placement is not None
    at = positions(torch.arange(call.length_q, device=call.device), placement)
    start = torch.zeros_like(at) if rule.left is None else (at - rule.left).clamp(0, call.length_k)
    stop = torch.full_like(at, call.length_k) if rule.right is None else (at + rule.right + 1).clamp(0, call.length_k)
    stop = torch.maximum(start, stop)
    if rule.keys is None:
        count = stop - start
    else:
        running = torch.nn.functional.pad(rule.keys.cumsum(1), (1, 0))
        items = max(running.shape[0], at.shape[0])
        running, start, stop = (x.expand(items, -1) for x in (running, start, stop))
        count = running.gather(1, stop) - running.gather(1, start)
    return (count if rule.rows is None else torch.where(rule.rows, count, 0))[:, None]


def _rule(mask: Mask, rule: _DistanceRule, call: CheckedCall) -> _DistanceRule | None:
    """The rule of `mask` and `rule` together."""
    if isinstance(mask, And):
        joined: _DistanceRule | None = rule
        for part in mask.parts:
            joined = None if joined is None else _rule(part, joined, call)
        return joined
    if isinstance(mask, At):
        return _rule(mask.part, rule, call)
    if isinstance(mask, Causal):
        return replace(rule, right=_less(rule.right, 0))
    if isinstance(mask, Window):
        return replace(rule, left=_less(rule.left, mask.left), right=_less(rule.right, mask.right))
    if isinstance(mask, Padding):
        rows = None if mask.queries is None else mask.queries.marks(call.length_q, call.device)
        keys = mask.keys.marks(call.length_k, call.device)
        return replace(rule, keys=_both(rule.keys, keys), rows=_both(rule.rows, rows))
    return None


def _less(left: int | None, right: int | None) -> int | None:
    return right if left is None else left if right is None else min(left, right)


def _both(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    return right if left is None else left if right is None else left & right


# --- by looking ---------------------------------------------------------------------------------------------------


def _walked(call: CheckedCall, hidden: bool) -> tuple[Tensor, Tensor | None]:
    """Count visible keys tile by tile, for any mask and bias."""
    keys = [_span(start, min(start + _KEYS, call.length_k), call) for start in range(0, call.length_k, _KEYS)]
    counts, shown = [], torch.zeros(1, 1, call.length_k, dtype=torch.bool, device=call.device)
    for start in range(0, call.length_q, _ROWS):
        rows = _span(start, min(start + _ROWS, call.length_q), call)
        tiles = [_tile(call, rows, span, hidden) for span in keys]
        none = torch.zeros(1, 1, len(rows), dtype=torch.int64, device=call.device)
        counts.append(sum((tile.sum(-1) for tile in tiles), none))
        if tiles:
            shape = torch.broadcast_shapes(*(tile.shape[:2] for tile in tiles))
            shown = shown | torch.cat([tile.any(2).expand(*shape, -1) for tile in tiles], 2)
    if not counts:
        return torch.zeros(1, 1, 0, dtype=torch.int64, device=call.device), shown
    shape = torch.broadcast_shapes(*(count.shape[:2] for count in counts))
    return torch.cat([count.expand(*shape, -1) for count in counts], 2), shown


def _span(start: int, stop: int, call: CheckedCall) -> Span:
    return Span(start, stop, torch.arange(start, stop, device=call.device))


def _tile(call: CheckedCall, rows: Span, keys: Span, hidden: bool) -> Tensor:
    """bool (B|1, H|1, r, c)."""
    kind = "full"
    if call.mask is not None:
        edges = (rows.start, rows.stop), (keys.start, keys.stop)
        kind = call.mask.kind(*edges, call.length_q, call.length_k)
    if kind == "partial":
        assert call.mask is not None
        seen = call.mask._grid(rows.index, keys.index, call.length_q, call.length_k)
    else:
        seen = torch.full((1, 1, len(rows), len(keys)), kind == "full", device=call.device)
    if not hidden or kind == "empty":
        return seen
    assert call.bias is not None
    if isinstance(call.bias, ModifiedScores):
        return seen & _not_hidden(call, rows, keys)
    scores = call.bias._tile(call.bias.parameter, rows, keys, call.placement, call.accumulator)
    return seen & (scores != -torch.inf)


def _not_hidden(call: CheckedCall, rows: Span, keys: Span) -> Tensor:
    """(B, H, r, c) bool: pairs whose `Score` is above -inf."""
    problem, parameter = TileProblem.of(call), None if call.bias is None else call.bias.parameter
    (q, bad_q), (k, bad_k) = problem.block(call.query, rows), problem.block(call.key, keys)
    scores = problem.bias_tiles(parameter, rows, keys)
    sight = look(problem, rows, keys, "partial", scores, (bad_q, bad_k, None), call.heads)
    return logits_of(problem, sight, q, k, scores)[0] != -torch.inf
