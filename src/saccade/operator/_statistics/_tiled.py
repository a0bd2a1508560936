"""Statistics over tiles in plain PyTorch: linear memory, any dtype, any device, every mask and bias.

    m_i = max_j s_ij     t_i = sum_j e_ij,  e_ij = exp(s_ij - m_i)     a_i = sum_j e_ij (s_ij - m_i)
    p_ij = e_ij / T_i,  T_i = t_i + exp(sink - m_i)     H_i = log T_i (t_i / T_i) - a_i / T_i

The first walk carries m, t, a and every other sum of a row as the online softmax does (Milakov & Gimelshein 2018): when
m rises by d, t becomes t exp(-d) and a becomes (a - t d) exp(-d). Both terms of H are positive: nothing cancels, how
large the logits ever are. What adds up over rows (attention received, histograms) takes a second walk, with T known.

Shape legend: B items, Hq query heads, Lq / Lk lengths, r x c a tile of rows by keys, G named groups.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .._biases import Placement, Span
from .._call import CheckedCall
from .._tiles import NEGATIVE, weigh
from ._histograms import even_bins, even_edges, octave_bins, octaves, tally
from ._request import PLACES, StatisticsRequest
from ._rows import RowStatistics, joined, positions
from ._walk import TileWalk, WeightTile, walks

_GONE = -1000.0  # exp of it is 0 in every dtype, and 0 * it is 0 where 0 * -inf is not


def refuses(call: CheckedCall, asked: StatisticsRequest) -> str | None:
    """None: the tiles take every call."""
    return None


def rows(call: CheckedCall, asked: StatisticsRequest, standing: Placement, first: Tensor) -> RowStatistics:
    parts = walks(call, asked, standing, first)
    found = joined([_rows_of(walk) for walk in parts], 0)
    return replace(found, received=torch.cat([_received(walk, found) for walk in parts])) if asked.received else found


def _rows_of(walk: TileWalk) -> RowStatistics:
    key_spans = walk.problem.key_spans()
    spans = walk.problem.row_spans() or [Span(0, 0, torch.arange(0, device=walk.query.device))]
    blocks = []
    for span in spans:
        sums = _RowSums(walk, span)
        for piece in walk.pieces(span, key_spans):
            sums.add(walk, piece)
        blocks.append(_finished(walk, sums))
    return joined(blocks, 2)


def _received(walk: TileWalk, rows: RowStatistics) -> Tensor:
    """sum_i p_ij over the counted rows, (B, Hq, Lk)."""
    sums = walk.zeros(walk.problem.length_k)
    for piece, weights in walk.weights(rows):
        sums[:, :, piece.keys.start : piece.keys.stop] += weights.sum(2)
    return sums


def add_histograms(
    call: CheckedCall, asked: StatisticsRequest, rows: RowStatistics, statistics: dict[str, dict[str, Tensor]]
) -> None:
    """Counts and edges of logits and weights, as far as they are requested, merged into the results per head."""
    wanted = [name for name in ("logits", "weights") if name in asked.histograms]
    for name in wanted:
        held = statistics[name]
        held["edges"] = even_edges(held["min"], held["max"]) if name == "logits" else octaves(call.heads, rows.lse)
        held["counts"] = torch.zeros(call.heads, held["edges"].shape[1] - 1, dtype=torch.int64, device=call.device)
    nowhere = torch.zeros(1, dtype=torch.int64, device=call.device)
    for walk in walks(call, replace(asked, groups=(), members=None, top=0), 0, nowhere):
        for piece, weights in walk.weights(rows):
            for name in wanted:
                entries, edges = piece.logits if name == "logits" else weights, statistics[name]["edges"]
                inside = torch.isfinite(entries) if piece.seen is None else torch.isfinite(entries) & piece.seen
                bins = even_bins(entries, edges) if name == "logits" else octave_bins(entries)
                statistics[name]["counts"] += tally(bins, inside, edges)


class _RowSums:
    """Sums carried from tile to tile for a block of rows: (B, Hq, r), and (B, Hq, r, n) for n groups or keys."""

    def __init__(self, walk: TileWalk, rows: Span):
        zeros = walk.zeros(len(rows))
        none = torch.full_like(zeros, -1, dtype=torch.int64)
        self.best, self.best_at = torch.full_like(zeros, NEGATIVE), none
        self.least, self.low, self.high = -self.best, -self.best, self.best
        self.total, self.shifted, self.distance = zeros, zeros, zeros
        self.groups = walk.zeros(len(rows), 0 if walk.members is None else walk.members.shape[2])
        self.bad, self.bad_at = torch.zeros_like(none), none
        self.top = walk.zeros(len(rows), walk.top) + NEGATIVE
        self.top_at = torch.full_like(self.top, -1, dtype=torch.int64)
        self.place = positions(rows.index, walk.standing)  # (B|1, r)
        first = walk.first[:, None].expand(-1, len(rows))
        wanted = (self.place, self.place - 1, self.place + 1, first)
        self.wanted = torch.stack(torch.broadcast_tensors(*wanted), -1)  # (B|1, r, 4), keys
        self.found = walk.zeros(len(rows), len(PLACES)) + NEGATIVE  # their logits

    def add(self, walk: TileWalk, piece: WeightTile) -> None:
        keys, logits, _ = piece
        tile_best, tile_at = logits.max(-1)
        self.best_at = torch.where(tile_best > self.best, tile_at + keys.start, self.best_at)
        best = torch.maximum(self.best, tile_best)
        pivot = torch.where(best == NEGATIVE, 0.0, best)
        below = (logits - pivot[..., None]).clamp_(min=_GONE)
        weights = torch.exp(below)
        rise = (self.best - pivot).clamp_(min=_GONE)
        carry = torch.exp(rise)
        away = (self.place[..., None] - keys.index).abs().to(weights.dtype)[:, None]
        self.shifted = carry * (self.shifted + self.total * rise) + below.mul_(weights).sum(-1)
        self.total = carry * self.total + weights.sum(-1)
        self.distance = carry * self.distance + (weights * away).sum(-1)
        if walk.members is not None:
            members = keys.of(walk.members, 1)[:, None].expand(weights.shape[0], 1, -1, -1)
            self.groups = carry[..., None] * self.groups + weigh(weights, members)
        self.best = best
        self._find(logits, keys)
        self._range(piece, tile_best)
        if walk.top:
            self._rank(logits, keys)

    def _find(self, logits: Tensor, keys: Span) -> None:
        """The logits at the keys that the request names for each row, as far as they are in this tile."""
        index = (self.wanted - keys.start)[:, None]
        inside = (index >= 0) & (index < len(keys))
        found = logits.gather(-1, index.clamp(0, len(keys) - 1).expand(self.found.shape))
        self.found = torch.where(inside, found, self.found)

    def _range(self, piece: WeightTile, greatest: Tensor) -> None:
        keys, logits, seen = piece
        shown = logits if seen is None else torch.where(seen, logits, torch.inf)
        least = shown.amin(-1)
        self.least = torch.minimum(self.least, least)
        nothing = (least == torch.inf) & (greatest == NEGATIVE)
        if bool((nothing | (torch.isfinite(least) & torch.isfinite(greatest))).all()):
            self.low, self.high = torch.minimum(self.low, least), torch.maximum(self.high, greatest)
            return
        bad = ~torch.isfinite(logits) if seen is None else ~torch.isfinite(logits) & seen
        self.low = torch.minimum(self.low, torch.where(bad, torch.inf, shown).amin(-1))
        self.high = torch.maximum(self.high, torch.where(bad, NEGATIVE, logits).amax(-1))
        count = bad.sum(-1)
        at = keys.start + bad.to(torch.uint8).argmax(-1)
        self.bad_at = torch.where((self.bad == 0) & (count > 0), at, self.bad_at)
        self.bad = self.bad + count

    def _rank(self, logits: Tensor, keys: Span) -> None:
        """Merge the largest logits of the tile into the largest so far. The earlier logits come first, so that a tie
        keeps the first key."""
        entries = torch.cat([self.top, logits], -1)
        at = torch.cat([self.top_at, keys.index.expand(logits.shape)], -1)
        order = _greatest(entries, self.top.shape[-1])
        self.top, self.top_at = entries.gather(-1, order), at.gather(-1, order)


def _greatest(entries: Tensor, count: int) -> Tensor:
    """Indices of the `count` greatest values of (..., n), greatest first; of equal values, lower index first."""
    if entries.dtype != torch.float32:
        return torch.argsort(entries, dim=-1, descending=True, stable=True)[..., :count]
    # topk says nothing of equals, and a stable sort costs ten times as much. So each float, as an integer of the same
    # order (the bits below the sign are turned over where it is negative), stands above the place, counted backwards.
    bits = (entries + 0.0).view(torch.int32)  # + 0.0: -0 and 0 are equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    places = torch.arange(entries.shape[-1], device=entries.device)
    return torch.topk((ordered << 32) - places, count, dim=-1).indices


def _finished(walk: TileWalk, sums: _RowSums) -> RowStatistics:
    empty = sums.total == 0
    some = torch.where(empty, 1.0, sums.total)
    pivot = torch.where(empty, 0.0, sums.best)
    rest, kept, share = _with_sink(torch.log(some), pivot, walk.sink)
    factor = torch.where(empty, 0.0, kept / some)
    wide = pivot[..., None], rest[..., None], empty[..., None]
    # Of a row that sees a NaN, what it does not see still weighs 0.
    places = torch.where(sums.found == NEGATIVE, 0.0, _weight(sums.found, *wide))
    entropy = torch.where(empty, 0.0, kept * rest - sums.shifted * factor)
    return RowStatistics(
        lse=torch.where(empty, NEGATIVE, pivot + rest),
        entropy=entropy.clamp(min=0),
        largest=torch.where(empty, 0.0, torch.exp(-rest)),
        largest_at=torch.where(empty, -1, torch.where(torch.isnan(rest), sums.bad_at, sums.best_at)),
        smallest=_weight(sums.least, pivot, rest, empty),
        distance=sums.distance * factor,
        mass=_masses(walk, places, torch.where(empty, 0.0, share), sums.groups * factor[..., None]),
        low=sums.low,
        high=sums.high,
        bad=sums.bad,
        bad_at=sums.bad_at,
        top_weights=_weight(sums.top, *wide),
        top_keys=torch.where(empty[..., None], -1, sums.top_at),
        pivot=pivot,
        rest=rest,
    )


def _weight(logits: Tensor, pivot: Tensor, rest: Tensor, empty: Tensor) -> Tensor:
    return torch.where(empty, 0.0, torch.exp((logits - pivot) - rest))


def _masses(walk: TileWalk, places: Tensor, sink: Tensor, groups: Tensor) -> dict[str, Tensor]:
    mass = dict(zip(PLACES, places.unbind(-1), strict=True)) | {"sink": sink}
    return mass | dict(zip(walk.names, groups.unbind(-1), strict=True))


def _with_sink(log_total: Tensor, pivot: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """log T, the keys' share of T and the sink's, from log t."""
    if sink is None:
        return log_total, torch.ones_like(log_total), torch.zeros_like(log_total)
    ahead = sink.to(pivot.dtype)[None, :, None] - (pivot + log_total)
    more = torch.logaddexp(torch.zeros_like(ahead), ahead)
    return log_total + more, torch.exp(-more), torch.exp(ahead - more)
