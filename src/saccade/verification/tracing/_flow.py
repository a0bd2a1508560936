"""What a target computes with its inputs, found while it runs: the products of inputs with parameters (its linear
maps), with the graph between them, and the products of inputs with inputs (scores, and weights with values).

Shape legend: B batch, L length, E model width.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..._seeding import seeded
from ..findings._finding import Location
from ..target._current_line import location_here
from ..target._inputs import NamedInputs
from ..target._subject import CallResult, Subject

_SDPA = torch._C._nn.scaled_dot_product_attention
_MHA = inspect.unwrap(F.multi_head_attention_forward)
_PRODUCTS = {
    "linear",
    "matmul",
    "__matmul__",
    "__rmatmul__",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "einsum",
    "tensordot",
    "conv1d",
}


@dataclass(frozen=True, eq=False)
class LinearMap:
    """One product of data with a parameter."""

    given: Tensor  # what came in, as it stands in the graph
    out: Tensor
    weight: Tensor  # the parameter, or what was made of it
    location: Location | None


@dataclass(frozen=True, eq=False)
class ProductInput:
    """What enters a product of data with data."""

    tensor: Tensor  # a copy
    role: str  # "query" "key" "weights" "value"
    location: Location | None


@dataclass(frozen=True, eq=False)
class FlowStep:
    """One call of PyTorch that computed with what comes from the inputs."""

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
    """Call `subject` and keep its products, and with `every` what each call gave. `change(place, out)` may put other
    numbers for a map's result."""
    mode = _FlowMode(inputs, change, every)
    with seeded(0, devices=None), torch.enable_grad(), mode:
        result = subject(inputs)
    return TargetFlow(result, tuple(mode.maps), tuple(mode.factors), tuple(mode.steps), frozenset(mode.touched))


class _FlowMode(TorchFunctionMode):
    def __init__(self, inputs: NamedInputs, change: Callable[[int, Tensor], Tensor] | None, every: bool) -> None:
        super().__init__()
        self._change, self._every = change, every
        self._data: dict[int, Tensor] = {}  # kept alive, so that no other tensor takes the id
        self._places = {_place(tensor): -1 - at for at, tensor in enumerate(inputs.tensors.values())}
        self._made: dict[int, int] = {}  # by the id of a tensor the place of the last step that made it
        self.maps: list[LinearMap] = []
        self.factors: list[ProductInput] = []
        self.steps: list[FlowStep] = []
        self.touched: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.multi_head_attention_forward:
            return self._entered(args, kwargs)
        result = func(*args, **kwargs)
        tensors = list(_tensors((args, kwargs)))
        self.touched.update(_place(tensor) for tensor in tensors if tensor.numel())
        if any(self._is_data(tensor) for tensor in tensors):
            result = self._mapped(func, tensors, result)
            self._factors_of(func, args, kwargs)
            self._stepped(func, args, tensors, result)
            changed = [args[0]] if args and isinstance(args[0], Tensor) and result is None else []
            for tensor in (*_tensors(result), *changed, *_tensors(kwargs.get("out"))):
                self._data[id(tensor)] = tensor
        return result

    def _mapped(self, func: Any, tensors: list[Tensor], result: Any) -> Any:
        if _name(func) not in _PRODUCTS or not isinstance(result, Tensor):
            return result
        weights = [one for one in tensors if one.dim() > 1 and one.requires_grad and not self._is_data(one)]
        data = [one for one in tensors if self._is_data(one) and one.is_floating_point()]
        if len(weights) != 1 or len(data) != 1:
            return result
        if self._change is not None:
            result = self._change(len(self.maps), result)
        self.maps.append(LinearMap(data[0], result, weights[0], location_here()))
        return result

    def _factors_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [one for one in _tensors((args, kwargs)) if one.is_floating_point()]
        if func is _SDPA:
            roles = ["query", "key", "value"]
        elif _name(func) in _PRODUCTS and len(given) == 2 and all(map(self._is_data, given)) and len(self.factors) < 4:
            roles = ["weights", "value"] if self.factors else ["query", "key"]
        else:
            return
        where = location_here()
        copies = [one.detach().clone() for one in given[: len(roles)]]
        self.factors += [ProductInput(one, role, where) for one, role in zip(copies, roles, strict=False)]

    def _stepped(self, func: Any, args: tuple[Any, ...], tensors: list[Tensor], result: Any) -> None:
        """Steps are those that give one tensor of numbers; of others, results count as made by what these took."""
        if not self._every:
            return
        given = frozenset(place for one in tensors if (place := self._source(one)) is not None)
        out = args[0] if result is None and args else result
        if isinstance(out, Tensor) and out.is_floating_point():
            self._made[id(out)] = len(self.steps)
            self.steps.append(FlowStep(_name(func), out.detach().clone(), location_here(), given))
        elif not isinstance(out, Tensor) and given:
            self._made.update((id(part), max(given)) for part in _tensors(out))

    def _source(self, tensor: Tensor) -> int | None:
        return self._made.get(id(tensor), self._places.get(_place(tensor)))

    def _is_data(self, tensor: Tensor) -> bool:
        return id(tensor) in self._data or _place(tensor) in self._places

    def _entered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """F.multi_head_attention_forward would hand itself to this mode again, so it is told not to."""
        names = {**_MHA.__globals__, "has_torch_function": lambda _: False}
        inner = types.FunctionType(_MHA.__code__, names, _MHA.__name__, _MHA.__defaults__, _MHA.__closure__)
        inner.__kwdefaults__ = _MHA.__kwdefaults__
        with self:
            return inner(*args, **kwargs)


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
