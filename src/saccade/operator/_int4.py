"""Weights rounded to 4 bits: integers from -8 to 7 with a scale for each group of 32 entries of a row, the best of nine
candidates by the squared error.

Shape legend: E width, F features, G groups of E, P panels of F.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._groups import GroupedWeight, GroupForm, empty_groups
from ._int8 import PANEL

GROUP = 32  # terms
_FORM = GroupForm(bits=4, group=GROUP, offset=8, dtype=torch.bfloat16)
_LEAST, _LARGEST = -8, 7
_CANDIDATES = [8 + 0.2 * step for step in range(-4, 5)]  # of the integer that the entry of largest magnitude becomes
_AT_ONCE = PANEL  # rows, which stay in the cache


def int4_weight(weight: Tensor) -> GroupedWeight:
    """W (F, E) of any float dtype, rounded.

    Raises:
        ValueError: W holds NaN or infinities.
    """
    features, width = weight.shape
    held = empty_groups(features, width, _FORM)
    for first in range(0, features, _AT_ONCE):  # of a large weight not all is in float32 at once
        rows = weight.detach()[first : first + _AT_ONCE].float()
        q, scale = _fitted(F.pad(rows, (0, -width % GROUP)).unflatten(1, (-1, GROUP)))  # (rows, G, 32)
        held.put(first, (q + 8).to(torch.uint8).flatten(1)[:, :width], scale[:, :, 0])
    return held


def _fitted(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Integers (..., 32) and scales (..., 1) in bf16: for each candidate the scale of least squared error, and of these
    the best (as `make_qx_quants` of llama.cpp does)."""
    extreme = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))
    if not bool(extreme.isfinite().all()):
        raise ValueError("weight: expected finite numbers, because int4 has neither NaN nor infinity")
    extreme = torch.where(extreme == 0, 1.0, -extreme)
    unit = parts / extreme  # whose squares neither overflow nor vanish
    best_q = best_scale = least = torch.empty(0)
    for candidate in _CANDIDATES:
        q = (unit * candidate).round_().clamp_(_LEAST, _LARGEST)
        fitted = (unit * q).sum(-1, keepdim=True) / (q * q).sum(-1, keepdim=True).clamp_min(1)
        scale = (fitted * extreme).to(torch.bfloat16)
        error = (unit - scale / extreme * q).square_().sum(-1, keepdim=True)
        if candidate == _CANDIDATES[0]:
            best_q, best_scale, least = q, scale, error
            continue
        better = error < least
        best_q, best_scale = torch.where(better, q, best_q), torch.where(better, scale, best_scale)
        least = torch.where(better, error, least)
    return best_q, best_scale
