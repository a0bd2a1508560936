"""RMS norms.

Shape legend: ... any axes, E width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ._fused_layers import NOT_CALLED, OTHER, ProvedLayer


class RootMeanSquare(ProvedLayer):
    """x / sqrt(mean(x^2) + eps) * weight in one pass, or with (1 + weight) as in Gemma. The first call determines which
    of the two formulas the module uses."""

    kind = "RMS norm"

    def __init__(self, name: str, module: nn.Module, eps: str):
        super().__init__(name, module)
        self._eps, self._added = eps, 0.0

    def compute(self, *args: Any) -> Tensor | None:
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        if len(args) != 1 or args[0].dtype != weight.dtype or args[0].dtype != torch.float32:
            return None
        if self._added:
            weight = weight + self._added
        return torch.rms_norm(args[0], weight.shape, weight, getattr(self.module, self._eps))

    def _agrees(self, args: tuple[Tensor, ...], expected: Any) -> bool:
        self._added = 0.0
        fine = super()._agrees(args, expected)
        if self.state != OTHER:
            return fine
        self.state, self._added = NOT_CALLED, 1.0
        return super()._agrees(args, expected)
