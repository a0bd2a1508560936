"""Rotary positions.

Shape legend: B batch, H heads, L length, D key width.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from .._masks._data import describe, whole
from .offsets import Offset
from .scaling import Scaling, check_number, frequencies
from .waves import StoredWaves, Waves

Layout = Literal["half", "interleaved"]
LAYOUTS = ("half", "interleaved")


class Rotary(nn.Module):
    """Rotary positions: turns pairs of features by an angle proportional to the position.

    The pair i of a token at position m is the real and the imaginary part of a complex number, which is multiplied by
    `exp(1j * m * base ** (-2 i / R))`, with R the number of turned features. The product of a turned query and a
    turned key depends only on their distance. Su et al., "RoFormer: Enhanced Transformer with Rotary Position
    Embedding" (2021), section 3.2.

    Which features are a pair is the layout. "half": features i and i + R/2 (GPT-NeoX, Llama and most models of today).
    "interleaved": features 2 i and 2 i + 1 (the paper, GPT-J). The two differ by a permutation of the features.

    Angles are computed in float64, features are turned in float32 (float64 for float64), and the result has the input's
    dtype. There is nothing to learn and nothing to save.

    Args:
        width: D. The number of turned features must be even.
        base: the longest wavelength is about `2 pi base`.
        layout: "half" or "interleaved".
        turned: R, how many features are turned, the first ones; the rest are left as they are (partial rotary
            positions: GPT-J, GPT-NeoX). None is all of them.
        scaling: `LinearScaling`, `NTKScaling`, `YaRNScaling` or `Llama3Scaling`, for contexts longer than those trained
            on. An attention factor multiplies turned features only.

    Raises:
        TypeError: a number or a scaling of another type.
        ValueError: an odd number of features, more of them than there are, a base of 1 or less, an unknown layout.

    Example:
        >>> import torch, saccade
        >>> rotary = saccade.positions.Rotary(width=16)
        >>> query, key = torch.randn(2, 1, 4, 5, 16)
        >>> here = rotary(query) @ rotary(key).mT
        >>> later = rotary(query, offset=100) @ rotary(key, offset=100).mT  # distances are the same
        >>> torch.allclose(here, later, atol=1e-4)
        True
    """

    def __init__(
        self,
        width: int,
        base: float = 10000.0,
        *,
        layout: Layout = "half",
        turned: int | None = None,
        scaling: Scaling | None = None,
    ):
        super().__init__()
        width = whole(width, "width")
        if turned is None and (width < 2 or width % 2):
            raise ValueError(f"width: rotary positions turn pairs of features, so it must be even, got {width}")
        check_rotary(base, layout, turned, scaling)
        if turned is not None and turned > width:
            raise ValueError(f"turned: at most all {width} features can be turned, got {turned}")
        self.width, self.base, self.layout, self.scaling = width, float(base), layout, scaling
        self.turned = width if turned is None else whole(turned, "turned")
        self._waves = Waves(self.turned, self.base, scaling)

    def forward(self, x: Tensor, offset: Offset = 0) -> Tensor:
        """Turn `x (B, H, L, D)`; same shape and dtype.

        `offset` says where the tokens stand: an int for the first token, (B,) int64 for each item's first token, (B, L)
        int64 for every token. Negative positions in a tensor (of left-padded rows) turn the other way
        round, as in the formula.
        """
        self._check(x)
        cos, sin = self.waves(x, offset)
        if cos.ndim == 3:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        part = x[..., : self.turned]
        first, second = part.chunk(2, dim=-1) if self.layout == "half" else (part[..., 0::2], part[..., 1::2])
        pairs = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.cat(pairs, dim=-1) if self.layout == "half" else torch.stack(pairs, dim=-1).flatten(-2)
        turned = turned.to(x.dtype)
        return turned if self.turned == self.width else torch.cat((turned, x[..., self.turned :]), dim=-1)

    def waves(self, x: Tensor, offset: Offset) -> tuple[Tensor, Tensor]:
        """cos and sin of the tokens of `x (B, ..., L, n)`: each (L, turned / 2), or (B, L, turned / 2) if the offset is
        a tensor."""
        return self._waves.of(x, offset)

    def _check(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise TypeError(f"x: must be floating point, got {describe(x)}")
        if x.ndim != 4:
            raise ValueError(f"x: expected shape (batch, heads, length, {self.width}), got {tuple(x.shape)}")
        if x.shape[-1] != self.width:
            raise ValueError(f"x: last axis must be {self.width} wide, got shape {tuple(x.shape)}")

    def extra_repr(self) -> str:
        words = [str(self.width), f"base={self.base:g}"]
        if self.layout != "half":
            words.append(f"layout={self.layout!r}")
        if self.turned != self.width:
            words.append(f"turned={self.turned}")
        if self.scaling is not None:
            words.append(f"scaling={self.scaling}")
        return ", ".join(words)


class StoredRotary(Rotary):
    """`Rotary` with the stored frequencies of a checkpoint. If they are rounded, the model was trained on the rounded
    frequencies.

    Attributes:
        frequencies: (width / 2,) radians a token, a buffer; it keeps its dtype when the model's is changed.
    """

    frequencies: Tensor

    def __init__(self, width: int, base: float = 10000.0):
        super().__init__(width, base)
        self._waves: StoredWaves = StoredWaves(width, base)
        self.register_buffer("frequencies", frequencies(width, base).float())

    def waves(self, x: Tensor, offset: Offset) -> tuple[Tensor, Tensor]:
        """As in `Rotary`."""
        self._waves.hold(self.frequencies)
        return super().waves(x, offset)

    def _apply(self, fn: Any, recurse: bool = True) -> StoredRotary:
        kept = self.frequencies

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else kept.to(moved.device)

        return super()._apply(move, recurse)


def check_rotary(base: float, layout: str, turned: int | None, scaling: Scaling | None) -> None:
    """Check the arguments of rotary positions, except for what depends on the width."""
    if check_number("base", base) <= 1.0:
        raise ValueError(f"base: must be greater than 1, got {base}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout: must be one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}")
    if turned is not None and (whole(turned, "turned") < 2 or turned % 2):
        raise ValueError(f"turned: features are turned in pairs, so it must be even and at least 2, got {turned}")
    if scaling is not None and not isinstance(scaling, Scaling):
        known = ", ".join(kind.__name__ for kind in get_args(Scaling))
        raise TypeError(f"scaling: must be {known} or None, got {describe(scaling)}")
