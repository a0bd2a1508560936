"""Products of two tensors, in one form, however they were written.

    out[..., i, j] = alpha sum_c left[..., i, c] right[..., j, c]  (+ added)

Shape legend: ... leading axes, I / J rows of left and right, C the summed width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

View = Callable[[Tensor], Tensor]


class ObservedProduct(NamedTuple):
    """One product. `left` and `right` are views of the factors, which are what a graph knows."""

    left: Tensor  # (..., I, C)
    right: Tensor  # (..., J, C)
    factors: tuple[Tensor, Tensor]
    views: tuple[View, View]  # from a factor to left, to right; an axis that a factor lacks may be missing
    out: View  # from the result to (..., I, J)
    natural: bool = True  # whether the result is (..., I, J) as it comes
    over_last: bool = True  # whether C is the last axis of the left factor
    alpha: float = 1.0
    added: Tensor | None = None

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        return self.left.shape[-2], self.right.shape[-2]


def product_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ObservedProduct | None:
    """The product that a call computes, None where it computes none that this knows."""
    make = PRODUCTS.get(func)
    if make is None:
        return None
    names = {**_NAMES, "input": "added" if make is _baddbmm else "left"}
    return make(*args, **{names.get(name, name): value for name, value in kwargs.items()})


# PyTorch's names for the factors, which some write out.
_NAMES = {"other": "right", "mat2": "right", "batch1": "left", "batch2": "right"}


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _turned(tensor: Tensor) -> Tensor:
    return tensor.transpose(-2, -1)


def _matmul(left: Any, right: Any, **_: Any) -> ObservedProduct | None:
    if not all(isinstance(factor, Tensor) and factor.dim() > 1 for factor in (left, right)):
        return None
    return ObservedProduct(left.detach(), _turned(right.detach()), (left, right), (_same, _turned), _same)


def _baddbmm(
    added: Any, left: Any, right: Any, *, beta: float = 1, alpha: float = 1, **_: Any
) -> ObservedProduct | None:
    found = _matmul(left, right)
    if found is None or not isinstance(added, Tensor):
        return None
    scaled = None if beta == 0 else added.detach() if beta == 1 else added.detach() * beta
    return found._replace(alpha=float(alpha), added=scaled)


def _einsum(equation: Any, *operands: Any, **_: Any) -> ObservedProduct | None:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        return None
    inputs, out = equation.replace(" ", "").split("->")
    names = inputs.split(",")
    if any(len(set(axes)) != len(axes) for axes in (*names, out)) or not out:
        return None
    if out[-1] not in names[1] or out[-1] in names[0]:  # the last axis of the result is of the right factor
        names, operands = names[::-1], operands[::-1]
    left, right = names
    shared = [axis for axis in out if axis in left and axis in right]
    summed = [axis for axis in left if axis in right and axis not in out]
    rows = [axis for axis in out if axis not in right]
    columns = [axis for axis in out if axis not in left]
    if not len(summed) == len(rows) == len(columns) == 1 or {len(left), len(right)} != {len(shared) + 2}:
        return None
    to_left, to_right = _permuted(left, [*shared, *rows, *summed]), _permuted(right, [*shared, *columns, *summed])
    in_order = [*shared, *rows, *columns]
    return ObservedProduct(
        to_left(operands[0].detach()),
        to_right(operands[1].detach()),
        (operands[0], operands[1]),
        (to_left, to_right),
        _permuted(out, in_order),
        natural=list(out) == in_order,
        over_last=left[-1] == summed[0],
    )


def _permuted(axes: str, wanted: list[str]) -> View:
    order = [axes.index(axis) for axis in wanted]
    return lambda tensor: tensor.permute(order)


PRODUCTS: dict[Any, Callable[..., ObservedProduct | None]] = {
    torch.matmul: _matmul,
    torch.bmm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.bmm: _matmul,
    Tensor.__matmul__: _matmul,
    torch.baddbmm: _baddbmm,
    Tensor.baddbmm: _baddbmm,
    torch.einsum: _einsum,
}
