"""What a module is made of, so that parts replaced later are noticed: adapters, other activations, own forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

OURS = "forward", "_ff_block", "__reduce_ex__", "__deepcopy__"  # attributes that a spot sets on its module
_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {*OURS}
_VALUES = bool, int, float, str, type(None)


class Structure:
    """The children, classes and methods of modules, and the plain values that they hold.

    Args:
        parts: the modules.
        is_ours: whether a `forward` among a module's own attributes is Saccade's.
    """

    def __init__(self, parts: Iterable[nn.Module], is_ours: Callable[[Any], bool]):
        self._is_ours = is_ours
        self._parts = [
            (part, vars(part), type(part), type(part).forward, tuple(part._modules.items())) for part in parts
        ]
        self._values = self._values_now()

    def intact(self) -> bool:
        """Whether every child, class and method is what it was."""
        for part, attributes, kind, forward, children in self._parts:
            if type(part) is not kind or kind.forward is not forward:
                return False
            if "forward" in attributes and not self._is_ours(attributes["forward"]):
                return False
            modules = attributes["_modules"]
            if len(modules) != len(children):
                return False
            for name, child in children:
                if modules.get(name) is not child:
                    return False
        return True

    def keeps_values(self) -> bool:
        """Whether numbers, names, functions and the mode (train or eval) are what they were."""
        return all(attributes.get(name) is value for attributes, name, value in self._values)

    def remember_values(self) -> None:
        """From now on they are what they are now."""
        self._values = self._values_now()

    def _values_now(self) -> list[tuple[dict[str, Any], str, Any]]:
        return [
            (attributes, name, value)
            for _, attributes, *_ in self._parts
            for name, value in attributes.items()
            if name not in _INTERNAL and (isinstance(value, _VALUES) or callable(value))
        ]


def has_own_forward(module: nn.Module) -> bool:
    """Whether a `forward` was set on this very module, in place of its class's."""
    own = vars(module).get("forward")
    return own is not None and not (getattr(own, "__self__", None) is module and own.__func__ is type(module).forward)
