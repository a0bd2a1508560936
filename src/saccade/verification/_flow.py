"""The linear maps of a target, found while it runs: every product of what comes from the inputs with a parameter, in the
order of the calls, with the graph between them.

Shapes: B batch, L length, E model width.
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

from ._finding import Location
from ._inputs import Inputs
from ._locate import location_here
from ._steady import same_random_numbers
from ._subject import Result, Subject

_MHA = inspect.unwrap(F.multi_head_attention_forward)
_PRODUCTS = {
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot", "conv1d",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class LinearMap:
    """One product of data with a parameter."""

    given: Tensor  # what came in, as it stands in the graph
    out: Tensor
    weight: Tensor  # the parameter, or what was made of it
    location: Location | None


@dataclass(frozen=True, eq=False)
class Flow:
    """One call of the target, with gradients."""

    result: Result
    maps: tuple[LinearMap, ...]
    touched: frozenset[int]  # where the numbers of all tensors lie that took part


def followed(subject: Subject, inputs: Inputs, change: Callable[[int, Tensor], Tensor] | None = None) -> Flow:
    """Call `subject` and keep its linear maps. `change(place, out)` may put other numbers for a map's result."""
    mode = _Sight(inputs, change)
    with same_random_numbers(), torch.enable_grad(), mode:
        result = subject(inputs)
    return Flow(result, tuple(mode.maps), frozenset(mode.touched))


class _Sight(TorchFunctionMode):
    def __init__(self, inputs: Inputs, change: Callable[[int, Tensor], Tensor] | None) -> None:
        super().__init__()
        self._change = change
        self._data: dict[int, Tensor] = {}  # kept alive, so that no other tensor takes the id
        self._places = {_place(tensor) for tensor in inputs.tensors.values()}
        self.maps: list[LinearMap] = []
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
            changed = [args[0]] if args and isinstance(args[0], Tensor) and result is None else []
            for tensor in (*_tensors(result), *changed, *_tensors(kwargs.get("out"))):
                self._data[id(tensor)] = tensor
        return result

    def _mapped(self, func: Any, tensors: list[Tensor], result: Any) -> Any:
        if getattr(func, "__name__", "") not in _PRODUCTS or not isinstance(result, Tensor):
            return result
        weights = [one for one in tensors if one.dim() > 1 and one.requires_grad and not self._is_data(one)]
        data = [one for one in tensors if self._is_data(one) and one.is_floating_point()]
        if len(weights) != 1 or len(data) != 1:
            return result
        if self._change is not None:
            result = self._change(len(self.maps), result)
        self.maps.append(LinearMap(data[0], result, weights[0], location_here()))
        return result

    def _is_data(self, tensor: Tensor) -> bool:
        return id(tensor) in self._data or _place(tensor) in self._places

    def _entered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """F.multi_head_attention_forward would hand itself to this mode again, so it is told not to."""
        names = {**_MHA.__globals__, "has_torch_function": lambda _: False}
        inner = types.FunctionType(_MHA.__code__, names, _MHA.__name__, _MHA.__defaults__, _MHA.__closure__)
        inner.__kwdefaults__ = _MHA.__kwdefaults__
        with self:
            return inner(*args, **kwargs)


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
