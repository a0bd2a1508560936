"""RMS norms, and feed-forward layers that end in a norm.

Shape legend: ... any axes, E width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..operator._products import in_one_pass, layer_norm
from ._fused_layers import ARGUMENTS, NOT_CALLED, OTHER, Activated, ProvedLayer, Residual


class RootMeanSquare(ProvedLayer):
    """x / sqrt(mean(x^2) + eps) * weight in one pass, or with (1 + weight) as in Gemma. The first call determines which
    of the two formulas the module uses."""

    kind = "RMS norm"

    def __init__(self, name: str, module: nn.Module, eps: str):
        super().__init__(name, module)
        self._eps, self._added = eps, 0.0

    def _why_not(self, args: tuple[Any, ...]) -> str | None:
        refused = super()._why_not(args)
        fits = len(args) == 1 and (
            refused or args[0].dtype == getattr(self.module.weight, "dtype", None) == torch.float32
        )
        return refused if fits else ARGUMENTS

    def compute(self, *args: Any) -> Tensor | None:
        weight: Tensor = self.module.weight  # type: ignore[assignment]
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


class NormedFeedForward(ProvedLayer):
    """norm(f(x W1^T + b1) W2^T + b2 + x): the method of transformers' encoder layers that calls two modules for it."""

    kind, method = "feed-forward, sum and norm", "feed_forward_chunk"

    def __init__(self, name: str, module: nn.Module, inner: Activated, outer: Residual):
        super().__init__(name, module)
        self.inner, self.outer = inner, outer

    def parts(self) -> list[nn.Module]:
        return [self.module, *self.module.intermediate.modules(), *self.module.output.modules()]  # type: ignore[union-attr]

    def compute(self, *args: Any) -> Tensor | None:
        if len(args) != 1:
            return None
        inner, outer, norm = self.inner, self.outer, layer_norm(self.outer.norm)
        if outer.norm is None or norm is not None:
            out = in_one_pass([inner.linear, outer.linear], args[0], inner.activation, ("add", args[0]), norm)
            if out is not None:
                return out
        return outer.compute(inner.compute(*args), args[0])
