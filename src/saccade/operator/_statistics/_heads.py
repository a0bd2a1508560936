"""Ranges, norms and non-finite entries per head.

Nearly always everything is finite, and then the ranges show it. The number and the first place of entries that are not
finite are computed only if a range is not a number: some of these sums take as long as all attention of a small model.

Shape legend: B items, H heads (Hq or Hkv), L rows or keys, D width.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from ._histograms import even_bins, even_edges, tally
from ._rows import RowStatistics

Numbers = dict[str, Tensor]


class HeadVectors(NamedTuple):
    entries: Tensor  # (B, H, L, D), float32 at least
    real: Tensor | None  # bool (B, H, L), None: all are

    @classmethod
    def of(cls, tensor: Tensor, real: Tensor | None) -> HeadVectors:
        """`real` is (B|1, H|1, L)."""
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        return cls(wide, None if real is None else real.expand(wide.shape[:3]))

    @property
    def norms(self) -> Tensor:
        return torch.linalg.vector_norm(self.entries, dim=-1)

    def range(self) -> tuple[Tensor, Tensor]:
        """Least and greatest entry of each head, both (H,); +inf and -inf where nothing is real."""
        entries, real = self
        if not entries.numel():
            return entries.new_full((entries.shape[1],), torch.inf), entries.new_full((entries.shape[1],), -torch.inf)
        if real is None:
            return entries.amin((0, 2, 3)), entries.amax((0, 2, 3))
        low, high = entries.amin(-1), entries.amax(-1)
        return _amin(torch.where(real, low, torch.inf)), _amax(torch.where(real, high, -torch.inf))


def per_head(
    vectors: dict[str, HeadVectors], histograms: Collection[str], rows: RowStatistics, counted: Tensor, visible: Tensor
) -> dict[str, Numbers]:
    """The contents of `Statistics.heads`, except the histograms of logits and weights.

    `counted` (B, Hq, Lq) are the rows that see a key, `visible` (B|1, Hq|1, Lq|1) says how many keys.
    """
    ranges = {name: these.range() for name, these in vectors.items()}
    sound = bool(torch.isfinite(torch.cat([bound for pair in ranges.values() for bound in pair])).all())
    found = {
        name: _sound(these, ranges[name]) if sound else _exactly(these, name in histograms)
        for name, these in vectors.items()
    }
    for name in vectors:
        if sound and name in histograms:
            found[name] |= _histogram(vectors[name].entries, vectors[name].real, found[name])
    found["logits"] = {"min": _amin(rows.low), "max": _amax(rows.high)}
    if bool(rows.bad.any()):
        fine = counted & ~torch.isnan(rows.largest)
        logits, weights = _bad_pairs(rows, visible.expand(counted.shape))
    else:
        fine = counted
        logits = weights = _none_bad(found["query"]["min"])
    found["logits"] |= logits
    low, high = torch.where(fine, rows.smallest, torch.inf), torch.where(fine, rows.largest, -torch.inf)
    found["weights"] = {"min": _amin(low), "max": _amax(high)} | weights
    return found


# --- vectors ------------------------------------------------------------------------------------------------------


def _sound(vectors: HeadVectors, bounds: tuple[Tensor, Tensor]) -> Numbers:
    """Numbers per head of vectors that are all finite."""
    low, high = bounds
    return {"min": low, "max": high, "norm": _average(vectors.norms, vectors.real)} | _none_bad(low)


def _exactly(vectors: HeadVectors, histogram: bool) -> Numbers:
    """Numbers per head for vectors with entries that are not finite, or for heads without real vectors."""
    entries, real = vectors
    finite = torch.isfinite(entries)
    bad = ~finite
    if real is not None:
        finite, bad = finite & real[..., None], bad & real[..., None]
    heads, (batch, _, length, width) = entries.shape[1], entries.shape
    vectors_of = entries.new_full((heads,), batch * length) if real is None else real.sum((0, 2))
    low = _amin(torch.where(finite, entries, torch.inf).flatten(2))
    high = _amax(torch.where(finite, entries, -torch.inf).flatten(2))
    found = {"min": low, "max": high, "norm": _average(vectors.norms, finite.all(-1))}
    found["nonfinite"] = bad.sum((0, 2, 3)).to(entries.dtype) / (vectors_of * width).clamp(min=1)
    found["nonfinite_at"] = _first_place(bad)
    return found | (_histogram(entries, finite, found) if histogram else {})


def _histogram(entries: Tensor, inside: Tensor | None, numbers: Numbers) -> Numbers:
    edges = even_edges(numbers["min"], numbers["max"])
    if inside is not None and inside.dim() == 3:
        inside = inside[..., None]
    return {"edges": edges, "counts": tally(even_bins(entries, edges), inside, edges)}


def _average(norms: Tensor, rows: Tensor | None) -> Tensor:
    """The mean norm of each head over the rows (B, H, L) that are True, or over all rows if `rows` is None; NaN for
    heads without a row."""
    return norms.mean((0, 2)) if rows is None else torch.where(rows, norms, 0.0).sum((0, 2)) / rows.sum((0, 2))


# --- logits and weights -------------------------------------------------------------------------------------------


def _bad_pairs(rows: RowStatistics, visible: Tensor) -> tuple[Numbers, Numbers]:
    """Shares and first places of logits and of weights. A NaN or +inf among a row's logits spoils each weight."""
    pairs = visible.sum((0, 2))
    spoiled = torch.where(torch.isnan(rows.largest), visible, 0)
    return _bad_of(rows.bad, rows.bad_at, pairs, rows.lse.dtype), _bad_of(spoiled, rows.bad_at, pairs, rows.lse.dtype)


