"""What positions are, written from the papers' equations with loops and complex numbers. Nothing here is saccade's."""

from __future__ import annotations

import cmath
import math

import torch
from torch import Tensor


def theta(width: int, base: float = 10000.0) -> list[float]:
    """Su et al. 2021, equation 15: theta_i = base^(-2 (i - 1) / d)."""
    return [base ** (-2 * i / width) for i in range(width // 2)]


def pairs(width: int, layout: str) -> list[tuple[int, int]]:
    half = [(i, i + width // 2) for i in range(width // 2)]
    return half if layout == "half" else [(2 * i, 2 * i + 1) for i in range(width // 2)]


def turned(x: Tensor, positions: Tensor, angles: list[float], layout: str = "half", factor: float = 1.0) -> Tensor:
    """x (B, H, L, D) with its first 2 len(angles) features turned; positions (B, L)."""
    out = x.double().clone()
    for b in range(x.shape[0]):
        for m in range(x.shape[2]):
            for (one, other), angle in zip(pairs(2 * len(angles), layout), angles, strict=True):
                z = torch.complex(x[b, :, m, one].double(), x[b, :, m, other].double())
                z = z * (factor * cmath.exp(1j * positions[b, m].item() * angle))
                out[b, :, m, one], out[b, :, m, other] = z.real, z.imag
    return out


def wave(position: float, width: int, base: float = 10000.0) -> list[float]:
    """Vaswani et al. 2017, section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(the same)."""
    out = []
    for feature in range(width):
        angle = position / base ** (2 * (feature // 2) / width)
        out.append(math.sin(angle) if feature % 2 == 0 else math.cos(angle))
    return out


def rotation(shift: float, width: int, base: float = 10000.0) -> Tensor:
    """R(k) with PE(p + k) = R(k) PE(p): for each pair (sin, cos) a rotation by k times its frequency. Even widths."""
    blocks = []
    for angle in theta(width, base):
        a = shift * angle
        blocks.append(torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]], dtype=torch.float64))
    return torch.block_diag(*blocks)


def of_each_token(offset: int | Tensor, batch: int, length: int) -> Tensor:
    """Positions (B, L) of an offset, counted one by one."""
    if isinstance(offset, int):
        return torch.tensor([[offset + i for i in range(length)] for _ in range(batch)])
    if offset.ndim == 1:
        return torch.tensor([[int(first) + i for i in range(length)] for first in offset])
    return offset
