"""Nested tensors: a batch of unequal lengths runs as one packed row, in which each item is a separate document.

What reads with a mechanism instead of softmax attention runs as a padded batch instead: few mechanisms can tell
documents in a row apart, and all of them know padding.

Shape legend: B batch, j its lengths, T their sum, L the longest, E width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._masks import Mask, as_mask
from ..batching import nested_like, packed_nested, pad, unpack, unpad
from .config import AttentionConfig


def through_nested(
    forward: Callable[..., Tensor], x: Tensor, mask: Mask | Tensor | None, attention: AttentionConfig, **rest: Any
) -> Tensor:
    """`forward` of a nested `x` (B, j, E): packed for softmax attention, padded for a mechanism."""
    through = through_packed if attention.mechanism is None else through_padded
    return through(forward, x, mask, **rest)


def through_padded(forward: Callable[..., Tensor], x: Tensor, mask: Mask | Tensor | None, **rest: Any) -> Tensor:
    """`forward` of a nested `x` (B, j, E) as a batch (B, L, E) padded on the right."""
    packed = packed_nested(x)
    if not packed.lengths:
        return nested_like(packed.row, x)
    padded, padding = pad(unpack(packed.row, packed))
    out = forward(padded, mask, padding=padding, **rest)
    return nested_like(torch.cat(unpad(out, padding))[None], x)


def through_packed(forward: Callable[..., Tensor], x: Tensor, mask: Mask | Tensor | None, **rest: Any) -> Tensor:
    """`forward` of a nested `x` (B, j, E): its items side by side in one row (1, T, E) that cannot see each other.

    Positions restart with each item. The mask may depend only on distances, since all items share it.
    """
    packed = packed_nested(x)
    out = forward(packed.row, packed.mask(as_mask(mask)), offset=packed.positions, **rest)
    return nested_like(out, x)


def refuse_with_nested(**given: object) -> None:
    """ValueError for arguments that a nested batch does not take."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}: not supported with a nested batch, which has its own lengths; pad the batch instead"
            )
