"""Which query rows are padding, where a call does not say so itself.

Shape legend: B batch, H heads, Lq / Lk lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ....operator._masks import FromTensor, Mask, Padding
from ....operator._masks._algebra import And

# Models hide keys with -inf, the least number of a dtype, -1e9 or -1e4, and scores may have been taken off of it.
HIDDEN = -5e3


class QueryRows(NamedTuple):
    """The query rows of a call: which are tokens, and whether that is known."""

    real: Tensor | None = None  # (B, Lq) bool; None: all count
    unknown: bool = False  # keys are padded, and the queries may be the same tokens or others


def rows_of(
    mask: Mask | None, bias: Tensor | None, length_q: int, length_k: int, self_attention: Callable[[], bool | None]
) -> QueryRows:
    """In self-attention a token that no query may see is padding, and so is its own row.

    In cross-attention padded keys say nothing of queries. Where nobody knows which of the two a call is, all rows
    count: a row too many in a mean is a smaller fault than a real row that is lost.

    Args:
        self_attention: asked where it matters: keys are hidden from all queries, of which there are as many as keys.
    """
    if length_q != length_k or length_k < 2:
        return QueryRows()
    seen = None
    for keys in (*_seen_keys(mask), *_seen_by_bias(bias)):
        seen = keys if seen is None else seen & keys
    if seen is None or bool(seen.all()):
        return QueryRows()
    within_one = self_attention()
    return QueryRows(seen if within_one else None, within_one is None)


def _seen_keys(mask: Mask | None) -> list[Tensor]:
    """(B or 1, Lk) each."""
    if isinstance(mask, And):
        return [keys for part in mask.parts for keys in _seen_keys(part)]
    if isinstance(mask, Padding) and not mask.keys.by_length:
        return [mask.keys.table.values]
    if isinstance(mask, FromTensor) and mask.tensor.dim() == 4:
        return [mask.tensor.any(1).any(1)]
    return []


def _seen_by_bias(bias: Tensor | None) -> list[Tensor]:
    if bias is None:
        return []
    return [(bias.detach() > HIDDEN).any(1).any(1)]
