"""The compiled module `saccade._native`."""

from __future__ import annotations

import importlib
from typing import Any


def _load() -> tuple[Any, str | None]:
    """The compiled module, or why there is none."""
    name = f"{__package__.partition('.')[0]}._native"
    try:
        return importlib.import_module(name), None
    except ModuleNotFoundError as error:
        if error.name == name:
            return None, "this installation has no native build (it was made without a C++ compiler)"
        return None, f"the native build is broken: {error}"
    except ImportError as error:
        return None, f"the native build is broken: {error}"


module, missing = _load()
