"""Hooks that do nothing in a forward: such as only note which module runs, and transformers' own where nothing is asked
of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ..operator import _observers

_CAPTURING = "transformers.utils.output_capturing"  # leaves its hooks behind after one output_hidden_states=True


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
