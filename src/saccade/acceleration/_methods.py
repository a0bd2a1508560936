"""A method of a module that is replaced for a while: put back at the end, and plain in copies and pickles."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from ._structure import OURS

_OF_METHODS = (
    *("__wrapped__", "__self__", "__func__", "__name__", "__qualname__"),
    *("__code__", "__globals__", "__closure__", "__defaults__", "__kwdefaults__"),
)


class ReplacedMethod(ABC):
    """What stands in place of a module's method, and has what a bound method has.

    Attributes:
        method: the name. own: the user's method of this name, in place of the class's.
        active: whether it is inside its block. Later it is the module's own method to whoever kept it.
    """

    method = "forward"

    def __init__(self, module: nn.Module):
        self.module, self.active = module, False
        own = vars(module).get(self.method)
        self.own: Callable[..., Any] | None = own.plain if isinstance(own, ReplacedMethod) else own

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In the module's place."""

    def __getattr__(self, name: str) -> Any:
        """What a bound method has: compilers and `inspect.signature` read it."""
        if name not in _OF_METHODS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.plain if name == "__wrapped__" else getattr(self.plain, name)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.plain, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)

    def uncopied(self) -> str | None:
        """Why the module cannot be copied now; None where it can."""
        return None

    @property
    def plain(self) -> Callable[..., Any]:
        """The module's own method, as it is now."""
        if self.own is not None:
            return self.own
        method: Callable[..., Any] = MethodType(getattr(type(self.module), self.method), self.module)
        return method

    def install(self) -> None:
        """Take the module's place, in a way that its copies and pickles do not have."""
        self.active = True
        vars(self.module)[self.method] = self
        vars(self.module).setdefault("__reduce_ex__", _PlainPickle(self.module))
        vars(self.module).setdefault("__deepcopy__", _PlainCopy(self.module))

    def uninstall(self) -> None:
        """Put the module's own method back, unless somebody has set another one since then.

        Whoever keeps the spot, to set it again or to call it, has the module's own method from now on.
        """
        self.active = False
        attributes = vars(self.module)
        if attributes.get(self.method) is self:
            del attributes[self.method]
            if self.own is not None:
                attributes[self.method] = self.own
        for name in OURS:
            if isinstance(attributes.get(name), _PlainPickle):
                del attributes[name]
        for name, value in attributes.items():
            if value is self:
                attributes[name] = self.plain


class _PlainPickle:
    """`__reduce_ex__` of a module with a spot: its pickles are of the plain module."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, protocol: Any) -> Any:
        reduced = list(type(self.module).__reduce_ex__(self.module, protocol))
        if len(reduced) > 2 and isinstance(reduced[2], dict):
            reduced[2] = _without_ours(reduced[2])
        return tuple(reduced)


class _PlainCopy(_PlainPickle):
    """`__deepcopy__` of a module with a spot, by the way of its class: a parametrized module copies its attributes."""

    def __call__(self, memo: Any) -> Any:
        attributes = vars(self.module)
        before = dict(attributes)
        plain = _without_ours(before)
        attributes.clear()
        attributes.update(plain)
        try:
            return copy.deepcopy(self.module, memo)
        finally:
            attributes.clear()
            attributes.update(before)


def _without_ours(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module as they are without acceleration."""
    plain = {}
    for name, value in attributes.items():
        if isinstance(value, ReplacedMethod):
            if value.uncopied() is not None:
                raise RuntimeError(value.uncopied())
            value = value.own if name == value.method else value.plain
        if not isinstance(value, _PlainPickle) and not (name in OURS and value is None):
            plain[name] = value
    return plain
