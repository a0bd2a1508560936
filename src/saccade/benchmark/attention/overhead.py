"""What a call costs before it computes anything: an operator that allocates its results and does nothing else.

Of three inputs it makes an uninitialised output, and in a backward pass uninitialised gradients of the inputs. Time
below it no operator of PyTorch called from Python has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .cases import CaseInputs
from .checking import staged


class _Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return query.new_empty(*query.shape[:-1], value.shape[-1])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(leaf) for leaf in ctx.saved_tensors)


def empty_call(inputs: CaseInputs) -> Callable[[], object]:
    """The stage of the case, with nothing computed."""
    query, key, value = inputs.leaves
    if inputs.case.records:
        return staged(lambda: _Empty.apply(query, key, value), inputs)
    return staged(lambda: query.new_empty(*query.shape[:-1], value.shape[-1]), inputs)
