"""What a module declares: its dropout rates, and where its class gives an attribute its value."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ._finding import Location
from ._locate import is_own
from ._parsing import parsed_by
from ._subject import Subject


@dataclass(frozen=True)
class Rate:
    """A place where the target keeps a dropout rate."""

    owner: str  # the submodule's path, "" for the target itself
    name: str  # the attribute, "" for a dropout module
    value: float

    def __str__(self) -> str:
        return ".".join(part for part in (self.owner, self.name) if part)


def rates_of(subject: Subject) -> tuple[Rate, ...]:
    """Every dropout module, and every number between 0 and 1 that is named as one."""
    found = []
    for path, one in (subject.module or nn.Module()).named_modules():
        if isinstance(one, _DropoutNd):
            found.append(Rate(path, "", one.p))
            continue
        for name, value in vars(one).items():
            if "drop" in name.lower() and type(value) in (float, int) and 0 <= value < 1:
                found.append(Rate(path, name, float(value)))
    return tuple(found)


def with_rates(subject: Subject, rates: tuple[Rate, ...], rate: float) -> Subject:
    """A copy with these dropout rates set to another one."""
    new = subject.fresh()
    for one in rates:
        assert new.module is not None
        setattr(new.module.get_submodule(one.owner), one.name or "p", rate)
    return new


def attribute_line(owner: nn.Module | None, name: str, last: bool = False) -> Location | None:
    """The first or last line `self.<name> = ...` of the owner's class or of one it is derived from."""
    own = rf"self\.{re.escape(name)}"
    wanted = rf"{own}\b[^=()]*=[^=]|{own}\.\w+_\("
    for kind in () if owner is None else type(owner).__mro__:
        try:
            lines, first = parsed_by(inspect.getsourcelines, kind)
            path = inspect.getsourcefile(kind)
        except (OSError, TypeError):
            continue
        if path is None or not is_own(path):
            continue
        numbered = list(enumerate(lines))
        for at, line in reversed(numbered) if last else numbered:
            if re.search(wanted, line) or f'"{name}"' in line:
                return Location(path, first + at, line.strip(), "__init__")
    return None


def function_line(function: Any) -> Location | None:
    """Where a function of the target's own begins."""
    try:
        lines, first = parsed_by(inspect.getsourcelines, function)
        path = inspect.getsourcefile(function)
    except (OSError, TypeError):
        return None
    if path is None or not is_own(path):
        return None
    at = next((at for at, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)
    return Location(path, first + at, lines[at].strip(), function.__name__)
