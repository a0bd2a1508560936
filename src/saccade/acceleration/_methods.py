"""Replaces a module's method temporarily; copies and pickles of the module have the original method."""

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
    """A replacement for a module's method, with the attributes of a bound method.

    Attributes:
        method: the name. own: the user's method of this name, in place of the class's.
        active: whether it is inside its block. Afterwards it calls the module's own method.
    """

    method = "forward"

    def __init__(self, module: nn.Module):
        self.module, self.active = module, False
        own = vars(module).get(self.method)
        self.own: Callable[..., Any] | None = own.plain if isinstance(own, ReplacedMethod) else own

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called in place of the module's method."""

    def __getattr__(self, name: str) -> Any:
        """Attributes of the bound method, which compilers and `inspect.signature` read."""
        if name not in _OF_METHODS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.plain if name == "__wrapped__" else getattr(self.plain, name)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.plain, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)

    def uncopied(self) -> str | None:
        """The reason why the module cannot be copied now; None if it can."""
        return None

    @property
    def plain(self) -> Callable[..., Any]:
        """The module's original method, bound to its current class."""
        if self.own is not None:
            return self.own
        method: Callable[..., Any] = MethodType(getattr(type(self.module), self.method), self.module)
        return method

    def install(self) -> None:
        """Replace the method, except in the module's copies and pickles."""
        self.active = True
        vars(self.module)[self.method] = self
        vars(self.module).setdefault("__reduce_ex__", _PlainPickle(self.module))
        vars(self.module).setdefault("__deepcopy__", _PlainCopy(self.module))

    def uninstall(self) -> None:
        """Restore the original method, unless other code has replaced it since then.

        Code that still holds the layer, and sets or calls it, uses the module's own method from now on.
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
    """`__reduce_ex__` of a module with a replaced method: pickles hold the original module."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, protocol: Any) -> Any:
        reduced = list(type(self.module).__reduce_ex__(self.module, protocol))
        if len(reduced) > 2 and isinstance(reduced[2], dict):
            reduced[2] = _without_ours(reduced[2])
        return tuple(reduced)


class _PlainCopy(_PlainPickle):
    """`__deepcopy__` of a module with a replaced method; it calls the class's own, which parametrized modules have."""

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
    """The attributes of a module, except those that acceleration has set."""
    plain = {}
    for name, value in attributes.items():
        if isinstance(value, ReplacedMethod):
            if value.uncopied() is not None:
                raise RuntimeError(value.uncopied())
            value = value.own if name == value.method else value.plain
        if not isinstance(value, _PlainPickle) and not (name in OURS and value is None):
            plain[name] = value
    return plain
