"""Products of two tensors in one form, for all functions that compute them.

    out[..., i, j] = alpha sum_c left[..., i, c] right[..., j, c]  (+ added)

Shape legend: ... leading axes, I / J rows of left and right, C the summed width.
"""

from __future__ import annotations

from collections.abc import Mapping
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
