"""Activations as bytes hold them, in PyTorch's own operations."""

from __future__ import annotations

import torch.nn.functional as F

from saccade.operator._int8 import BLOCK


def rounded(x):
    """x with each block of a row on its 256 steps, as bytes hold it."""
    parts = F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    low, high = parts.amin(-1, keepdim=True).clamp_max(0), parts.amax(-1, keepdim=True).clamp_min(0)
    step = ((high - low) / 255).clamp_min(1e-30)
    zero = (-low / step).round()
    return (((parts / step + zero).round().clamp(0, 255) - zero) * step).flatten(-2)[..., : x.shape[-1]]
