"""The real tokens of each item, side by side from place 0 on, whatever side or holes the padding had.

Shape legend: B batch, H heads, L length, n width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._causal_padding import zero_padding


class RealTokens(NamedTuple):
    """Positions of the real tokens."""

    kept: Tensor  # bool (B|1, L)
    order: Tensor | None  # int64 (B|1, L): place of the t-th real token, then of the others; None: they come first
    number: Tensor  # int64 (B|1,): how many are real

    @classmethod
    def of(cls, kept: Tensor) -> RealTokens:
        """The real tokens, by booleans (B, L) that mark them."""
        first = kept.device.type == "cpu" and not torch.compiler.is_compiling()
        if first and bool((kept[:, 1:] <= kept[:, :-1]).all()):
            return cls(kept, None, kept.sum(1))
        return cls(kept, torch.argsort((~kept).to(torch.uint8), dim=1, stable=True), kept.sum(1))

    def gather(self, tensor: Tensor) -> Tensor:
        """(B, H, L, n) with the t-th real token in row t, and 0 after the last real token."""
        tensor = zero_padding(tensor, self.kept)
        return tensor if self.order is None else _taken(tensor, self.order)

    def scatter(self, tensor: Tensor) -> Tensor:
        """The inverse: row t goes back to the place of the t-th real token; all other rows are 0."""
        if self.order is not None:
            tensor = _taken(tensor, torch.argsort(self.order, dim=1))
        return zero_padding(tensor, self.kept)


def _taken(tensor: Tensor, places: Tensor) -> Tensor:
    batch, heads, _, width = tensor.shape
    return tensor.gather(2, places[:, None, :, None].expand(batch, heads, -1, width))
