"""Finds the place in the target's own source where something happened."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from pathlib import Path

import torch

from ._finding import Location

_PACKAGES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_LIBRARIES = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))
_PYTHON = sysconfig.get_path("stdlib")


def location_of(error: BaseException) -> Location | None:
    """The deepest line of the target's own source that `error` came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own(frame.filename)]
    return line_of(own[-1].filename, own[-1].lineno or 0, own[-1].name) if own else None


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


def line_of(path: str, line: int, function: str) -> Location:
    return Location(path, line, linecache.getline(path, line).strip(), function)
