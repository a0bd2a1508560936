"""What a report says of a target without a mask: which of its arguments might have been one."""

from __future__ import annotations

from ..target._subject import Subject
from ..target.discovery._signature import arguments_of


def no_mask(subject: Subject) -> str:
    """ "it takes no mask", and the optional arguments of unknown purpose that were left at their None."""
    reading = subject.reading
    used = {*reading.names, *reading.constants, reading.causal_flag, reading.cache and reading.cache.argument}
    names = [
        one.name
        for one in (() if reading.call is not None else arguments_of(subject.target))
        if not one.role and not one.required and one.default is None and one.name not in used
    ]
    if not names:
        return "it takes no mask"
    which = f"argument {names[0]} was" if len(names) == 1 else f"arguments {', '.join(names)} were"
    return f"it takes no mask that was recognised: the {which} left out; if one is a mask, say --mask {names[0]}"
