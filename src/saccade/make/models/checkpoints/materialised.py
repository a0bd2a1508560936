"""Memory for a model that was built on the meta device."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from ....operator.nn import MultiHeadAttention
from ....operator.nn._initial import begin_anew

M = TypeVar("M", bound=nn.Module)


def materialised(model: M, dtype: torch.dtype, device: torch.device | str) -> M:
    """The model with memory of its own, not filled; what is computed and never stored is computed."""
    model = model.to(dtype).to_empty(device=device)
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            begin_anew(module.mechanism)  # what it draws is in no published file
        elif any(True for _ in module.buffers(recurse=False)):
            begin_anew(module)
    return model
