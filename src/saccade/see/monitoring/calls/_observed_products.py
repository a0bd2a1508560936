"""Products of two tensors in one form, for all functions that compute them.

    out[..., i, j] = alpha sum_c left[..., i, c] right[..., j, c]  (+ added)

`AxisLayout` gives the tensors of one call as (B, H, ., .).

Shape legend: ... leading axes, I / J rows of left and right, C the summed width, B batch, Hq / Hkv query and key-value
heads, Lq / Lk lengths, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....interception._tracing import EinsumSpec, View, name_of, spelled


class ObservedProduct(NamedTuple):
    """One product. `left` and `right` are views of the factors; only the factors are in the graph."""

    left: Tensor  # (..., I, C)
    right: Tensor  # (..., J, C)
    factors: tuple[Tensor, Tensor]
    views: tuple[View, View]  # from a factor to left, to right; an axis that a factor lacks may be missing
    out: View  # from the result to (..., I, J)
    natural: bool = True  # whether the result already is (..., I, J)
    over_last: bool = True  # whether C is the last axis of the left factor
    alpha: float = 1.0
    added: Tensor | None = None

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        return self.left.shape[-2], self.right.shape[-2]


def product_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ObservedProduct | None:
    """The product that a call computes, None for anything else."""
    if func not in PRODUCTS:
        return None
    name = name_of(func)
    spec = spelled(name, args, kwargs)
    product = None if spec is None else _observed(spec, matrices=name == "einsum")
    if product is None or name != "baddbmm":
        return product
    added, beta = args[0] if args else kwargs["input"], kwargs.get("beta", 1)
    scaled = None if beta == 0 else added.detach() if beta == 1 else added.detach() * beta
    return product._replace(alpha=float(kwargs.get("alpha", 1)), added=scaled)


def _observed(spec: EinsumSpec, *, matrices: bool) -> ObservedProduct | None:
    """The product, if it has one axis each for rows, columns and the sum; `matrices`: both factors have all others."""
    if not spec.out_axes or spec.repeats:
        return None
    # the last axis of the result is of the right factor
    if spec.out_axes[-1] not in spec.right_axes or spec.out_axes[-1] in spec.left_axes:
        spec = spec.turned()
    left, right, out = spec.left_axes, spec.right_axes, spec.out_axes
    summed = [axis for axis in left if axis in right and axis not in out]
    rows, columns = [axis for axis in out if axis not in right], [axis for axis in out if axis not in left]
    if len(summed) != 1 or not rows or not columns:
        return None
    lead = [axis for axis in out if axis not in (rows[-1], columns[-1])]
    if matrices and not len(left) == len(right) == len(lead) + 2 == len([axis for axis in left if axis in right]) + 1:
        return None
    to_left = _permuted(left, [*(axis for axis in lead if axis in left), rows[-1], *summed])
    to_right = _permuted(right, [*(axis for axis in lead if axis in right), columns[-1], *summed])
    in_order = [*lead, rows[-1], columns[-1]]
    return ObservedProduct(
        to_left(spec.left.detach()),
        to_right(spec.right.detach()),
        (spec.left, spec.right),
        (to_left, to_right),
        _permuted(out, in_order),
        natural=list(out) == in_order,
        over_last=left[-1] == summed[0],
    )


def _permuted(axes: str, wanted: list[str]) -> View:
    order = [axes.index(axis) for axis in wanted]
    return lambda tensor: tensor.permute(order)


_MATMUL = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__}
PRODUCTS = _MATMUL | {torch.baddbmm, Tensor.baddbmm, torch.einsum}


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
