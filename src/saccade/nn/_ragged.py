"""Nested tensors: a batch of unequal lengths runs as one packed row, each item a document of its own.

Shapes: B batch, j its lengths, T their sum, E width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._masks import Mask, as_mask
from ..batching import nested_like, packed_nested


def through_packed(forward: Callable[..., Tensor], x: Tensor, mask: Mask | Tensor | None, **rest: Any) -> Tensor:
    """`forward` of a nested `x` (B, j, E): its items side by side in one row (1, T, E) that cannot see each other.

    Positions restart with each item. The mask may only speak of distances, since all items share it.
    """
    packed = packed_nested(x)
    out = forward(packed.row, packed.mask(as_mask(mask)), offset=packed.positions, **rest)
    return nested_like(out, x)


def refuse_with_nested(**given: object) -> None:
    """ValueError for arguments that a nested batch does not take."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}: not with a nested batch, which knows its own lengths; pad it instead")
