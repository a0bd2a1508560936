"""Where a module's own class gives an attribute its value."""

from __future__ import annotations

import inspect
import re

from torch import nn

from ._finding import Location
from ._locate import is_own


def attribute_line(owner: nn.Module | None, name: str) -> Location | None:
    """The line `self.<name> = ...` of the owner's class or of one it is derived from."""
    for kind in () if owner is None else type(owner).__mro__:
        try:
            lines, first = inspect.getsourcelines(kind)
            path = inspect.getsourcefile(kind)
        except (OSError, TypeError):
            continue
        if path is None or not is_own(path):
            continue
        for at, line in enumerate(lines):
            if re.search(rf"self\.{re.escape(name)}\b[^=()]*=[^=]", line) or f'"{name}"' in line:
                return Location(path, first + at, line.strip(), "__init__")
    return None
