"""Reads from a mask what a mechanism without a score matrix can use: which tokens are real, and whether attention is
causal.

Shape legend: B batch, Lq / Lk numbers of queries and keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._masks import Causal, Mask, Padding, as_mask
from .._masks._algebra import And
from .._masks._placement import At


class CausalPadding(NamedTuple):
    """The parts of a mask made of `Causal()` and `Padding(...)`.

    Args:
        causal: whether queries see no later keys.
        rows: bool (B or 1, Lq), True = a real query; None: all are real. The output of other rows is 0.
        keys: bool (B or 1, Lk), True = a real key; None: all are real.
    """

    causal: bool
    rows: Tensor | None
    keys: Tensor | None


def causal_padding_of(
    mask: Mask | Tensor | None,
    batch: int,
    Lq: int,
    Lk: int,
    device: torch.device,
    name: str,
    reason: str,
    causal: bool | str = True,
) -> CausalPadding:
    """Split a mask into its parts, for a mechanism that supports only `Causal()` and `Padding(...)`.

    Queries stand bottom-right: query i at position `i + (Lk - Lq)`.

    Args:
        mask: the mask of a call; None shows everything.
        batch, Lq, Lk: B, and the numbers of queries and keys.
        device: of the booleans in the result.
        name: the mechanism's name, for error messages.
        reason: why it takes no other masks, for error messages.
        causal: True, or why the mechanism cannot be causal.

    Raises:
        TypeError: not a mask.
        ValueError: a mask of another kind, or one that does not fit these sizes.
    """
    given = as_mask(mask)
    if given is None:
        return CausalPadding(False, None, None)
    taken = "Causal(), Padding(...) and both of them" if causal is True else "Padding(...)"
    directed, rows, keys = False, None, None
    for factor in given.parts if isinstance(given, And) else (given,):
        if isinstance(factor, Causal):
            if causal is not True:
                raise ValueError(f"mask: {name} cannot be causal, since {causal}; got {given!r}")
            directed = True
        elif isinstance(factor, Padding):
            factor.check(batch, 1, Lq, Lk, device)
            sides = factor.sides(Lq, Lk, device)
            rows, keys = _both(rows, sides.rows), _both(keys, sides.keys)
        else:
            raise ValueError(f"mask: {name} takes {taken}, since {reason}; got {factor!r}")
    return CausalPadding(directed, rows, keys)


def padding_of_step(
    mask: Mask | Tensor | None, batch: int, length: int, device: torch.device, name: str, reason: str
) -> CausalPadding:
    """As `causal_padding_of`, for `length` new tokens behind a state, whose only mask is `Padding(...)`."""
    seen = causal_padding_of(mask, batch, length, length, device, name, reason)
    if seen.causal:
        raise ValueError(f"mask: expected None or Padding(...), since a step is causal already, got {mask!r}")
    return seen


def real_rows(mask: Mask | Tensor | None, Lq: int, Lk: int, device: torch.device) -> Tensor | None:
    """Rows that are queries by a `Padding(queries=...)` in the mask, bool (B or 1, Lq); None if all are.

    For mechanisms on the exact operator, which may do something of their own with each row.
    """
    rows = None
    for factor in _factors(as_mask(mask)):
        if isinstance(factor, Padding) and factor.queries is not None:
            rows = _both(rows, factor.sides(Lq, Lk, device).rows)
    return rows


def _factors(mask: Mask | None) -> list[Mask]:
    if isinstance(mask, At):
        return _factors(mask.part)
    if isinstance(mask, And):
        return [factor for part in mask.parts for factor in _factors(part)]
    return [] if mask is None else [mask]


def zero_padding(features: Tensor, kept: Tensor | None) -> Tensor:
    """(B, H, L, n) with 0 wherever `kept` (B or 1, L) is False, whatever stood there: 0 * NaN would be NaN."""
    return features if kept is None else features.masked_fill(~kept[:, None, :, None], 0.0)


def tokens_of_gate(tokens: Tensor | None, kept: Tensor | None, name: str) -> Tensor:
    """The tokens (B, L, E) that a gate is projected from; padded ones are 0, since 0 * NaN would reach the gradients.

    Raises:
        TypeError: None instead of tokens; `name` is the mechanism in the message.
    """
    if tokens is None:
        raise TypeError(f"tokens: {name} needs the tokens that its queries were projected from, got None")
    return zero_padding(tokens[:, None], kept)[:, 0]


def _both(known: Tensor | None, side: Tensor | None) -> Tensor | None:
    if side is None:
        return known
    side = side[:, 0]
    return side if known is None else known & side
