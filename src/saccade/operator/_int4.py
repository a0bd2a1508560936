"""Linear layers with weights of 4 bits, on CPUs: x W^T + b.

Weights are integers from -8 to 7 with a scale for each group of 32 entries of a row: the best of nine candidates by
the squared error. Activations become bytes with scales for the same groups, as they come. Products of a group are
summed in int32, exactly (`native/int4.h`).

Shape legend: ... any axes, E width, F features, G groups of E, P panels of F.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._backends.native import _kernels
from ._int8 import PANEL, multiply_rounded

GROUP = 1 if _kernels.module is None else _kernels.module.int4_group  # terms
_LEAST, _LARGEST = -8, 7
_CANDIDATES = [8 + 0.2 * step for step in range(-4, 5)]  # of the integer that the entry of largest magnitude becomes
_AT_ONCE = 1  # panel, which stays in the cache


class Int4Weight(NamedTuple):
    """A weight W (F, E) as integers q and a scale for each group of its rows, in the order in which the kernel reads.

    `packed` (P, E / 8, 64, 4) holds q + 8, two in a byte, with 8 up to whole panels and groups; `scales` (P, G, 64) are
    bfloat16.
    """

    packed: Tensor
    scales: Tensor
    features: int
    width: int

    def integers(self) -> Tensor:
        """q (F, E), int8."""
        halves = torch.stack((self.packed & 15, self.packed >> 4), 2)  # (P, E / 8, 2, 64, 4)
        rows = halves.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1)
        return rows[: self.features, : self.width].to(torch.int8) - 8

    def dense(self) -> Tensor:
        """The weight that the products are with: scale q (F, E), float32."""
        scale = self.scales.transpose(1, 2).flatten(0, 1)[: self.features].float()  # (F, G)
        return self.integers() * scale.repeat_interleave(GROUP, 1)[:, : self.width]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b without gradients: `multiply_int4`."""
        return multiply_int4(x, self, bias)


def int4_weight(weight: Tensor) -> Int4Weight:
    """W (F, E) of any float dtype, rounded.

    Raises:
        ValueError: W holds NaN or infinities.
    """
    features, width = weight.shape
    groups, panels = -(-width // GROUP), -(-features // PANEL)
    packed = torch.empty(panels, groups * GROUP // 8, PANEL, 4, dtype=torch.uint8)
    scales = torch.empty(panels, groups, PANEL, dtype=torch.bfloat16)
    for first in range(0, panels, _AT_ONCE):  # of a large weight not all is in float32 at once
        some = slice(first, first + _AT_ONCE)
        rows = weight.detach()[first * PANEL : (first + _AT_ONCE) * PANEL].float()
        parts = F.pad(rows, (0, -width % GROUP, 0, -len(rows) % PANEL)).unflatten(1, (-1, GROUP))  # (64 P, G, 32)
        q, scale = _fitted(parts)
        scales[some] = scale[:, :, 0].unflatten(0, (-1, PANEL)).transpose(1, 2)
        halves = (q + 8).to(torch.uint8).view(-1, PANEL, groups * GROUP // 8, 2, 4)
        packed[some] = (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).transpose(1, 2)
    return Int4Weight(packed, scales, features, width)


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


def multiply_int4(x: Tensor, weight: Int4Weight, bias: Tensor | None, quads: bool = True) -> Tensor:
    """x (..., E), float32 or bfloat16, to (..., F) of its dtype. See `multiply_rounded`."""
    return multiply_rounded(_kernels.module.int4_product, x, weight, bias, quads)
