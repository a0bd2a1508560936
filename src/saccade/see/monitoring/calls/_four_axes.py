"""Tensors with any leading axes as (B, H, ., .), the same for all tensors of one call.

Shape legend: ... leading axes, B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ScoreTerm(NamedTuple):
    """A mask or bias, and the leading axes of the scores when it was applied."""

    tensor: Tensor  # broadcasts to (*lead, Lq, Lk)
    lead: tuple[int, ...]


class AxisLayout(NamedTuple):
    """The way in which leading axes become batch and heads."""

    lead: tuple[int, ...]  # of the scores, as multiplied
    batch: int
    heads: int
    kv_heads: int

    @staticmethod
    def of(factors: Sequence[Tensor], hint: int | None) -> AxisLayout | None:
        """The factors' own axes, a single leading axis split by `hint` (the heads); None if they differ."""
        try:
            lead = torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in factors))
        except RuntimeError:
            return None
        if not lead:
            return AxisLayout(lead, 1, 1, 1)
        if len(lead) == 1:
            heads = hint if hint and lead[0] % hint == 0 else 1
            return AxisLayout(lead, lead[0] // heads, heads, heads)
        shared = {_padded(tensor, len(lead))[-1] for tensor in factors[1:]}
        if shared == {1} and lead[-1] > 1:
            if len(lead) == 2:  # (B, Hq, ., .) by (B, 1, ., .): one key head
                return AxisLayout(lead, lead[0], lead[1], 1)
            # (B, Hkv, G, ., .) by (B, Hkv, 1, ., .): queries of a group share a key head
            return AxisLayout(lead, math.prod(lead[:-2]), lead[-2] * lead[-1], lead[-2])
        return AxisLayout(lead, math.prod(lead[:-1]), lead[-1], lead[-1])

    def queries(self, tensor: Tensor) -> Tensor:
        """(..., L, D) as (B, Hq, L, D)."""
        whole = tensor.expand(*self.lead, *tensor.shape[-2:])
        return whole.reshape(self.batch, self.heads, *tensor.shape[-2:])

    def keys(self, tensor: Tensor) -> Tensor:
        """(..., L, D) as (B, Hkv, L, D)."""
        lead = self.lead if self.kv_heads == self.heads else (*self.lead[:-1], 1)
        return tensor.expand(*lead, *tensor.shape[-2:]).reshape(self.batch, self.kv_heads, *tensor.shape[-2:])

    def own(self, tensor: Tensor) -> Tensor:
        """A factor's gradient (..., L, D) as (items, heads, L, D), with the factor's own number of heads."""
        own = tuple(tensor.shape[:-2])
        if math.prod(own) == self.batch * self.heads:
            return tensor.reshape(self.batch, self.heads, *tensor.shape[-2:])
        if math.prod(own) == self.batch * self.kv_heads:
            return tensor.reshape(self.batch, self.kv_heads, *tensor.shape[-2:])
        return tensor.reshape(-1, own[-1] if own else 1, *tensor.shape[-2:])

    def scores(self, given: ScoreTerm) -> Tensor:
        """A mask or bias as (B|1, Hq|1, Lq|1, Lk|1), without expanding it if possible."""
        tensor, lead = given
        own = _padded(tensor, len(lead))
        if math.prod(own) == 1:
            return tensor.reshape(1, 1, *tensor.shape[-2:])
        if lead == (self.batch, self.heads):
            return tensor.reshape(*own, *tensor.shape[-2:])
        return tensor.expand(*lead, *tensor.shape[-2:]).reshape(self.batch, self.heads, *tensor.shape[-2:])


def alike(factors: Sequence[Tensor]) -> list[Tensor]:
    """Factors with batch and heads in separate axes, if any factor has them separate."""
    apart = next((tuple(factor.shape[:-2]) for factor in factors if factor.dim() > 3), None)
    together = [factor.dim() == 3 and apart is not None and factor.shape[0] == math.prod(apart) for factor in factors]
    return [
        factor.reshape(*(apart or ()), *factor.shape[-2:]) if is_joined else factor
        for factor, is_joined in zip(factors, together, strict=True)
    ]


def _padded(tensor: Tensor, axes: int) -> tuple[int, ...]:
    """The leading axes of a tensor, with ones in front up to `axes`."""
    own = tuple(tensor.shape[:-2])
    return (1,) * (axes - len(own)) + own
