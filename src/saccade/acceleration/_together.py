"""Linear layers that read the same tensor, computed as one product: queries, keys and values.

Which they are is seen when they are called: layers side by side in one module whose inputs were the same object. From
then on the first of them computes all, and the others take their part. One that is given another tensor computes its
own.

Shape legend: ... any axes, E width, F features of all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._backends.native._run import is_plain
from .._derived import Derived, Snapshot
from .._products import multiply, packed
from ._linears import PackedLinear

_MISSES = 3  # parts that nobody took, after which layers compute their own again


class Together:
    """The linear layers side by side in one module, those that may be computed together."""

    def __init__(self, linears: list[PackedLinear]):
        self.linears = linears
        self._inputs: dict[int, int] = {}  # which tensor each layer was given in this call, by identity
        self._groups: dict[int, list[int]] = {}  # of each layer, those that read what it reads
        self._products: dict[int, _Joint] = {}
        self._parts: dict[
            int, tuple[Tensor, int | Snapshot, Tensor]
        ] = {}  # input, its state, and what is ready for a layer
        self._misses = 0

    def __call__(self, place: int, x: Tensor) -> Tensor | None:
        """The product of the layer at a place; None where it computes its own."""
        if self._misses >= _MISSES:
            return None
        ready = self._parts.pop(place, None)
        if ready is not None:
            if ready[0] is x and _unchanged(x, ready[1]):
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
        parts = joint(x)
        if parts is None:
            return None
        state = _state(x)
        for n, part in zip(group[1:], parts[1:], strict=True):
            self._parts[n] = x, state, part
        return parts[0]

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
        self._packed: Derived[Tensor] = Derived()

    def __call__(self, x: Tensor) -> tuple[Tensor, ...] | None:
        """(..., F) in parts; None where a weight is new, or no longer of the others' kind."""
        weights = [linear.weight for linear in self.linears]
        biases = [linear.bias for linear in self.linears]
        if not _joinable(weights, biases):
            return None
        copy = self._packed.of(weights, x.numel() // x.shape[-1], lambda: self._pack(weights))
        if copy is None:
            return None
        bias = None if biases[0] is None else torch.cat([b.detach() for b in biases if b is not None])
        return multiply(x, copy, bias).split([weight.shape[0] for weight in weights], -1)

    def _pack(self, weights: list[Tensor]) -> Tensor:
        for linear in self.linears:
            linear.product.copy.clear()  # this one is read instead
        return packed(torch.cat([weight.detach() for weight in weights]))


def may(linears: list[PackedLinear]) -> bool:
    """Whether linear layers can be computed as one product: of one width and dtype, all with a bias or none."""
    weights = [linear.weight for linear in linears]
    own = any(linear.half for linear in linears)
    return len(linears) > 1 and not own and _joinable(weights, [linear.bias for linear in linears])


def _joinable(weights: list[Tensor], biases: list[Tensor | None]) -> bool:
    width, dtype, biased = weights[0].shape[1], weights[0].dtype, biases[0] is not None
    return all(
        is_plain(weight)
        and not weight.is_inference()  # changes of such are not counted
        and weight.shape[1] == width
        and weight.dtype == dtype
        and (bias is not None) == biased
        for weight, bias in zip(weights, biases, strict=True)
    )


def _state(x: Tensor) -> int | Snapshot:
    """How often x was written to; of a tensor made in inference mode PyTorch does not count that."""
    return Snapshot(_rows(x), brief=True) if x.is_inference() else x._version


def _unchanged(x: Tensor, state: int | Snapshot) -> bool:
    return x._version == state if isinstance(state, int) else state.holds(_rows(x), 0)


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1]) if x.is_contiguous() else x
