"""Follows the computation of a target with its inputs while it runs: the products of inputs with parameters (its linear
maps), with the graph between them, and the products of inputs with inputs (scores, and weights with values).

Shape legend: B batch, L length, E model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...interception._tracing import SDPA, FunctionCall, FunctionMode, TensorLabels, memory_of
from ...support._restored import seeded
from ..findings._finding import Inapplicable, Location, TargetError, Unmeasured
from ..subject._inputs import NamedInputs
from ..subject._operations import location_here
from ..subject._subject import CallResult, Subject

_PRODUCTS = frozenset("linear matmul rmatmul mm bmm addmm baddbmm einsum tensordot conv1d".split())


@dataclass(frozen=True, eq=False)
class LinearMap:
    """One product of data with a parameter."""

    given: Tensor  # what came in, as it stands in the graph
    out: Tensor
    weight: Tensor  # the parameter, or what was made of it
    location: Location | None


@dataclass(frozen=True, eq=False)
class ProductInput:
    """A factor of a product of data with data."""

    tensor: Tensor  # a copy
    role: str  # "query" "key" "weights" "value"
    location: Location | None


@dataclass(frozen=True, eq=False)
class FlowStep:
    """One call of PyTorch whose arguments were computed from the inputs."""

    name: str
    out: Tensor  # a copy
    location: Location | None
    given: frozenset[int]  # places of the steps whose results it took; of inputs -1, -2 ... in their order


@dataclass(frozen=True, eq=False)
class TargetFlow:
    """One call of the target, with gradients."""

    result: CallResult
    maps: tuple[LinearMap, ...]
    factors: tuple[ProductInput, ...]
    steps: tuple[FlowStep, ...]  # empty unless asked for
    touched: frozenset[int]  # where the numbers of all tensors lie that took part


def followed(
    subject: Subject, inputs: NamedInputs, change: Callable[[int, Tensor], Tensor] | None = None, *, every: bool = False
) -> TargetFlow:
    """Call `subject` and record its products, with `every` the output of every call. `change(place, out)` may replace a
    map's output."""
    mode = _FlowMode(inputs, change, every)
    with seeded(0, devices=None), torch.enable_grad(), mode:
        result = subject(inputs)
    return TargetFlow(result, tuple(mode.maps), tuple(mode.factors), tuple(mode.steps), frozenset(mode.touched))


class _FlowMode(FunctionMode):
    def __init__(self, inputs: NamedInputs, change: Callable[[int, Tensor], Tensor] | None, every: bool) -> None:
        super().__init__()
        self._change, self._every = change, every
        self._inputs = {memory_of(tensor): -1 - at for at, tensor in enumerate(inputs.tensors.values())}
        self._data = TensorLabels[int | None]()  # what comes from the inputs: the place of the last step that made it
        self.maps: list[LinearMap] = []
        self.factors: list[ProductInput] = []
        self.steps: list[FlowStep] = []
        self.touched: set[int] = set()

    def passes(self) -> bool:
        if torch._C._are_functorch_transforms_active():
            raise Unmeasured("it computes inside of a torch.func transform, where nothing can be followed")
        return super().passes()

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = FunctionCall(func, args, kwargs, func(*args, **kwargs))
        self.touched.update(memory_of(tensor) for tensor in call.given if tensor.numel())
        if any(map(self._is_data, call.given)):
            call.result = self._mapped(call)
            self._factors_of(call)
            self._data.put_all(call.made, self._stepped(call) if self._every else None)
        return call.result

    def _mapped(self, call: FunctionCall) -> Any:
        if call.name not in _PRODUCTS or not isinstance(call.result, Tensor):
            return call.result
        weights = [
            tensor for tensor in call.given if tensor.dim() > 1 and tensor.requires_grad and not self._is_data(tensor)
        ]
        data = [tensor for tensor in call.given if self._is_data(tensor) and tensor.is_floating_point()]
        if len(weights) != 1 or len(data) != 1:
            return call.result
        result = call.result if self._change is None else self._change(len(self.maps), call.result)
        self.maps.append(LinearMap(data[0], result, weights[0], location_here()))
        return result

    def _factors_of(self, call: FunctionCall) -> None:
        given = [tensor for tensor in call.given if tensor.is_floating_point()]
        if call.func is SDPA:
            roles = ["query", "key", "value"]
        elif call.name in _PRODUCTS and len(given) == 2 and all(map(self._is_data, given)) and len(self.factors) < 4:
            roles = ["weights", "value"] if self.factors else ["query", "key"]
        else:
            return
        where = location_here()
        copies = [tensor.detach().clone() for tensor in given[: len(roles)]]
        self.factors += [ProductInput(tensor, role, where) for tensor, role in zip(copies, roles, strict=False)]

    def _stepped(self, call: FunctionCall) -> int | None:
        """Record a call that returns one tensor of floats as a step, and return its number. For several results the
        number is that of the latest input; for other tensors None."""
        given = frozenset(place for tensor in call.given if (place := self._source(tensor)) is not None)
        out = call.args[0] if call.result is None and call.args else call.result
        if not isinstance(out, Tensor):
            return max(given, default=None)
        if not out.is_floating_point():
            return None
        self.steps.append(FlowStep(call.name, out.detach().clone(), location_here(), given))
        return len(self.steps) - 1

    def _source(self, tensor: Tensor) -> int | None:
        place = self._data.get(tensor)
        return self._inputs.get(memory_of(tensor)) if place is None else place

    def _is_data(self, tensor: Tensor) -> bool:
        return tensor in self._data or memory_of(tensor) in self._inputs


def batch_mixing_line(subject: Subject, inputs: NamedInputs) -> Location | None:
    """The first line whose result depends on two batch items at one place."""
    try:
        before = followed(subject.fresh(), inputs, every=True).steps
        changed = [
            followed(subject.fresh(), inputs.changed(slice(None), item=item), every=True).steps
            for item in range(inputs.batch)
        ]
    except (Inapplicable, TargetError):
        return None
    for place, step in enumerate(before):
        outs = [
            steps[place].out for steps in changed if place < len(steps) and steps[place].out.shape == step.out.shape
        ]
        if len(outs) == inputs.batch and step.location is not None and _overlap(step.out, outs):
            return step.location
    return None


def _overlap(before: Tensor, outs: Sequence[Tensor]) -> bool:
    """Whether some element differs from `before` in more than one of the outputs."""
    return bool((torch.stack([out != before for out in outs]).sum(0) > 1).any())
