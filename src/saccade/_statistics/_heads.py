"""Ranges, norms, non-finite entries and histograms per head.

Shape legend: B items, H heads (Hq or Hkv), L rows or keys, D width, n bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._rows import Rows

BINS = 64


def of_vectors(tensor: Tensor, real: Tensor | None, histogram: bool) -> dict[str, Tensor]:
    """min, max, norm, nonfinite, nonfinite_at of (B, H, L, D) over the real vectors, bool (B|1, H|1, L), None: all."""
    wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    batch, heads, length, width = wide.shape
    norms = torch.linalg.vector_norm(wide, dim=-1)
    kept = None if real is None else real.expand(batch, heads, length)
    rows = torch.full((heads,), batch * length, device=wide.device) if kept is None else kept.sum((0, 2))
    low, high = _range(wide, kept)
    if _sound(low, high, rows):
        bad = None
        good = kept
    else:
        bad = ~torch.isfinite(wide)
        bad = bad if kept is None else bad & kept[..., None]
        finite = ~bad if kept is None else ~bad & kept[..., None]
        low, high = _range_where(wide, finite)
        good = finite.all(-1)
    shown = norms if good is None else torch.where(good, norms, 0.0)
    count = rows if good is None else good.sum((0, 2))
    found = {"min": low, "max": high, "norm": shown.sum((0, 2)) / count}
    found |= _nonfinite(bad, rows * width, norms)
    if histogram:
        inside = torch.isfinite(wide) if kept is None else torch.isfinite(wide) & kept[..., None]
        edges = even_edges(low, high)
        found |= {"counts": counts(wide, inside, edges), "edges": edges}
    return found


def _range(wide: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    if not wide.numel():
        return wide.new_full((wide.shape[1],), torch.inf), wide.new_full((wide.shape[1],), -torch.inf)
    if kept is None:
        return wide.amin((0, 2, 3)), wide.amax((0, 2, 3))
    low = torch.where(kept, wide.amin(-1), torch.inf).amin((0, 2))
    return low, torch.where(kept, wide.amax(-1), -torch.inf).amax((0, 2))


def _range_where(wide: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    low = torch.where(kept, wide, torch.inf).amin((0, 2, 3))
    return low, torch.where(kept, wide, -torch.inf).amax((0, 2, 3))


def _sound(low: Tensor, high: Tensor, rows: Tensor) -> bool:
    """Whether the ranges say that nothing real is NaN or infinite. Not asked where the answer is far away."""
    if low.device.type != "cpu":
        return False
    return bool(((torch.isfinite(low) & torch.isfinite(high)) | (rows == 0)).all())


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


# --- histograms ---------------------------------------------------------------------------------------------------


def even_edges(low: Tensor, high: Tensor) -> Tensor:
    """(H, BINS + 1) from the least entry to the greatest; around a single one, and 0 to 1 around none."""
    none = low > high
    low, high = torch.where(none, 0.0, low), torch.where(none, 1.0, high)
    alone = low == high
    low, high = torch.where(alone, low - 0.5, low), torch.where(alone, high + 0.5, high)
    steps = torch.linspace(0, 1, BINS + 1, dtype=low.dtype, device=low.device)
    return low[:, None] * (1 - steps) + high[:, None] * steps


def octaves(heads: int, like: Tensor) -> Tensor:
    """The edges of weights, (H, 34): 0, 2^-32, 2^-31, ..., 1/2, 1."""
    powers = torch.exp2(torch.arange(-32, 1, dtype=like.dtype, device=like.device))
    return torch.cat([powers.new_zeros(1), powers]).expand(heads, -1)


def counts(entries: Tensor, inside: Tensor | None, edges: Tensor) -> Tensor:
    """How many entries (B, H, ...) lie in each bin of their head, (H, n) int64, where `inside`."""
    heads, bins = edges.shape[0], edges.shape[1] - 1
    flat = entries.transpose(0, 1).reshape(heads, -1).contiguous()
    found = torch.searchsorted(edges.contiguous(), flat, right=True).clamp_(1, bins) - 1
    if inside is not None:
        inside = inside.expand(entries.shape).transpose(0, 1).reshape(heads, -1)
        found = torch.where(inside, found, bins)
    found += torch.arange(heads, device=found.device)[:, None] * (bins + 1)
    return torch.bincount(found.flatten(), minlength=heads * (bins + 1)).view(heads, bins + 1)[:, :bins]
