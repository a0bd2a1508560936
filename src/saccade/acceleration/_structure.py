"""The structure of a module, to notice parts that are replaced later: adapters, activations, forwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from itertools import repeat
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

# Attributes that a layer sets on its module.
OURS = "forward", "_ff_block", "feed_forward_chunk", "__reduce_ex__", "__deepcopy__"
_OF_ALL = frozenset(vars(nn.Module()))
_COMPARED = "training", "_modules", "_parameters", "_buffers"  # of these
_FIXED = (
    *(bool, int, float, complex, str, bytes, type(None), type, Enum, FunctionType, BuiltinFunctionType, partial),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.jit.ScriptFunction),
)


class Structure:
    """The children, classes, methods and own attributes of modules.

    Args:
        parts: the modules.
        is_ours: whether a `forward` among a module's own attributes is Saccade's.

    Attributes:
        unknown: which attribute may change without a trace; None if there is none.
    """

    unknown: str | None

    def __init__(self, parts: Iterable[nn.Module], is_ours: Callable[[Any], bool]):
        self._is_ours = is_ours
        self._parts = [
            (part, vars(part), type(part), type(part).forward, type(part).__call__, tuple(part._modules.items()))
            for part in parts
        ]
        self._tensors = [_names(values) for part, *_ in self._parts for values in (part._parameters, part._buffers)]
        self.remember_values()

    def intact(self) -> bool:
        """Whether children, classes, forwards and the names of parameters and buffers are unchanged."""
        for part, attributes, kind, forward, call, children in self._parts:
            if type(part) is not kind or kind.forward is not forward or kind.__call__ is not call:
                return False
            if "forward" in attributes and not self._is_ours(attributes["forward"]):
                return False
            modules = attributes["_modules"]
            if len(modules) != len(children):
                return False
            for name, child in children:
                if modules.get(name) is not child:
                    return False
        for values, names, absent in self._tensors:  # what is added may be 1 now and something else later
            if (values or names) and ((*values,) != names or [*map(is_, values.values(), repeat(None))] != absent):
                return False
        return True

    def keeps_values(self) -> bool:
        """Whether the modules' plain attributes, and the entries of their lists and configurations, are unchanged.

        They are compared by identity, the mode (train or eval) and functions among them.
        """
        try:
            for attributes, count, values_of, values in self._own:
                if len(attributes) != count or not all(map(is_, values_of(attributes), values)):
                    return False
        except KeyError:
            return False
        for inside, names, values in self._inside:
            if (*inside,) != names or not all(map(is_, inside.values(), values)):
                return False
        return self.keeps_lists()

    def keeps_lists(self) -> bool:
        """Whether the entries of the modules' lists are unchanged."""
        return all(len(items) == len(before) and all(map(is_, items, before)) for items, before in self._lists)

    def inside(self) -> list[dict[str, Any]]:
        """The dictionaries, configurations among them, whose entries are remembered."""
        return [inside for inside, *_ in self._inside]

    def remember_values(self) -> None:
        """Remember the present values, with which later values are compared."""
        self.unknown = None
        self._own: list[tuple[dict[str, Any], int, Callable[..., tuple[Any, ...]], tuple[Any, ...]]] = []
        self._inside: list[tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...]]] = []
        self._lists: list[tuple[list[Any], tuple[Any, ...]]] = []
        for part, attributes, *_ in self._parts:
            own = [name for name in attributes if name not in _OF_ALL]
            values_of = itemgetter(*_COMPARED, *own)
            self._own.append((attributes, len(attributes), values_of, values_of(attributes)))
            for name in own:
                value = attributes[name]
                if name not in OURS and not _fixed(value, part) and not self._holds(value):
                    self.unknown = f"holds what may change unnoticed ({name}: {type(value).__name__})"

    def _holds(self, value: Any) -> bool:
        """Remember the entries of a list, a dictionary or a plain object; False if its entries are not its whole
        state."""
        if type(value) is list:
            self._lists.append((value, (*value,)))
            return all(map(_fixed, value))
        if type(value) in (dict, OrderedDict):
            inside = value
        elif hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module | dict | list | set | MethodType):
            inside = vars(value)
        else:
            return False
        if not any(inside is known for known, *_ in self._inside):  # modules share their configuration
            self._inside.append((inside, (*inside,), (*inside.values(),)))
        return _is_configuration(value) or all(map(_fixed, inside.values()))


def _names(tensors: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...], list[bool]]:
    """The names of parameters or buffers, and which of them are None."""
    return tensors, (*tensors,), [value is None for value in tensors.values()]


def _fixed(value: Any, owner: nn.Module | None = None) -> bool:
    """Whether a value cannot change while it stays the same object. A bound method counts only if it is `owner`'s."""
    if isinstance(value, tuple | frozenset):
        return all(map(_fixed, value))
    if isinstance(value, MethodType):
        return value.__self__ is owner
    return isinstance(value, _FIXED)


def _is_configuration(value: Any) -> bool:
    """Whether a value is a configuration of transformers, whose containers do not change a single module."""
    return any(kind.__module__ == "transformers.configuration_utils" for kind in type(value).__mro__)


def has_own_forward(module: nn.Module) -> bool:
    """Whether a `forward` is set on the instance in place of its class's."""
    own = vars(module).get("forward")
    return own is not None and not (getattr(own, "__self__", None) is module and own.__func__ is type(module).forward)