def _bad_of(bad: Tensor, bad_at: Tensor, pairs: Tensor, dtype: torch.dtype) -> Numbers:
    """Share and first place of logits that are not finite, by their counts `bad` and a key of each row (B, Hq, Lq)."""
    place = _first_place((bad > 0)[..., None])
    item, head, row, _ = place.clamp(min=0).unbind(1)
    place = torch.where(place[:, :1] < 0, -1, torch.stack([item, head, row, bad_at[item, head, row]], 1))
    return {"nonfinite": bad.sum((0, 2)).to(dtype) / pairs.clamp(min=1), "nonfinite_at": place}


def _none_bad(like: Tensor) -> Numbers:
    """The result for heads (H,) in which everything is finite."""
    return {"nonfinite": torch.zeros_like(like), "nonfinite_at": nowhere(like)}


def nowhere(like: Tensor) -> Tensor:
    """(H, 4): -1 for item, head, row and channel, as no head (H,) has a place."""
    return torch.full((like.shape[0], 4), -1, dtype=torch.int64, device=like.device)


def _first_place(bad: Tensor) -> Tensor:
    """(H, 4): item, head, row, channel of the first True of (B, H, L, D), in that order; -1."""
    _, heads, length, width = bad.shape
    head = torch.arange(heads, device=bad.device)
    if not bad.numel():
        return torch.full((heads, 4), -1, device=bad.device)
    flat = bad.transpose(0, 1).reshape(heads, -1).to(torch.uint8)
    at = flat.argmax(1)
    item, row, channel = at // (length * width), at // width % length, at % width
    return torch.where(flat.amax(1)[:, None] > 0, torch.stack([item, head, row, channel], 1), -1)


def _amin(rows: Tensor) -> Tensor:
    """(B, H, n) to (H,)."""
    return rows.amin((0, 2)) if rows.numel() else rows.new_full((rows.shape[1],), torch.inf)


def _amax(rows: Tensor) -> Tensor:
    return rows.amax((0, 2)) if rows.numel() else rows.new_full((rows.shape[1],), -torch.inf)
