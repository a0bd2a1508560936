"""Products of two tensors in a common form (einsum, matmul, bmm, broadcast products), with views of factors and result.

    out[*lead, i, j] = sum_c left[*lead, i, c] right[*lead, j, c]

Shape legend: lead leading axes, I / J rows of left and right, C the summed width.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

View = Callable[[Tensor], Tensor]
# Whether what is known of a factor's elements differs along one of its axes.
Varies = Callable[[Tensor, int], bool]


@dataclass(frozen=True)
class EinsumSpec:
    """A product of two tensors in einsum notation."""

    left: Tensor
    right: Tensor
    left_axes: str
    right_axes: str
    out_axes: str

    @property
    def repeats(self) -> bool:
        """Whether a factor has a letter twice, which takes its diagonal."""
        return any(len(set(axes)) != len(axes) for axes in (self.left_axes, self.right_axes, self.out_axes))

    def turned(self) -> EinsumSpec:
        """The same product with the factors swapped."""
        return EinsumSpec(self.right, self.left, self.right_axes, self.left_axes, self.out_axes)


@dataclass(frozen=True)
class ProductLayout:
    """Views of a tensor shaped like a factor, and from (*lead, I, J) to the shape of the result."""

    product: EinsumSpec
    left: View  # to (*lead, I, C)
    right: View  # to (*lead, J, C)
    out: View  # (*lead, I, J) to the result's own axes
    lead: tuple[int, ...]
    rows: int
    columns: int


def spelled(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> EinsumSpec | None:
    """The product that a function of this name computes; None if it is not a known product."""
    make = _SPELLINGS.get(name)
    if make is None:
        return None
    named = [kwargs[key] for key in ("input", "self", "other", "mat1", "mat2", "batch1", "batch2") if key in kwargs]
    return make([*args, *named], kwargs)


def laid_out(product: EinsumSpec, left_varies: Varies, right_varies: Varies) -> ProductLayout | None:
    """The layout of a product with one row axis and one column axis, each an axis that only one factor has. If a factor
    has several, the axis that varies is chosen."""
    left, right, out = product.left_axes, product.right_axes, product.out_axes
    if product.repeats or set(out) - set(left + right):
        return None
    sizes = _sizes(product)
    summed = [axis for axis in left if axis in right and axis not in out]
    if not summed or any(axis not in out and axis not in summed for axis in left + right):
        return None
    row = _chosen([axis for axis in out if axis not in right], product.left, left, left_varies)
    column = _chosen([axis for axis in out if axis not in left], product.right, right, right_varies)
    lead = [axis for axis in out if axis not in (row, column)]
    shape = tuple(sizes[axis] for axis in lead)
    rows, columns = sizes.get(row, 1), sizes.get(column, 1)
    return ProductLayout(
        product,
        _view(left, lead, row, summed, sizes),
        _view(right, lead, column, summed, sizes),
        _back(out, lead, row, column, sizes),
        shape,
        rows,
        columns,
    )


def _sizes(product: EinsumSpec) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for tensor, axes in ((product.left, product.left_axes), (product.right, product.right_axes)):
        for axis, size in zip(axes, tensor.shape, strict=True):
            sizes[axis] = max(size, sizes.get(axis, 1)) if size else 0
    return sizes


def _chosen(axes: list[str], tensor: Tensor, own: str, varies: Varies) -> str:
    if not axes:
        return ""
    fit = [axis for axis in axes if varies(tensor, own.index(axis))]
    return (fit or axes)[-1]


def _view(own: str, lead: list[str], row: str, summed: list[str], sizes: dict[str, int]) -> View:
    wanted = [*lead, row, *summed]
    present = [bool(axis) and axis in own for axis in wanted]
    shape = [sizes.get(axis, 1) for axis in wanted]
    end = (sizes.get(row, 1), math.prod(sizes[axis] for axis in summed))

    def view(tensor: Tensor) -> Tensor:
        tensor = tensor.permute([own.index(axis) for axis, there in zip(wanted, present, strict=True) if there])
        for at, there in enumerate(present):
            if not there:
                tensor = tensor.unsqueeze(at)
        return tensor.expand(shape).reshape(*shape[: len(lead)], *end)

    return view


def _back(out: str, lead: list[str], row: str, column: str, sizes: dict[str, int]) -> View:
    have = [*lead, *row, *column]

    def back(tensor: Tensor) -> Tensor:
        tensor = tensor.reshape([sizes[axis] for axis in have])
        return tensor.permute([have.index(axis) for axis in out])

    return back


def _matmul(args: Sequence[Any], _: Mapping[str, Any]) -> EinsumSpec | None:
    left, right = args[0], args[1]
    if not _tensors(left, right) or not left.dim() or not right.dim():
        return None
    lead = string.ascii_lowercase[: max(left.dim(), right.dim(), 2) - 2]
    one = lead[len(lead) - left.dim() + 2 :] + "YZ" if left.dim() > 1 else "Z"
    other = lead[len(lead) - right.dim() + 2 :] + "ZX" if right.dim() > 1 else "Z"
    out = lead + ("Y" if left.dim() > 1 else "") + ("X" if right.dim() > 1 else "")
    return EinsumSpec(left, right, one, other, out)


def _turned_matmul(args: Sequence[Any], kwargs: Mapping[str, Any]) -> EinsumSpec | None:
    return _matmul([args[1], args[0]], kwargs)


def _added_matmul(args: Sequence[Any], kwargs: Mapping[str, Any]) -> EinsumSpec | None:
    return _matmul(args[1:], kwargs) if len(args) > 2 else None


def _linear(args: Sequence[Any], _: Mapping[str, Any]) -> EinsumSpec | None:
    left, right = args[0], args[1]
    if not _tensors(left, right) or right.dim() != 2 or not left.dim():
        return None
    lead = string.ascii_lowercase[: left.dim() - 1]
    return EinsumSpec(left, right, lead + "Z", "YZ", lead + "Y")


def _inner(args: Sequence[Any], _: Mapping[str, Any]) -> EinsumSpec | None:
    left, right = args[0], args[1]
    if not _tensors(left, right) or not left.dim() or not right.dim():
        return None
    one = string.ascii_lowercase[: left.dim() - 1]
    other = string.ascii_uppercase[: right.dim() - 1]
    return EinsumSpec(left, right, one + "Z", other + "Z", one + other)


def _tensordot(args: Sequence[Any], kwargs: Mapping[str, Any]) -> EinsumSpec | None:
    left, right = args[0], args[1]
    dims = args[2] if len(args) > 2 else kwargs.get("dims", 2)
    if not _tensors(left, right) or isinstance(dims, Tensor):
        return None
    if isinstance(dims, int):
        dims = (range(left.dim() - dims, left.dim()), range(dims))
    pairs = [(a % left.dim(), b % right.dim()) for a, b in zip(*dims, strict=True)]
    one, other = string.ascii_lowercase[: left.dim()], list(string.ascii_uppercase[: right.dim()])
    for a, b in pairs:
        other[b] = one[a]
    summed = {one[a] for a, _ in pairs}
    return EinsumSpec(left, right, one, "".join(other), "".join(axis for axis in [*one, *other] if axis not in summed))


def _einsum(args: Sequence[Any], _: Mapping[str, Any]) -> EinsumSpec | None:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or not _tensors(*operands):
        return None
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if len(names) != 2:
        return None
    if not arrow:
        letters = inputs.replace(",", "").replace(".", "")
        out = "..." * ("..." in inputs) + "".join(sorted(axis for axis in set(letters) if letters.count(axis) == 1))
    spare = [letter for letter in string.ascii_letters if letter not in inputs]
    hidden = [max(0, one.dim() - len(axes.replace("...", ""))) for one, axes in zip(operands, names, strict=True)]
    most = max(hidden)
    left, right = (
        axes.replace("...", "".join(spare[most - own : most])) for axes, own in zip(names, hidden, strict=True)
    )
    if len(left) != operands[0].dim() or len(right) != operands[1].dim():
        return None
    return EinsumSpec(operands[0], operands[1], left, right, out.replace("...", "".join(spare[:most])))


def _tensors(*given: Any) -> bool:
    return all(isinstance(one, Tensor) for one in given)


_SPELLINGS: dict[str, Callable[[Sequence[Any], Mapping[str, Any]], EinsumSpec | None]] = {
    "matmul": _matmul,
    "rmatmul": _turned_matmul,
    "bmm": _matmul,
    "mm": _matmul,
    "mv": _matmul,
    "dot": _matmul,
    "baddbmm": _added_matmul,
    "addmm": _added_matmul,
    "linear": _linear,
    "inner": _inner,
    "tensordot": _tensordot,
    "einsum": _einsum,
}


def outer(left: Tensor, right: Tensor, shape: torch.Size, summed: Sequence[int]) -> tuple[EinsumSpec, View, View]:
    """`(left * right).sum(summed)` as a product, and the views that reduce each factor to its own axes.

    A factor's own axes exclude those along which it is broadcast.
    """
    letters = string.ascii_letters[: len(shape)]
    out = "".join(axis for at, axis in enumerate(letters) if at not in summed)
    cuts, axes = [], []
    for factor in (left, right):
        own = _own_axes(factor, shape)
        cuts.append(_cut(shape, own))
        axes.append("".join(axis for axis, kept in zip(letters, own, strict=True) if kept))
    return EinsumSpec(cuts[0](left), cuts[1](right), axes[0], axes[1], out), cuts[0], cuts[1]


def _cut(shape: torch.Size, own: list[bool]) -> View:
    chosen = tuple(slice(None) if kept else 0 for kept in own)
    return lambda tensor: tensor.expand(shape)[chosen]


def _own_axes(factor: Tensor, shape: torch.Size) -> list[bool]:
    """Whether the factor has each axis of the result without broadcasting."""
    missing = len(shape) - factor.dim()
    return [
        shape[at] == 1 or (at >= missing and factor.shape[at - missing] > 1 and factor.stride(at - missing) > 0)
        for at in range(len(shape))
    ]
