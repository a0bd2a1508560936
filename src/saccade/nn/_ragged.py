"""Nested tensors: a batch of unequal lengths runs as one packed row, each item a document of its own.

Shapes: B batch, j its lengths, T their sum, E width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._masks import Causal, Mask, Window, as_mask
from .._masks._algebra import And, Not, Or
from ..batching import nested_like, packed_nested


def through_packed(forward: Callable[..., Tensor], x: Tensor, mask: Mask | Tensor | None, **rest: Any) -> Tensor:
    """`forward` of a nested `x` (B, j, E): its items side by side in one row (1, T, E) that cannot see each other.

    Positions restart with each item. The mask may only speak of distances, since all items share it.
    """
    packed = packed_nested(x)
    mask = as_mask(mask)
    if mask is not None and not _of_distances(mask):
        raise ValueError(
            f"mask: {mask!r} speaks of places in one sequence, but a nested batch runs as one row of several; "
            "use masks of distances (Causal, Window), or pad the batch"
        )
    mask = packed.documents if mask is None else mask & packed.documents
    return nested_like(forward(packed.row, mask, offset=packed.positions, **rest), x)


def refuse_with_nested(**given: object) -> None:
    """ValueError for arguments that a nested batch does not take."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}: not with a nested batch, which knows its own lengths; pad it instead")


def _of_distances(mask: Mask) -> bool:
    if isinstance(mask, And | Or | Not):
        return all(_of_distances(part) for part in mask._parts())
    return isinstance(mask, Causal | Window)
