"""Boolean attention masks of PyTorch as mask values, worked out once for all layers of a model.

Shapes: B batch, H query heads, Lq / Lk lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._masks import FromTensor, Mask, Padding


def mask_of(tensor: Tensor, given: Tensor) -> Mask:
    """The mask value of a boolean tensor, 4-D and broadcastable to (B, Hq, Lq, Lk); `given` is the caller's own."""
    return _made(tensor)


def _made(tensor: Tensor) -> Mask:
    _, heads, rows, keys = tensor.shape
    if heads == rows == 1 and keys > 1 and not torch.compiler.is_compiling():
        return Padding(tensor[:, 0, 0])
    return FromTensor(tensor)
