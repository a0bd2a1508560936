"""Rotary positions.

Shapes: B batch, H heads, L length, D key width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotary positions: turns pairs of features by an angle proportional to the position.

    Features `d` and `d + D/2` of a token at position `m` are the real and imaginary part of a complex number, which is
    multiplied by `exp(i * m * base**(-2 d / D))`. The product of a turned query and a turned key depends on their
    distance alone. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021); the pairing of
    halves is the one of GPT-NeoX and Llama.

    Angles and turning are computed in float32 (float64 for float64); the result has the input's dtype. There is
    nothing to learn and nothing to save.

    Args:
        width: D, an even number.
        base: the longest wavelength is about `2 pi base`.
    """

    def __init__(self, width: int, base: float = 10000.0):
        super().__init__()
        if width < 2 or width % 2:
            raise ValueError(f"width: rotary positions turn pairs of features, so it must be even, got {width}")
        if not base > 1.0:
            raise ValueError(f"base: must be greater than 1, got {base}")
        self.width, self.base = width, float(base)
        self._cos: Tensor | None = None
        self._sin: Tensor | None = None

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Turn `x (B, H, L, D)`, whose first token stands at position `offset`; same shape and dtype."""
        if x.shape[-1] != self.width:
            raise ValueError(f"x: last axis must be {self.width} wide, got shape {tuple(x.shape)}")
        if offset < 0:
            raise ValueError(f"offset: positions start at 0, got {offset}")
        cos, sin = self._tables(offset, x)
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(x.dtype)

    def _tables(self, offset: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles, each (L, D/2); kept between calls, since every layer asks for the same ones."""
        end = offset + x.shape[-2]
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        known = self._cos
        if known is None or known.shape[0] < end or known.device != x.device or known.dtype != dtype:
            # Tables made in inference mode could not be used for training later.
            with torch.inference_mode(False):
                self._cos, self._sin = self._compute(_round_up(end), x.device, dtype)
        assert self._cos is not None and self._sin is not None
        return self._cos[offset:end], self._sin[offset:end]

    def _compute(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # Angles in float64: m * frequency loses its fraction in float32 once m is large.
        exponents = torch.arange(0, self.width, 2, device=device, dtype=torch.float64) / self.width
        positions = torch.arange(length, device=device, dtype=torch.float64)
        angles = torch.outer(positions, self.base**-exponents)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cos": None, "_sin": None}

    def extra_repr(self) -> str:
        return f"{self.width}, base={self.base:g}"


def _round_up(length: int) -> int:
    """The next power of two, so that decoding token by token rebuilds the tables a few times only."""
    return 1 << max(length - 1, 63).bit_length()
