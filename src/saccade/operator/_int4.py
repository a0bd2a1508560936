"""Weights rounded to 4 bits: bytes q step - zero, with q from 0 to 15 and whole numbers for each group of 32 entries of
a row, times a scale for 128 entries.

Shape legend: E width, F features, G groups of E, N blocks of 128 of E.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._groups import GroupedWeight, GroupForm, empty_groups
from ._int8 import PANEL

GROUP = 32  # terms
_SPAN = 4  # groups with one scale
_FORM = GroupForm(bits=4, span=_SPAN, dtype=torch.bfloat16, steps=True, zeros=True, bytes=True)
_LARGEST = 15  # q
_LARGEST_STEP = 17  # 15 of it are all bytes
_AT_ONCE = PANEL  # rows, which stay in the cache


def int4_weight(weight: Tensor) -> GroupedWeight:
    """W (F, E) of any float dtype, rounded.

    Raises:
        ValueError: W holds NaN or infinities.
    """
    features, width = weight.shape
    held = empty_groups(features, width, _FORM)
    groups = -(-width // GROUP)
    for first in range(0, features, _AT_ONCE):  # of a large weight not all is in float32 at once
        rows = weight.detach()[first : first + _AT_ONCE].float()
        parts = F.pad(rows, (0, -width % (_SPAN * GROUP))).unflatten(1, (-1, _SPAN, GROUP))  # (rows, N, 4, 32)
        least, most = parts.aminmax(dim=-1, keepdim=True)
        size = torch.maximum(least.amin(2, keepdim=True) / -128, most.amax(2, keepdim=True) / 127)
        if not bool(size.isfinite().all()):
            raise ValueError("weight: expected finite numbers, because int4 has neither NaN nor infinity")
        scale = size.to(torch.bfloat16)
        unit = torch.where(scale == 0, 1.0, scale.float())
        q, step, zero = _fitted(parts / unit, least / unit, most / unit)
        steps, zeros = (each.to(torch.int8).flatten(1)[:, :groups] for each in (step, zero))
        held.put(first, q.to(torch.uint8).flatten(1)[:, :width], scale.flatten(1), steps=steps, zeros=zeros)
    return held


def _fitted(parts: Tensor, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (..., 32), steps and zeros (..., 1) of groups (..., 32) in bytes, the best of six by the squared error: of two
    steps each the zero that centres the range, and twice that of least squares beside the last q."""
    widest = ((most - least) / _LARGEST).ceil_()
    best: list[Tensor] = []
    for fewer in (0, 1):
        step = (widest - fewer).clamp_(1, _LARGEST_STEP)
        zero = (step * (_LARGEST / 2) - (most + least) / 2).round_().clamp_(-128, 127)
        for _ in range(3):
            bottom, top = ((zero - 128) / step).ceil_(), ((zero + 127) / step).floor_()
            q = ((parts + zero) / step).round_().clamp_(bottom.clamp_min_(0), top.clamp_max_(_LARGEST))
            off = (q * step).sub_(parts)
            next_zero = off.mean(-1, keepdim=True).round_().clamp_(-128, 127)
            found = [off.sub_(zero).square_().sum(-1, keepdim=True), q, step, zero]
            if best:
                better = found[0] < best[0]
                found = [torch.where(better, new, old) for new, old in zip(found, best, strict=True)]
            best, zero = found, next_zero
    return best[1], best[2], best[3]
