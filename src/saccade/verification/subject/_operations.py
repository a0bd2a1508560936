"""Modes that record the operations of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ..findings._finding import Location
from ._current_line import location_here


class EagerOperations(TorchDispatchMode):
    """A dispatch mode of eager calls. PyTorch hides others from its compiler, and imports that for it, which takes
    two seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class WatchedOperations(EagerOperations):
    """Keeps the results of `judge(operation, arguments, result)` that are not empty, with the running line of the
    target's source."""

    def __init__(self, judge: Callable[[Any, tuple[Any, ...], Any], Any]) -> None:
        super().__init__()
        self._judge = judge
        self.found: list[tuple[Any, Location | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        said = self._judge(func, (*args, *(kwargs or {}).values()), result)
        if said:
            self.found.append((said, location_here()))
        return result

    @property
    def first_line(self) -> Location | None:
        return self.found[0][1] if self.found else None
