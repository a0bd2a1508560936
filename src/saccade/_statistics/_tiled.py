"""Statistics over tiles in plain PyTorch: linear memory, any dtype, any device, every mask and bias.

    m_i = max_j s_ij     t_i = sum_j e_ij,  e_ij = exp(s_ij - m_i)     a_i = sum_j e_ij (s_ij - m_i)
    p_ij = e_ij / T_i,  T_i = t_i + exp(sink - m_i)     H_i = log T_i (t_i / T_i) - a_i / T_i

The first walk carries m, t, a and every other sum per row as the online softmax does (Milakov & Gimelshein 2018): when
m rises by d, t becomes t exp(-d) and a becomes (a - t d) exp(-d). Both terms of H are positive: nothing cancels, however
large the logits are. What adds up over rows (attention received, histograms) takes a second walk, with T known.

Shape legend: B items, Hq / Hkv query and key-value heads, r x c a tile of rows by keys, G named groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .._backends import _tiles
from .._backends._tiles import NEGATIVE, Problem, logits_of, look, weigh
from .._biases import Placement, Span
from .._call import Call
from ._asked import PLACES, Asked
from ._heads import counts, even_edges, octaves
from ._places import positions
from ._rows import Rows, joined

_GONE = -1000.0  # exp of it is 0 in every dtype, and 0 * it is 0 where 0 * -inf is not


@dataclass(frozen=True)
class Walk:
    """The tiles of some batch items of a call."""

    problem: Problem
    query: Tensor
    key: Tensor
    parameter: Tensor | None
    sink: Tensor | None
    standing: Placement
    first: Tensor  # (B|1,)
    names: tuple[str, ...]  # of the groups
    members: Tensor | None  # (B|1, Lk, G) in the accumulator's dtype
    top: int

    @property
    def heads(self) -> int:
        return self.query.shape[1]


class Piece(NamedTuple):
    """One tile: its logits, -inf where nothing is seen, and what is seen (None: all)."""

    keys: Span
    logits: Tensor  # (B, Hq, r, c)
    seen: Tensor | None  # (B|1, H|1, r, c)


def refuses(call: Call, asked: Asked) -> str | None:
    """None: the tiles take every call."""
    return None


def rows(call: Call, asked: Asked, standing: Placement, first: Tensor) -> Rows:
    parts = walks(call, asked, standing, first)
    found = joined([_rows_of(walk) for walk in parts], 0)
    return replace(found, received=_received(parts, found)) if asked.received else found


def walks(call: Call, asked: Asked, standing: Placement, first: Tensor) -> list[Walk]:
    """The call in groups of items, so that memory does not grow with the batch."""
    problem = Problem.of(replace(call, dropout=None))
    tile = call.heads * min(_tiles.ROWS, max(1, call.length_q)) * min(_tiles.KEYS, max(1, call.length_k))
    size = max(1, _tiles.GROUP // tile)
    parameter = None if call.bias is None else call.bias.parameter
    members = None if asked.members is None else asked.members.transpose(1, 2).to(call.accumulator)
    whole = Walk(
        problem, call.query, call.key, parameter, call.sink, standing, first, asked.groups, members,
        asked.top,
    )  # fmt: skip
    starts = range(0, max(1, call.batch), size)
    return [_items(whole, start, min(start + size, call.batch)) for start in starts]


def _items(walk: Walk, start: int, stop: int) -> Walk:
    def cut(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[0] == 1 else tensor[start:stop]

    parameter = walk.parameter if walk.parameter is None or walk.parameter.dim() <= 2 else cut(walk.parameter)
    return replace(
        walk,
        problem=walk.problem.group(start, stop),
        query=walk.query[start:stop],
        key=walk.key[start:stop],
        parameter=parameter,
        standing=walk.standing if isinstance(walk.standing, int) else walk.standing[start:stop],
        first=cut(walk.first),
        members=cut(walk.members),
    )


def _pieces(walk: Walk, rows: Span, key_spans: list[Span]) -> Iterator[Piece]:
    problem = walk.problem
    q, bad_q = problem.block(walk.query, rows)
    for _, keys, kind in problem.tiles(rows, key_spans):
        k, bad_k = problem.block(walk.key, keys)
        scores = problem.bias_tile(walk.parameter, rows, keys)
        sight = look(problem, rows, keys, kind, scores, (bad_q, bad_k, None), walk.heads)
        logits, _ = logits_of(problem, sight, q, k, scores)
        seen = sight.visible
        if scores is not None:
            allowed = scores != NEGATIVE
            seen = allowed if seen is None else seen & allowed
        yield Piece(keys, logits, seen)


# --- the first walk -----------------------------------------------------------------------------------------------


def _rows_of(walk: Walk) -> Rows:
    key_spans = walk.problem.key_spans()
    spans = walk.problem.row_spans() or [Span(0, 0, torch.arange(0, device=walk.query.device))]
    return joined([_block(walk, rows, key_spans) for rows in spans], 2)


class _Sums:
    """What is carried from tile to tile for a block of rows, (B, Hq, r) and (B, Hq, r, n)."""

    def __init__(self, walk: Walk, rows: Span):
        shape = (walk.query.shape[0], walk.heads, len(rows))
        zeros = walk.query.new_zeros(shape, dtype=walk.problem.dtype)
        whole = torch.zeros_like(zeros, dtype=torch.int64)
        self.place = positions(rows.index, walk.standing)  # (B|1, r)
        self.best, self.best_at = torch.full_like(zeros, NEGATIVE), whole - 1
        self.total, self.shifted, self.distance = zeros, zeros, zeros
        self.groups = zeros.new_zeros(*shape, 0 if walk.members is None else walk.members.shape[2])
        self.places = zeros.new_full((*shape, len(PLACES)), NEGATIVE)  # logits
        self.least, self.low, self.high = (torch.full_like(zeros, sign * torch.inf) for sign in (1, 1, -1))
        self.seen, self.bad, self.bad_at = whole, whole, whole - 1
        self.top = zeros.new_full((*shape, walk.top), NEGATIVE)
        self.top_at = whole.new_full((*shape, walk.top), -1)
        beside = self.place[..., None] + torch.tensor([0, -1, 1], device=zeros.device)
        first = walk.first[:, None, None].expand(-1, len(rows), 1)
        self.wanted = torch.cat(torch.broadcast_tensors(beside[..., :1], beside[..., 1:2], beside[..., 2:], first), -1)

    def add(self, walk: Walk, piece: Piece) -> None:
        keys, logits, seen = piece
        tile_best, tile_at = logits.max(-1)
        self.best_at = torch.where(tile_best > self.best, tile_at + keys.start, self.best_at)
        best = torch.maximum(self.best, tile_best)
        pivot = torch.where(best == NEGATIVE, 0.0, best)
        below = (logits - pivot[..., None]).clamp_(min=_GONE)
        weights = torch.exp(below)
        rise = (self.best - pivot).clamp(min=_GONE)
        carry = torch.exp(rise)
        self.shifted = carry * (self.shifted + self.total * rise) + (weights * below).sum(-1)
        self.total = carry * self.total + weights.sum(-1)
        away = (self.place[..., None] - keys.index).abs().to(weights.dtype)[:, None]
        self.distance = carry * self.distance + (weights * away).sum(-1)
        if walk.members is not None:
            members = keys.of(walk.members, 1)[:, None].expand(weights.shape[0], 1, -1, -1)
            self.groups = carry[..., None] * self.groups + weigh(weights, members)
        self.best = best
        self._count(logits, seen, keys)
        self._find(logits, keys)
        if walk.top:
            self._rank(logits, keys)

    def _count(self, logits: Tensor, seen: Tensor | None, keys: Span) -> None:
        self.seen = self.seen + (len(keys) if seen is None else seen.sum(-1))
        shown = logits if seen is None else torch.where(seen, logits, torch.inf)
        least = shown.amin(-1)
        self.least = torch.minimum(self.least, least)
        bad = ~torch.isfinite(logits)
        if seen is not None:
            bad = bad & seen
        self.low = torch.minimum(self.low, torch.where(bad, torch.inf, shown).amin(-1))
        self.high = torch.maximum(self.high, torch.where(bad, NEGATIVE, logits).amax(-1))
        count = bad.sum(-1)
        found = keys.start + bad.to(torch.uint8).argmax(-1)
        self.bad_at = torch.where((self.bad == 0) & (count > 0), found, self.bad_at)
        self.bad = self.bad + count

    def _find(self, logits: Tensor, keys: Span) -> None:
        """The logits at the keys that rows are asked for by name, where they lie in this tile."""
        index = (self.wanted - keys.start)[:, None]
        inside = (index >= 0) & (index < len(keys))
        shape = (*logits.shape[:3], len(PLACES))
        found = logits.gather(-1, index.clamp(0, len(keys) - 1).expand(shape))
        self.places = torch.where(inside, found, self.places)

    def _rank(self, logits: Tensor, keys: Span) -> None:
        """Merge the tile's greatest into those so far; these come first, so that of equals the first key stays."""
        count = self.top.shape[-1]
        at = keys.index.expand(logits.shape)
        logits, at = torch.cat([self.top, logits], -1), torch.cat([self.top_at, at], -1)
        order = torch.argsort(logits, dim=-1, descending=True, stable=True)[..., :count]
        self.top, self.top_at = logits.gather(-1, order), at.gather(-1, order)


