"""Norms of features on the last axis, by name."""

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


class BatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` of features on the last axis: means and variances run over all tokens of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., E) to the same shape."""
        return super().forward(x.flatten(0, -2)).view(x.shape)


def make_norm(name: str, width: int, *, bias: bool = False, eps: float | None = None) -> nn.Module:
    """A norm of features on the last axis, `width` wide.

    "layer": (x - mean) / sqrt(variance + eps) * weight (+ bias), Ba et al., "Layer Normalization" (2016).
    "rms": x / sqrt(mean(x^2) + eps) * weight, Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).

    "batch": (x - mean) / sqrt(variance + eps) * weight + bias, each feature's over the batch in training, and of what
    was seen then in evaluation: Ioffe and Szegedy, "Batch Normalization" (2015), algorithms 1 and 2.

    Args:
        name: "layer", "rms" or "batch".
        bias: whether a layer norm has one; an RMS norm never has, a batch norm always.
        eps: None is 1e-5 for "layer" and "batch" and the dtype's machine epsilon for "rms", as in PyTorch.

    Raises:
        ValueError: an unknown name.
    """
    check_choice("norm", name, NORMS)
    if name == "rms":
        return RMSNorm(width, eps=eps)
    if name == "batch":
        return BatchNorm(width, eps=1e-5 if eps is None else eps)
    return nn.LayerNorm(width, eps=1e-5 if eps is None else eps, bias=bias)
