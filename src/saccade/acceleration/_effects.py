"""Side effects of a module's call: changed attributes, lists and random states, and hooks.

A module that changes anything is computed the plain way. Every further computation, of samples or to compare, runs on
a copy that shares the weights.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..operator import _observers
from ..operator._derived import state
from ._structure import OURS

CHANGES = "changes attributes, its arguments or random numbers when it is called"
_CAPTURING = "transformers.utils.output_capturing"  # leaves its hooks behind after one output_hidden_states=True
_VALUES = bool, int, float, complex, str, bytes, type(None)
_CONTAINERS = dict, list, tuple, set, frozenset, deque
_SKIPPED = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules", "training"} | {*OURS}


class Effects:
    """A snapshot of a module's state and its arguments before a call.

    Args:
        module: or another callable.
        arguments: of the call.
    """

    def __init__(self, module: Any, arguments: Iterable[Any] = ()):
        self._roots = module, *arguments
        self._before = self._now()

    def seen(self) -> bool:
        """Whether the state or the arguments have changed since the snapshot."""
        now = self._now()
        return len(now) != len(self._before) or not all(map(_same, self._before, now))

    def _now(self) -> list[Any]:
        # The objects themselves are kept: the address of one that is gone may be another one's.
        return [*_held(self._roots), random.getstate(), torch.get_rng_state().numpy().tobytes()]


def shadow(module: Any, keep: Callable[[Any], bool] = lambda forward: False) -> Any:
    """A copy that shares the weights; calls of it write only to the copy. Raises the errors of `deepcopy`.

    Args:
        module: or another callable.
        keep: whether a `forward` among a part's own attributes is the copy's, too.
    """
    memo: dict[int, Any] = {id(x): x for x in _held((module,)) if isinstance(x, nn.Parameter)}
    if not isinstance(module, nn.Module):
        return copy.deepcopy(module, memo)
    parts = list(module.modules())
    for part in parts:
        memo[id(part)] = type(part).__new__(type(part))
    for part in parts:
        attributes = dict(vars(part))
        own = {name: attributes.pop(name, None) for name in OURS}
        vars(memo[id(part)]).update(copy.deepcopy(attributes, memo))
        if keep(own["forward"]):
            vars(memo[id(part)])["forward"] = own["forward"]
    return memo[id(module)]


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restores the random generators at the end of the block."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])


def _held(roots: Iterable[Any]) -> Iterator[Any]:
    """All objects that the modules' attributes hold, directly or through containers, and each tensor's version."""
    waiting, known = list(roots), set()
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, (*_VALUES, type, ModuleType)) or id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, Tensor):
            yield value._version if isinstance(value, nn.Parameter) and not value.is_inference() else state(value)
        elif isinstance(value, torch.Generator):
            yield value.get_state().numpy().tobytes()
        elif type(value).__module__ == "numpy":
            yield value.tobytes() if hasattr(value, "tobytes") else value
        else:
            waiting += _inside(value)


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, _CONTAINERS):
        yield from value
    elif isinstance(value, MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, FunctionType):
        yield from _read_by(value)
    elif isinstance(value, nn.Module):
        yield from (x for name, x in vars(value).items() if name not in _SKIPPED)
        for attributes in _classes(value):
            yield from (x for x in attributes.values() if isinstance(x, (FunctionType, *_CONTAINERS, *_VALUES)))
    elif hasattr(value, "__dict__"):
        yield vars(value)


def _classes(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Attributes defined by the module's classes, except by PyTorch's own."""
    for kind in type(module).__mro__:
        if kind is not object and not kind.__module__.startswith("torch."):
            yield {name: value for name, value in vars(kind).items() if name == "__call__" or name[:2] != "__"}


def reaches_outside(module: Any) -> bool:
    """Whether a callable reads state that a copy of it would share: variables of its source file or its class."""
    held = list(_held((module,)))
    functions = (x for x in held if isinstance(x, FunctionType))
    read = (x for function in functions for x in _read_by(function))
    of_classes = (x for part in held if isinstance(part, nn.Module) for kind in _classes(part) for x in kind.values())
    outside = any(not isinstance(x, type | FunctionType) for x in read)
    return outside or any(isinstance(x, (dict, list, set, deque)) for x in of_classes)


def _read_by(function: FunctionType) -> Iterator[Any]:
    """Variables that a function can write to: of its closure, and numbers and containers among its globals."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            yield None
    for name in set(function.__code__.co_names) & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, (*_VALUES, Tensor)) or type(value) in _CONTAINERS:
            yield value


def _same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    return type(before) is type(now) and isinstance(before, (*_VALUES, tuple)) and bool(before == now)


def idle(*hooks: Mapping[Any, Any]) -> bool:
    """Whether a module may be computed without these hooks now."""
    if _observers.passive(*hooks):
        return True
    others = [hook for table in hooks for hook in table.values() if not _observers.passive({0: hook})]
    return not captures() and all(getattr(hook, "__module__", None) == _CAPTURING for hook in others)


def captures() -> bool:
    """Whether transformers collects outputs of parts in this forward, or may do so unseen."""
    module: Any = sys.modules.get(_CAPTURING)
    if module is None:
        return False
    collector = getattr(module, "_active_collector", None)
    return collector is None or bool(collector.get())  # by the names of the outputs