def _block(walk: Walk, rows: Span, key_spans: list[Span]) -> Rows:
    sums = _Sums(walk, rows)
    for piece in _pieces(walk, rows, key_spans):
        sums.add(walk, piece)
    empty = sums.total == 0
    some = torch.where(empty, 1.0, sums.total)
    pivot = torch.where(empty, 0.0, sums.best)
    rest, kept, share = _with_sink(torch.log(some), pivot, walk.sink)
    factor = torch.where(empty, 0.0, kept / some)
    entropy = kept * rest - sums.shifted * factor

    def weight(logits: Tensor, pivot: Tensor, rest: Tensor, gone: Tensor) -> Tensor:
        return torch.where(gone, 0.0, torch.exp((logits - pivot) - rest))

    wide = tuple(x[..., None] for x in (pivot, rest, empty))
    places = weight(sums.places, *wide)
    groups = sums.groups * factor[..., None]
    mass = {name: places[..., number] for number, name in enumerate(PLACES)}
    mass["sink"] = torch.where(empty, 0.0, share)
    mass |= {name: groups[..., number] for number, name in enumerate(walk.names)}
    return Rows(
        lse=torch.where(empty, NEGATIVE, pivot + rest),
        entropy=torch.where(empty, 0.0, entropy.clamp(min=0)),
        largest=torch.where(empty, 0.0, torch.exp(-rest)),
        largest_at=torch.where(empty, -1, torch.where(torch.isnan(rest), sums.bad_at, sums.best_at)),
        smallest=weight(sums.least, pivot, rest, empty),
        distance=sums.distance * factor,
        keys_seen=torch.where(empty, 0, sums.seen),
        mass=mass,
        low=sums.low,
        high=sums.high,
        bad=sums.bad,
        bad_at=sums.bad_at,
        top_weights=weight(sums.top, *wide),
        top_keys=torch.where(empty[..., None], -1, sums.top_at),
        pivot=pivot,
        rest=rest,
    )


