"""Linear layers with the same input, such as query, key and value projections, computed as one product.

Which they are is seen when they are called: layers side by side in one module whose inputs were the same object. From
then on the first of them computes all, and the others take their part. One that is given another tensor computes its
own.

Shape legend: ... any axes, E width, F features of all of them.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn.modules import module as _of_all

from ..operator._backends.native._run import is_plain
from ..operator._derived import Derived, Snapshot
from ..operator._products import fits, multiply, packed
from ._linears import PackedLinear

_MISSES = 3  # parts that nobody took, after which layers compute their own again
_ROWS = 256  # above, the parts' copies take the time that one product saves


class JoinedProjections:
    """The linear layers of one module that may be computed as one product."""

    def __init__(self, linears: list[PackedLinear]):
        self.linears = linears
        self._inputs: dict[int, int] = {}  # which tensor each layer was given in this call, by identity
        self._groups: dict[int, list[int]] = {}  # of each layer, those that read what it reads
        self._products: dict[int, _JointProduct] = {}
        self._parts: dict[int, _PendingProduct] = {}  # what is ready for a layer
        self._misses = 0

    def __call__(self, place: int, x: Tensor) -> Tensor | None:
        """The product of the layer with this index; None if it has to compute its own."""
        if self._misses >= _MISSES:
            return None
        part = self._parts.pop(place, None)
        if part is not None:
            if part.serves(x):
                return part.product
            self._misses += 1
        group = self._groups.get(place)
        if group is None:
            self._learn(place, x)
            return None
        if group[0] != place or x.numel() > _ROWS * x.shape[-1] or self._hooked(group):
            return None
        joint = self._products.get(place)
        if joint is None:
            joint = self._products[place] = _JointProduct([self.linears[n] for n in group])
        products = joint(x)
        if products is None:
            return None
        state = _state(x)
        for n, (product, bias) in enumerate(zip(*products, strict=True)):
            if n:
                self._parts[group[n]] = _PendingProduct(joint, n, x, state, product, bias)
        return products[0][0]

    def _hooked(self, group: list[int]) -> bool:
        """Whether hooks may change a later layer between the joint product and its own call."""
        modules = [self.linears[n].module for n in group]
        return (
            bool(_of_all._global_forward_hooks or _of_all._global_forward_pre_hooks)
            or any(module._forward_pre_hooks for module in modules)
            or any(module._forward_hooks for module in modules)
        )

    def _learn(self, place: int, x: Tensor) -> None:
        if place in self._inputs:  # a second call: the first one is over
            places = sorted(self._inputs)
            for n in places:
                self._groups[n] = [m for m in places if self._inputs[m] == self._inputs[n]]
            if all(len(group) == 1 for group in self._groups.values()):
                self._misses = _MISSES
            return
        self._inputs[place] = id(x)


class _JointProduct:
    """One product for several layers."""

    def __init__(self, linears: list[PackedLinear]):
        self.linears = linears
        self.packed: Derived[Tensor] = Derived()

    def __call__(self, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]] | None:
        """Product (..., F) and bias of each layer; None if a weight is new, or the weights differ in dtype or layout.

        The first layer's weight is read now, and each other one's when its layer takes its part.
        """
        weights = [linear.weight for linear in self.linears]
        biases = [linear.bias for linear in self.linears]
        if not _joinable(weights, biases):
            return None
        copy = self.packed.of(weights, x.numel() // x.shape[-1], lambda: self._pack(weights), read=1)
        if copy is None:
            return None
        sizes = [weight.shape[0] for weight in weights]
        bias = None if biases[0] is None else torch.cat([b.detach() for b in biases if b is not None])
        parts = multiply(x, copy, bias).split(sizes, -1)
        added = [None] * len(sizes) if bias is None else bias.split(sizes)
        return tuple(part.contiguous() for part in parts), tuple(added)

    def _pack(self, weights: list[Tensor]) -> Tensor:
        for linear in self.linears:
            linear.product.copy.clear()  # this one is read instead
        return packed(torch.cat([weight.detach() for weight in weights]))


@dataclasses.dataclass(frozen=True)
class _PendingProduct:
    """One layer's part of a joint product, kept until the layer is called."""

    joint: _JointProduct
    place: int  # in the joint product
    x: Tensor
    state: int | Snapshot
    product: Tensor
    bias: Tensor | None  # that was added

    def serves(self, x: Tensor) -> bool:
        """Whether this is still the product of the layer for x: neither its weights nor x have changed."""
        linear = self.joint.linears[self.place]
        bias = linear.bias
        return (
            self.x is x
            and _unchanged(x, self.state)
            and (bias is None if self.bias is None else bias is not None and torch.equal(bias, self.bias))
            and self.joint.packed.holds(self.place, linear.weight, x.numel() // x.shape[-1])
        )


def joinable(linears: list[PackedLinear]) -> bool:
    """Whether linear layers can be computed as one product: same width and dtype, all with a bias or none."""
    weights = [linear.weight for linear in linears]
    own = any(linear.weights for linear in linears)
    return len(linears) > 1 and not own and _joinable(weights, [linear.bias for linear in linears])


def _joinable(weights: list[Tensor], biases: list[Tensor | None]) -> bool:
    width, dtype, biased = weights[0].shape[1], weights[0].dtype, biases[0] is not None
    return all(
        is_plain(weight)
        and not weight.is_inference()  # changes of such are not counted
        and weight.shape[1] == width
        and weight.dtype == dtype
        and (bias is not None) == biased
        and fits(bias, weight)
        for weight, bias in zip(weights, biases, strict=True)
    )


def _state(x: Tensor) -> int | Snapshot:
    """The version counter of x, or a fingerprint of x if it is an inference tensor, which has no counter."""
    return Snapshot(_rows(x), brief=True) if x.is_inference() else x._version


def _unchanged(x: Tensor, state: int | Snapshot) -> bool:
    return x._version == state if isinstance(state, int) else state.holds(_rows(x), 0)


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1]) if x.is_contiguous() else x
