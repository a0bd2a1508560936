"""Histograms per head: even bins between the extremes, and octaves for weights.

Shape legend: B items, H heads, n bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 64
OCTAVES = 32


def even_edges(low: Tensor, high: Tensor) -> Tensor:
    """Evenly spaced bin edges (H, BINS + 1) from the smallest to the largest entry of each head. A head with one
    distinct entry has edges around it; a head without entries has edges from 0 to 1."""
    none = low > high
    low, high = torch.where(none, 0.0, low), torch.where(none, 1.0, high)
    alone = torch.isinf(_bins_per_unit(low, high))  # the same number, or numbers that no bin could lie between
    # Around a huge number a half is nothing; beyond the greatest one there is none.
    around, most = torch.clamp(low.abs() * 2.0**-10, min=0.5), torch.finfo(low.dtype).max
    low = torch.where(alone, (low - around).clamp(min=-most), low)
    high = torch.where(alone, (high + around).clamp(max=most), high)
    steps = torch.linspace(0, 1, BINS + 1, dtype=low.dtype, device=low.device)
    return low[:, None] * (1 - steps) + high[:, None] * steps


def even_bins(entries: Tensor, edges: Tensor) -> Tensor:
    """The bin of each of the entries (B, H, ...), int32, by arithmetic: within rounding of an edge it may be either's.

    Entries that are not finite come out anywhere.
    """
    low, high = (_across(edges[:, column], entries) for column in (0, -1))
    place = (entries * 0.5).sub_(low * 0.5).mul_(_bins_per_unit(low, high))
    return place.clamp_(0, BINS - 1).to(torch.int32)


def _bins_per_unit(low: Tensor, high: Tensor) -> Tensor:
    """Bins per unit; +inf if the numbers are too close. Both numbers are halved first, because their difference may
    overflow."""
    return BINS / (high * 0.5 - low * 0.5)


def octaves(heads: int, like: Tensor) -> Tensor:
    """The edges of weights, (H, OCTAVES + 2): 0, 2^-32, 2^-31, ..., 1/2, 1."""
    powers = torch.exp2(torch.arange(-OCTAVES, 1, dtype=like.dtype, device=like.device))
    return torch.cat([powers.new_zeros(1), powers]).expand(heads, -1)


def octave_bins(weights: Tensor) -> Tensor:
    """The bin of each weight in [0, 1], int32, from its exponent: exact."""
    # frexp: w = m 2^e with m in [1/2, 1), so w lies in [2^(e-1), 2^e)
    bins = (torch.frexp(weights).exponent + OCTAVES).clamp_(0, OCTAVES)
    return bins.masked_fill_(weights == 0, 0)


def tally(bins: Tensor, inside: Tensor | None, edges: Tensor) -> Tensor:
    """The number of entries in each bin of each head, (H, n) int64. `bins` (B, H, ...) are bin numbers, and only those
    `inside` count (all if None)."""
    heads, count = edges.shape[0], edges.shape[1] - 1
    if inside is not None:
        bins = torch.where(inside, bins, count)
    place = bins + _across(torch.arange(heads, dtype=torch.int32, device=bins.device) * (count + 1), bins)
    return torch.bincount(place.flatten(), minlength=heads * (count + 1)).view(heads, count + 1)[:, :count]


def _across(of_heads: Tensor, entries: Tensor) -> Tensor:
    """Numbers of heads (H,) in a shape that broadcasts to (B, H, ...)."""
    return of_heads.view(-1, *[1] * (entries.dim() - 2))
