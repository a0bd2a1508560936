"""Where in the target's own source something happened."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from ._finding import Location

_PACKAGES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
_CALLER = str(Path(__file__).with_name("_calling.py"))
_PYTHON = sysconfig.get_path("stdlib")


def location_of(error: BaseException) -> Location | None:
    """The deepest line of the target's own source that `error` came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own(frame.filename)]
    return line_of(own[-1].filename, own[-1].lineno or 0, own[-1].name) if own else None


def location_here() -> Location | None:
    """The line of the target's own source that is running now, None where the target is not what runs."""
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


def error_in_words(error: BaseException) -> str:
    """ "TypeError: ..." on one line, whatever its class does when it is written out."""
    try:
        message = str(error)
    except Exception:
        message = "(its message raises an error itself)"
    return " ".join(f"{type(error).__name__}: {message}".split())[:500]


def is_own(path: str) -> bool:
    """Whether a file is neither PyTorch's, Python's nor Saccade's."""
    if path.startswith(_LIBRARIES) or (path.startswith("<") and not path.startswith("<ipython")):
        return False
    return path.startswith(_PACKAGES) or not path.startswith(_PYTHON)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def line_of(path: str, line: int, function: str) -> Location:
    return Location(path, line, linecache.getline(path, line).strip(), function)
