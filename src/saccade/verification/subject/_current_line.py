"""Which line of the target's own source is running now."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from ..findings._finding import Location
from ..findings._locate import is_own, line_of

_CALLER = str(Path(__file__).with_name("_calling.py"))


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
