"""Finds query rows that are padding in calls without such information.

Shape legend: B batch, H heads, Lq / Lk lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ....operator._masks import FromTensor, Mask, Padding
from ....operator._masks._algebra import And

# Models hide keys with -inf, the least number of a dtype, -1e9 or -1e4, which scores may have been added to.
HIDDEN = -5e3


class QueryRows(NamedTuple):
    """The query rows of a call: which are tokens, and whether that is known."""

    real: Tensor | None = None  # (B, Lq) bool; None: all count
    unknown: bool = False  # keys are padded, and the queries may be the same tokens or others


def rows_of(
    mask: Mask | None, bias: Tensor | None, length_q: int, length_k: int, self_attention: Callable[[], bool | None]
) -> QueryRows:
    """The query rows that are tokens. In self-attention a token that no query may see is padding, and so is its row.

    In cross-attention padded keys do not concern queries. If the kind of attention is unknown, all rows count: an extra
    row in a mean is a smaller error than a missing one.

    Args:
        self_attention: called only if needed: keys are hidden from all queries, and there are as many queries as
            keys.
    """
    if length_q != length_k or length_k < 2:
        return QueryRows()
    visible = None
    for keys in (*_visible_keys(mask), *_visible_by_bias(bias)):
        visible = keys if visible is None else visible & keys
    if visible is None or bool(visible.all()):
        return QueryRows()
    within_one = self_attention()
    return QueryRows(visible if within_one else None, within_one is None)


def _visible_keys(mask: Mask | None) -> list[Tensor]:
    """(B or 1, Lk) each."""
    if isinstance(mask, And):
        return [keys for part in mask.parts for keys in _visible_keys(part)]
    if isinstance(mask, Padding) and not mask.keys.by_length:
        return [mask.keys.table.values]
    if isinstance(mask, FromTensor) and mask.tensor.dim() == 4:
        return [mask.tensor.any(1).any(1)]
    return []


def _visible_by_bias(bias: Tensor | None) -> list[Tensor]:
    if bias is None:
        return []
    return [(bias.detach() > HIDDEN).any(1).any(1)]
