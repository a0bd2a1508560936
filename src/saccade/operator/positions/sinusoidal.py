"""Sinusoidal positions, added to embeddings.

Shape legend: B batch, L length, E model width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from .._masks._data import describe, whole
from .offsets import Offset
from .waves import Waves


class Sinusoidal(nn.Module):
    """Adds waves of different lengths to the embeddings: `x + PE(position)`, (B, L, E) -> (B, L, E).

    `PE(p)[2 i] = sin(p * base ** (-2 i / E))` and `PE(p)[2 i + 1] = cos(p * base ** (-2 i / E))`: Vaswani et al.,
    "Attention Is All You Need" (2017), section 3.5. `PE(p + k)` is a rotation of `PE(p)` that depends only on k; an
    odd width leaves out the last cosine. It works for any length: there is no table, nothing to learn and nothing to
    save.

    Entries have a mean square of 1/2, so embeddings should enter with a variance of about 1 (the paper multiplies
    them by sqrt(E)).

    Args:
        width: E, at least 1.
        base: wavelengths go from `2 pi` up to about `2 pi base`.
        layout: "interleaved", sine and cosine in turn as in the paper, or "halves", all sines and then all cosines, as
            in the authors' own code and in Marian.

    Raises:
        TypeError: a width that is not an int, a base that is not a number.
        ValueError: a width below 1, a base of 1 or less, an unknown layout.

    Example:
        >>> import torch, saccade
        >>> positions = saccade.positions.Sinusoidal(width=4)
        >>> positions(torch.zeros(1, 3, 4))
        tensor([[[ 0.0000,  1.0000,  0.0000,  1.0000],
                 [ 0.8415,  0.5403,  0.0100,  0.9999],
                 [ 0.9093, -0.4161,  0.0200,  0.9998]]])
    """

    def __init__(self, width: int, *, base: float = 10000.0, layout: Literal["interleaved", "halves"] = "interleaved"):
        super().__init__()
        self.width = whole(width, "width", least=1)
        if layout not in ("interleaved", "halves"):
            raise ValueError(f"layout: expected 'interleaved' or 'halves', got {layout!r}")
        self.layout = layout
        self._waves = Waves(self.width, base)
        self.base = self._waves.base

    def forward(self, x: Tensor, offset: Offset = 0) -> Tensor:
        """`x (B, L, E)` plus the positions' waves, in x's dtype (added in float32 at least, then rounded).

        `offset` says where the tokens stand: an int for the first token, (B,) int64 for each item's first token, (B, L)
        int64 for every token.
        """
        check_embedded(x, self.width)
        return (x + self._laid_out(*self._waves.of(x, offset))).to(x.dtype)

    def table(self, positions: Tensor) -> Tensor:
        """PE of any positions (...,), whole or not, negative or not: float64 (..., E)."""
        if positions.dtype == torch.bool or positions.is_complex():
            raise TypeError(f"positions: must be numbers, got {describe(positions)}")
        return self._laid_out(*self._waves.at(positions, torch.float64))

    def _laid_out(self, cos: Tensor, sin: Tensor) -> Tensor:
        if self.layout == "halves":
            return torch.cat((sin, cos), dim=-1)[..., : self.width]
        return torch.stack((sin, cos), dim=-1).flatten(-2)[..., : self.width]

    def extra_repr(self) -> str:
        layout = "" if self.layout == "interleaved" else f", layout={self.layout!r}"
        return f"{self.width}, base={self.base:g}{layout}"


def check_embedded(x: Tensor, width: int) -> None:
    """TypeError or ValueError unless x is (B, L, width) and floating point."""
    if not x.is_floating_point():
        raise TypeError(f"x: must be floating point, got {describe(x)}")
    if x.ndim != 3 or x.shape[-1] != width:
        raise ValueError(f"x: expected shape (batch, length, {width}), got {tuple(x.shape)}")
