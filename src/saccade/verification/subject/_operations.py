"""Operations of a call: modes that record them, and the running line of the target's own source."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..findings._finding import Location
from ..findings._locate import is_own, line_of

_CALLER = str(Path(__file__).with_name("_calling.py"))


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


def location_here() -> Location | None:
    """The line of the target's own source that is running now, None if the target is not what runs."""
    for frame in _frames():
        if frame.f_code.co_filename == _CALLER:
            return None
        if is_own(frame.f_code.co_filename):
            return line_of(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    return None


def module_here() -> Location | None:
    """The running line of the target's own module that is nearest, past functions that it calls; else as
    `location_here`."""
    for frame in _frames():
        if frame.f_code.co_filename == _CALLER:
            break
        if is_own(frame.f_code.co_filename) and isinstance(frame.f_locals.get("self"), torch.nn.Module):
            return line_of(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    return location_here()


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
