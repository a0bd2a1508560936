"""Norms over the last axis, by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import NORMS, check_choice


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` that computes in its weight's dtype, also where autocast hands it half precision."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., E) to the same shape and dtype."""
        weight = self.weight
        if x.dtype == weight.dtype:
            return torch.rms_norm(x, self.normalized_shape, weight, self.eps)
        return torch.rms_norm(x.to(weight.dtype), self.normalized_shape, weight, self.eps).to(x.dtype)


def make_norm(name: str, width: int, *, bias: bool = False, eps: float | None = None) -> nn.Module:
    """A norm over the last axis, `width` wide.

    "layer": (x - mean) / sqrt(variance + eps) * weight (+ bias), Ba et al., "Layer Normalization" (2016).
    "rms": x / sqrt(mean(x^2) + eps) * weight, Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).

    Args:
        name: "layer" or "rms".
        bias: whether a layer norm has one; an RMS norm never has.
        eps: None is 1e-5 for "layer" and the dtype's machine epsilon for "rms", as in PyTorch.

    Raises:
        ValueError: an unknown name.
    """
    check_choice("norm", name, NORMS)
    if name == "rms":
        return RMSNorm(width, eps=eps)
    return nn.LayerNorm(width, eps=1e-5 if eps is None else eps, bias=bias)
