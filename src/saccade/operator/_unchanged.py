"""Whether modules are still what they were when something was read from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ._backends.native import _kernels

_OF_ALL = frozenset(vars(nn.Module()))
_CALLED_WITH = "training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"


class Unchanged:
    """The types, attributes, children, parameters, buffers and forward hooks of modules, compared by identity.

    What an attribute holds inside is looked at where it is a dictionary; what else may change is given as `beside`.
    Numbers that are written into a tensor, and its memory, are not looked at. The compiled module compares: a step of
    decoding asks for hundreds of modules.

    Args:
        beside: more dictionaries, attributes of other objects among them.
    """

    def __init__(self, modules: Iterable[nn.Module], beside: Iterable[Mapping[str, Any]] = ()):
        parts = list(modules)
        self._kinds = tuple(x for part in parts for x in (part, type(part)))
        kinds: set[Any] = set(map(type, parts))
        self._methods = {kind: (kind.forward, kind.__call__) for kind in kinds}
        entries: list[Any] = []
        for part in parts:
            own = vars(part)
            read = {name: value for name, value in own.items() if name in _CALLED_WITH or name not in _OF_ALL}
            entries += own, (*read,), (*read.values(),)
            for value in read.values():
                if isinstance(value, dict):
                    entries += value, (*value,), (*value.values(),)
        for value in beside:
            entries += value, (*value,), (*value.values(),)
        self._entries = tuple(entries)  # which the compiled object only points at
        self._same = _kernels.module.Unchanged(self._kinds, self._entries)

    def __call__(self) -> bool:
        """Whether all is as it was."""
        for kind, (forward, call) in self._methods.items():
            if kind.forward is not forward or kind.__call__ is not call:
                return False
        return bool(self._same.holds())
