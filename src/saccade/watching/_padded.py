"""Which query rows are padding, where a call does not say so.

Shapes: B batch, H heads, Lq / Lk lengths.
"""

from __future__ import annotations

from torch import Tensor

from .._masks import FromTensor, Mask, Padding
from .._masks._algebra import And

# Models hide keys with -inf, the least number of a dtype, -1e9 or -1e4, and scores may have been taken off of it.
HIDDEN = -5e3


def real_rows(
    mask: Mask | None, bias: Tensor | None, length_q: int, length_k: int, self_attention: bool | None
) -> Tensor | None:
    """(B, Lq) bool: the rows that are tokens; None where all are, or nothing is known.

    In self-attention a token that no query may see is padding, and so is its own row. Where it is not known whether a
    call is self-attention, one with as many queries as keys, and more than one, is taken for it.
    """
    if self_attention is False or length_q != length_k or length_k < 2:
        return None
    seen = None
    for keys in (*_seen_keys(mask), *_seen_by_bias(bias)):
        seen = keys if seen is None else seen & keys
    return None if seen is None or bool(seen.all()) else seen


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
