"""Whether modules are still what they were when something was read from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ._backends.native import _kernels


class Unchanged:
    """The types and attributes of modules, compared by identity, and the entries of dictionaries among the attributes:
    children, parameters, buffers and hooks, in their order.

    Numbers that are written into a tensor, its memory, and what other attributes hold inside are not compared. The
    compiled module compares: a step of decoding asks for hundreds of modules. The modules are kept alive: an owner that
    is one of them, or held by one, is part of a cycle.

    Args:
        beside: more dictionaries, attributes of other objects among them.
    """

    def __init__(self, modules: Iterable[nn.Module], beside: Iterable[Mapping[str, Any]] = ()):
        parts = list(modules)
        self._objects = tuple(x for part in parts for x in (part, type(part), vars(part)))
        kinds: set[Any] = set(map(type, parts))
        self._methods = {kind: (kind.forward, kind.__call__) for kind in kinds}
        inside = (value for part in parts for value in vars(part).values() if isinstance(value, dict))
        dicts = [*map(vars, parts), *inside, *beside]
        self._entries = tuple(x for entry in dicts for x in (entry, (*entry,), (*entry.values(),)))
        self._same = _kernels.module.Unchanged(self._objects, self._entries)  # which only points at these tuples

    def __call__(self) -> bool:
        """Whether all is as it was."""
        for kind, (forward, call) in self._methods.items():
            if kind.forward is not forward or kind.__call__ is not call:
                return False
        return bool(self._same.holds())
