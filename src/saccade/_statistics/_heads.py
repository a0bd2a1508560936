"""Ranges, norms, non-finite entries per head.

Shape legend: B items, H heads (Hq or Hkv), L rows or keys, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._histograms import even_bins, even_edges, tally
from ._rows import Rows


def of_vectors(tensor: Tensor, real: Tensor | None, histogram: bool) -> dict[str, Tensor]:
    """min, max, norm, nonfinite, nonfinite_at of (B, H, L, D) over the real vectors, bool (B|1, H|1, L), None: all."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    batch, heads, length, width = wide.shape
    norms = torch.linalg.vector_norm(wide, dim=-1)
    rows = None if real is None else real.expand(batch, heads, length)
    low, high = _range(wide, rows)
    entries = width * (wide.new_full((heads,), batch * length) if rows is None else rows.sum((0, 2)))
    finite = bad = None
    if not _sound(low, high):
        finite, bad = _sorted_out(wide, rows)
        low, high = _range_of(wide, finite)
        rows = finite.all(-1)
    found = {"min": low, "max": high, "norm": _average(norms, rows)} | _nonfinite(bad, entries, norms)
    if histogram:
        edges = even_edges(low, high)
        inside = finite if finite is not None or rows is None else rows[..., None]
        found |= {"edges": edges, "counts": tally(even_bins(wide, edges), inside, edges)}
    return found


def _range(wide: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    if not wide.numel():
        return wide.new_full((wide.shape[1],), torch.inf), wide.new_full((wide.shape[1],), -torch.inf)
    if rows is None:
        return wide.amin((0, 2, 3)), wide.amax((0, 2, 3))
    return _amin(torch.where(rows, wide.amin(-1), torch.inf)), _amax(torch.where(rows, wide.amax(-1), -torch.inf))


def _sound(low: Tensor, high: Tensor) -> bool:
    """Whether the ranges say that nothing real is NaN or infinite: those of nothing are +inf and -inf."""
    return bool(((torch.isfinite(low) & torch.isfinite(high)) | (low > high)).all())


def _sorted_out(wide: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which entries of real vectors are finite and which are not."""
    finite = torch.isfinite(wide)
    return (finite, ~finite) if rows is None else (finite & rows[..., None], ~finite & rows[..., None])


def _range_of(wide: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    low = torch.where(finite, wide, torch.inf).amin((0, 2, 3))
    return low, torch.where(finite, wide, -torch.inf).amax((0, 2, 3))


def _average(norms: Tensor, rows: Tensor | None) -> Tensor:
    """Over the rows (B, H, L), None: all; NaN where there is none."""
    return norms.mean((0, 2)) if rows is None else torch.where(rows, norms, 0.0).sum((0, 2)) / rows.sum((0, 2))


def _nonfinite(bad: Tensor | None, entries: Tensor, like: Tensor) -> dict[str, Tensor]:
    """Share and first place of True in bad (B, H, L, D), per head; None is all False."""
    if bad is None:
        heads = like.shape[1]
        return {"nonfinite": like.new_zeros(heads), "nonfinite_at": entries.new_full((heads, 4), -1)}
    found = bad.sum((0, 2, 3))
    return {"nonfinite": found.to(like.dtype) / entries.clamp(min=1), "nonfinite_at": _first_place(bad)}


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


def of_logits(rows: Rows, pairs: Tensor) -> dict[str, Tensor]:
    """min, max, nonfinite, nonfinite_at of the logits seen; `pairs` (Hq,) is how many there are."""
    share, place = _bad_pairs(rows.bad, rows.bad_at, pairs, rows.lse)
    return {"min": _amin(rows.low), "max": _amax(rows.high), "nonfinite": share, "nonfinite_at": place}


def of_weights(rows: Rows, seen: Tensor, counted: Tensor, pairs: Tensor) -> dict[str, Tensor]:
    """The same of the weights. A NaN or +inf among a row's logits makes each of its weights NaN."""
    spoiled = torch.isnan(rows.largest)
    share, place = _bad_pairs(torch.where(spoiled, seen, 0), rows.bad_at, pairs, rows.lse)
    fine = counted & ~spoiled
    low, high = torch.where(fine, rows.smallest, torch.inf), torch.where(fine, rows.largest, -torch.inf)
    return {"min": _amin(low), "max": _amax(high), "nonfinite": share, "nonfinite_at": place}


def _bad_pairs(bad: Tensor, bad_at: Tensor, pairs: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """From how many there are in each row and the first key of them, both (B, Hq, Lq)."""
    share = bad.sum((0, 2)).to(like.dtype) / pairs.clamp(min=1)
    place = _first_place((bad > 0)[..., None])
    item, head, row, _ = place.clamp(min=0).unbind(1)
    key = bad_at[item, head, row] if bad_at.numel() else row
    return share, torch.where(place[:, :1] < 0, -1, torch.stack([item, head, row, key], 1))


def _amin(rows: Tensor) -> Tensor:
    return rows.amin((0, 2)) if rows.numel() else rows.new_full((rows.shape[1],), torch.inf)


def _amax(rows: Tensor) -> Tensor:
    return rows.amax((0, 2)) if rows.numel() else rows.new_full((rows.shape[1],), -torch.inf)
