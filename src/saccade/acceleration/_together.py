"""Linear layers that read the same tensor, computed as one product: queries, keys and values.

Which they are is seen when they are called: layers side by side in one module whose inputs were the same object. From
then on the first of them computes all, and the others take their part. One that is given another tensor computes its
own.

Shape legend: ... any axes, E width, F features of all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._products import multiply, packed
from ._spots import PackedLinear

_MISSES = 3  # parts that nobody took, after which layers compute their own again


class Together:
    """The linear layers side by side in one module, those that may be computed together."""

    def __init__(self, linears: list[PackedLinear]):
        self.linears = linears
        self._inputs: dict[int, int] = {}  # which tensor each layer was given in this call, by identity
        self._groups: dict[int, list[int]] = {}  # of each layer, those that read what it reads
        self._products: dict[int, _Joint] = {}
        self._parts: dict[int, tuple[Tensor, int, Tensor]] = {}  # input, its version, and what is ready for a layer
        self._misses = 0

    def __call__(self, place: int, x: Tensor) -> Tensor | None:
        """The product of the layer at a place; None where it computes its own."""
        if self._misses >= _MISSES:
            return None
        ready = self._parts.pop(place, None)
        if ready is not None:
            if ready[0] is x and ready[1] == _version(x):
                return ready[2]
            self._misses += 1
        group = self._groups.get(place)
        if group is None:
            self._learn(place, x)
            return None
        if group[0] != place:
            return None
        joint = self._products.get(place)
        if joint is None:
            joint = self._products[place] = _Joint([self.linears[n] for n in group])
        first, *others = joint(x)
        for n, part in zip(group[1:], others, strict=True):
            self._parts[n] = x, _version(x), part
        return first

    def _learn(self, place: int, x: Tensor) -> None:
        if place in self._inputs:  # a second call: the first one is over
            places = sorted(self._inputs)
            for n in places:
                self._groups[n] = [m for m in places if self._inputs[m] == self._inputs[n]]
            if all(len(group) == 1 for group in self._groups.values()):
                self._misses = _MISSES
            return
        self._inputs[place] = id(x)


class _Joint:
    """One product for several layers."""

    def __init__(self, linears: list[PackedLinear]):
        self.linears = linears
        self._made: tuple[tuple[tuple[int, int], ...], Tensor, Tensor | None] | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """(..., F) in parts."""
        weights = [linear.weight for linear in self.linears]
        biases = [linear.bias for linear in self.linears]
        version = tuple((part.data_ptr(), part._version) for part in (*weights, *biases) if part is not None)
        if self._made is None or self._made[0] != version:
            bias = torch.cat([b.detach() for b in biases if b is not None]) if biases[0] is not None else None
            self._made = version, packed(torch.cat([weight.detach() for weight in weights])), bias
            for linear in self.linears:
                linear.product.copy = None  # this one is read instead
        out = multiply(x, self._made[1], self._made[2])
        return out.split([weight.shape[0] for weight in weights], -1)


def may(linears: list[PackedLinear]) -> bool:
    """Whether layers could be one: several, of one width and dtype, all with a bias or none."""
    kinds: set[Any] = {(one.weight.shape[1], one.weight.dtype, one.bias is None) for one in linears}
    counted = not any(one.half or one.weight.is_inference() for one in linears)  # of inference tensors changes are not
    return len(linears) > 1 and len(kinds) == 1 and counted


def _version(x: Tensor) -> int:
    """How often x was changed; made in inference mode it does not say, and is taken for unchanged within one module."""
    return 0 if x.is_inference() else x._version
