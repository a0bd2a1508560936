"""Masks of a call, combined from the mask, the padding and the window that a module is given.

Shape legend: B batch, Lq / Lk rows and keys, C width of a context.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from .._biases import Bias, RelativeScores, as_bias
from .._masks import Causal, Mask, Padding
from .._masks._algebra import And
from .._masks._placement import At
from .._scores._score import Score
from ..batching import fill_padding
from ..positions import Offset
from .cache import GrowingLayer


def joined(mask: Mask | None, other: Mask | None) -> Mask | None:
    """The intersection of two masks, placed as `mask` is; None shows everything."""
    if mask is None or other is None:
        return other if mask is None else mask
    if isinstance(mask, At):
        return At(mask.part & other, mask.offset)
    return mask & other


def causal(mask: Mask | None) -> Mask:
    """`mask` and nothing later than the query."""
    if mask is None:
        return Causal()
    if any(isinstance(factor, Causal) for factor in _factors(mask)):
        return mask
    whole = joined(mask, Causal())
    assert whole is not None
    return whole


def without_cache(
    mask: Mask | None, bias: Tensor | Bias | None, padding: Padding
) -> tuple[Mask | None, GrowingLayer | None]:
    """Mask and, where positions must be counted anew, a cache for one call over a padded batch.

    Padding on the right leaves rows and positions the same. Padding on the left moves all rows of an item by the
    same number, which does not change masks of distances. For masks of positions a cache gives tokens their positions.

    Raises:
        ValueError: padding on the left beside a mask or bias that is data about rows.
    """
    real, dense = padding.replaced(queries=padding.keys), as_bias(bias)
    of_distances = (mask is None or mask._throughout("by_distance")) and not isinstance(dense, Score)
    # Asked first where it is all the same: the answer is in the padding's values, which no compiled graph knows.
    if (of_distances and (dense is None or isinstance(dense, RelativeScores))) or not _on_the_left(padding):
        return joined(mask, real), None
    for name, given in (
        ("mask", mask if mask is not None and not mask._throughout("by_position") else None),
        ("bias", dense),
    ):
        if given is not None and not isinstance(given, (RelativeScores, Score)):
            raise ValueError(
                f"{name}: with padding on the left, {given!r} may count rows or tokens; pad on "
                "the right, or leave padding= out and hide the padding in the mask"
            )
    if of_distances:
        return joined(mask, real), None
    return mask, GrowingLayer()


def first_position(padding: Padding) -> Offset:
    """Position of row 0 if the first token of each item has position 0: 0, or (B,) int64 if an item is padded on the
    left."""
    if not _on_the_left(padding):
        return 0
    first = padding.keys.table.host.argmax(1)  # of an item without tokens 0, and nothing reads it
    return torch.from_numpy(-first).to(padding.keys.table.values.device)


def real_context(mask: Mask | None, context: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
    """Context and values with 0 at the tokens that the mask marks as padding."""
    same = values is None or values is context
    for factor in [] if mask is None else _factors(mask):
        if isinstance(factor, Padding):
            keys = cast(Padding, factor.replaced(queries=None))
            context = fill_padding(context, keys)
            values = context if same else fill_padding(values, keys)  # type: ignore[arg-type]
    return context, context if values is None else values


def of_context(mask: Mask | None) -> Mask | None:
    """The mask of a context without its own padding of queries: cross-attention has queries of another sequence."""
    if isinstance(mask, And):
        parts = [of_context(part) for part in mask.parts]
        return And.of(*(part for part in parts if part is not None))
    if isinstance(mask, Padding) and mask.queries == mask.keys:
        return mask.replaced(queries=None)
    return mask


def refuse_rows(mask: Mask | None) -> None:
    """ValueError for a context's mask that differs between target rows: with a cache, a call has only the last rows."""
    if mask is None or (mask.placement() is None and all(factor.by_key for factor in _factors(mask))):
        return
    raise ValueError(
        "context_mask: with a cache, only a mask of the context's tokens (Padding) is supported, since a call has only "
        f"some rows of the target; got {mask!r}"
    )


def _factors(mask: Mask) -> list[Mask]:
    """The masks whose intersection is `mask`, placed or not."""
    if isinstance(mask, At):
        return _factors(mask.part)
    return [factor for part in mask.parts for factor in _factors(part)] if isinstance(mask, And) else [mask]


def _on_the_left(padding: Padding) -> bool:
    """Whether some item has padding before its first token."""
    if padding.keys.by_length:
        return False
    real = padding.keys.table.host
    return bool(real.size) and bool((real.any(1) & ~real[:, 0]).any())
