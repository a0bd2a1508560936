"""What a stack holds beside its weights' values, put aside while it is verified and given back afterwards."""

from __future__ import annotations

import functools
import inspect
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...support._restored import seeded

_PLAIN = (int, float, str, bytes, bool, type(None), torch.dtype, torch.device)
_CONTAINERS = {dict, OrderedDict, defaultdict, list, set, deque}  # others may load, count or refuse when copied
_MOST = 50_000  # objects beside weights: what is left out are data sets of a trainer
_LONGEST = 10_000  # entries of a list or dict: longer ones are data
_LARGEST = 2**28  # bytes of a tensor whose numbers are copied
Gradients = dict[nn.Parameter, Tensor]
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "transformers", "saccade"}


@contextmanager
def kept(*holders: Any) -> Iterator[None]:
    """Within, modules and functions may change in any way but by numbers written into parameters' own memory.
    Afterwards, also after an error, all is as before: attributes, tables and caches made or replaced by calls, buffers,
    modes, hooks, configurations, variables of functions, optimizers, gradients, random state.
    """
    state = _State()
    state.find(holders)
    python = random.getstate()
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    drawn = numpy.get_state() if numpy is not None else None
    try:
        state.put_aside()
        with seeded(None, devices=None):
            yield
    finally:
        state.give_back()
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(drawn)


@contextmanager
def attributes(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Within, attributes of objects have other values: (object, name, value) each."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for held, name, value in list(changes):
            own = getattr(held, name)
            setattr(held, name, value)
            before.append((held, name, own))
        yield
    finally:
        for held, name, value in reversed(before):
            setattr(held, name, value)


class _Kept(NamedTuple):
    """A tensor as it is. `copy` is None for parameters, whose memory nothing writes to."""

    tensor: Tensor
    data: Tensor
    copy: Tensor | None
    requires_grad: bool
    gradient: Tensor | None


class _State:
    """Objects that are reached from functions and modules, each once, with what each holds."""

    def __init__(self) -> None:
        self.containers: list[tuple[Any, Any]] = []  # dicts, lists, sets and deques, each with its shallow copy
        self.tensors: list[_Kept] = []
        self.cells: list[tuple[Any, Any]] = []  # variables of functions
        self.globals: list[tuple[dict[str, Any], str, Any]] = []
        self.generators: list[tuple[torch.Generator, Tensor]] = []
        self.optimizers: list[tuple[torch.optim.Optimizer, dict[Any, Any]]] = []

    def find(self, holders: Iterable[Any]) -> None:
        waiting = deque(holders)
        reached: dict[int, Any] = {}
        while waiting and len(reached) < _MOST:
            value = waiting.popleft()
            if type(value) in _PLAIN or id(value) in reached:
                continue
            reached[id(value)] = value
            if isinstance(value, nn.Module):  # its weights whole, however many other objects there are
                for tensor in (*value.parameters(), *value.buffers()):
                    if id(tensor) not in reached:
                        reached[id(tensor)] = tensor
                        self._keep(tensor)
            waiting.extend(self._held(value))

    def _held(self, value: Any) -> Iterable[Any]:
        """The objects that `value` holds; `value` itself is kept."""
        if isinstance(value, Tensor):
            self._keep(value)
            return ()
        if isinstance(value, torch.Generator):
            self.generators.append((value, value.get_state()))
            return ()
        if type(value) in _CONTAINERS:
            if len(value) > _LONGEST:
                return ()
            self.containers.append((value, value.copy()))
            return value.values() if isinstance(value, dict) else value
        if isinstance(value, (tuple, frozenset)):
            return value if len(value) <= _LONGEST else ()
        if isinstance(value, functools.partial):
            return (value.func, value.args, value.keywords)
        if inspect.ismethod(value):
            return (value.__self__, value.__func__)
        if inspect.isfunction(value):
            return self._variables(value)
        if isinstance(value, torch.optim.Optimizer):
            self.optimizers.append((value, dict(value.state)))
            return [vars(value)[name] for name in vars(value) if name != "state"]
        return self._attributes(value)

    def _keep(self, tensor: Tensor) -> None:
        own = isinstance(tensor, nn.Parameter) or tensor.numel() * tensor.element_size() > _LARGEST
        with torch.no_grad():
            copy = None if own else tensor.detach().clone()
        gradient = tensor.grad if tensor.is_leaf else None
        self.tensors.append(_Kept(tensor, tensor.data, copy, tensor.requires_grad, gradient))

    def _variables(self, function: Any) -> Iterator[Any]:
        for cell in function.__closure__ or ():
            try:
                self.cells.append((cell, cell.cell_contents))
            except ValueError:  # not set yet
                continue
            yield cell.cell_contents
        yield from (function.__defaults__ or ())
        if _is_of_library(function.__module__):
            return
        for name in function.__code__.co_names:
            if name in function.__globals__:
                value = function.__globals__[name]
                self.globals.append((function.__globals__, name, value))
                yield value

    @staticmethod
    def _attributes(value: Any) -> tuple[Any, ...]:
        module = type(value).__module__.partition(".")[0]
        spaces = ("SimpleNamespace", "Namespace")
        if isinstance(value, type) or (module in sys.stdlib_module_names and type(value).__name__ not in spaces):
            return ()
        held = getattr(value, "__dict__", None)
        return (held,) if type(held) is dict else ()

    def put_aside(self) -> None:
        """Gradients and optimizers' states have the dtype of the parameters, which may change, so they are empty."""
        for kept in self.tensors:
            if kept.gradient is not None:
                kept.tensor.grad = None
        for optimizer, _ in self.optimizers:
            optimizer.state.clear()

    def give_back(self) -> None:
        for container, copy in self.containers:
            _refill(container, copy)
        for optimizer, entries in self.optimizers:
            _refill(optimizer.state, entries)
        for cell, contents in self.cells:
            cell.cell_contents = contents
        for held, name, value in self.globals:
            held[name] = value
        for generator, state in self.generators:
            generator.set_state(state)
        for tensor, data, copy, requires_grad, gradient in self.tensors:
            if copy is not None:
                with torch.inference_mode(data.is_inference()), torch.no_grad():
                    data.copy_(copy)
            tensor.data = data
            if tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
                tensor.grad = gradient


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _refill(container: Any, copy: Any) -> None:
    """Put into a container what its copy holds. Never empty on the way, as others may hold it, too."""
    if isinstance(container, dict):
        if len(container) == len(copy) and all(container.get(key) is value for key, value in copy.items()):
            return
        for key in [key for key in container if key not in copy]:
            del container[key]
        container.update(copy)
    elif isinstance(container, list):
        container[:] = copy
    else:
        container.clear()
        container.update(copy) if isinstance(container, set) else container.extend(copy)


def gradients_of(modules: Iterable[nn.Module], backward: Callable[[], Any]) -> Gradients:
    """The gradients that `backward` leaves; parameters and their own gradients are as before."""
    parameters = list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))
    kept = [(parameter.grad, parameter.data.clone()) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        with torch.enable_grad(), seeded(0, devices=None):
            backward()
        return {parameter: parameter.grad.detach().clone() for parameter in parameters if parameter.grad is not None}
    finally:
        for parameter, (gradient, data) in zip(parameters, kept, strict=True):
            parameter.grad = gradient
            parameter.data.copy_(data)  # a step may have moved them