def _with_sink(log_total: Tensor, pivot: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """log T, the keys' share of T and the sink's, from log t."""
    if sink is None:
        return log_total, torch.ones_like(log_total), torch.zeros_like(log_total)
    ahead = sink.detach().to(pivot.dtype)[None, :, None] - (pivot + log_total)
    more = torch.logaddexp(torch.zeros_like(ahead), ahead)
    return log_total + more, torch.exp(-more), torch.exp(ahead - more)


# --- the second walk ----------------------------------------------------------------------------------------------


def _received(walks: list[Walk], rows: Rows) -> Tensor:
    """sum_i p_ij over the counted rows, (B, Hq, Lk)."""
    parts = []
    for walk in walks:
        sums = walk.query.new_zeros(walk.query.shape[0], walk.heads, walk.problem.length_k, dtype=walk.problem.dtype)
        for piece, weights in _weights_of(walk, rows):
            sums[:, :, piece.keys.start : piece.keys.stop] += weights.sum(2)
        parts.append(sums)
    return torch.cat(parts)


def add_histograms(call: Call, asked: Asked, rows: Rows, found: dict[str, dict[str, Tensor]]) -> None:
    """Counts and edges of logits and weights, as far as they are asked for, into what was found of them per head."""
    wanted = [name for name in ("logits", "weights") if name in asked.histograms]
    for name in wanted:
        held = found[name]
        held["edges"] = even_edges(held["min"], held["max"]) if name == "logits" else octaves(call.heads, rows.lse)
        held["counts"] = torch.zeros(call.heads, held["edges"].shape[1] - 1, dtype=torch.int64, device=call.device)
    nowhere = torch.zeros(1, dtype=torch.int64, device=call.device)
    for walk in walks(call, replace(asked, groups=(), members=None, top=0), 0, nowhere):
        for piece, weights in _weights_of(walk, rows):
            for name in wanted:
                entries = piece.logits if name == "logits" else weights
                inside = torch.isfinite(entries) if piece.seen is None else torch.isfinite(entries) & piece.seen
                found[name]["counts"] += counts(entries, inside, found[name]["edges"])


def _weights_of(walk: Walk, rows: Rows) -> Iterator[tuple[Piece, Tensor]]:
    """Every tile with its weights (B, Hq, r, c), 0 where nothing is seen."""
    items = slice(*walk.problem.batch)
    shape = rows.rest.shape
    pivots, rests = rows.pivot.expand(shape)[items], torch.where(rows.rest == NEGATIVE, 0.0, rows.rest)[items]
    key_spans = walk.problem.key_spans()
    for span in walk.problem.row_spans():
        pivot, rest = (x[:, :, span.start : span.stop, None] for x in (pivots, rests))
        for piece in _pieces(walk, span, key_spans):
            weights = torch.exp((piece.logits - pivot) - rest)
            yield piece, weights if piece.seen is None else torch.where(piece.seen, weights, 0.0)
