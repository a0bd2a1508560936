"""Targets that take one length alone, because a mask of theirs is as wide as something else than the sequence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from .._finding import TargetError
from .._reading import Reading
from . import _sizes
from ._trials import Sizes, Trials

_MASKING = re.compile(r"mask|tril|triu|causal|where\(")
_MOST, _OTHER = 256, 5

Working = Callable[[Trials, Reading], Reading | None]


def square_of(trials: Trials, reading: Reading, working: Working) -> TargetError | None:
    """What a target raises whose mask is (head_size, head_size), say, where (length, length) is expected; None where
    no such length makes a call work, or the line that raises is none of a mask."""
    for name, size in _widths(trials, reading):
        raised = _raised(trials, reading, working, size)
        if raised is None or raised.location is None or not _MASKING.search(raised.location.code):
            continue
        if reading.form == "attention" and not _follows(trials, reading, working, size):
            continue
        words = f"it takes {size} positions alone: the mask is ({name}, {name}), where (length, length) is expected"
        return TargetError(f"{raised.error}, with {size + 1} positions: {words}", raised.location)
    return None


def head_width(trials: Trials, reading: Reading) -> int | None:
    """Of a head, as far as it is known."""
    if reading.form == "attention":
        return reading.width
    told = next(_sizes.head_widths(trials.target), None)
    return told or (reading.width // reading.heads if reading.heads else None)


def _widths(trials: Trials, reading: Reading) -> Iterator[tuple[str, int]]:
    named = [
        ("head_size", head_width(trials, reading)), ("embed_dim", reading.width), ("num_heads", reading.heads),
        *(("head_size", one) for one in _sizes.projected(trials.target)),
    ]  # fmt: skip
    seen: set[int] = set()
    for name, size in named:
        if size is not None and 1 < size <= _MOST and size not in seen:
            seen.add(size)
            yield name, size


def _raised(trials: Trials, reading: Reading, working: Working, size: int) -> TargetError | None:
    """What the length after this one raises, where this one works and the one before it does not."""
    if working(_forced(trials, size), reading) is None or working(_forced(trials, size - 1), reading) is not None:
        return None
    longer = _forced(trials, size + 1)
    return None if working(longer, reading) is not None else next(iter(longer.errors.values()), None)


def _follows(trials: Trials, reading: Reading, working: Working, size: int) -> bool:
    """Whether the one length that is taken is another one for another width."""
    wider = replace(reading, width=reading.width + _OTHER)
    taken = [working(_forced(trials, one), wider) is not None for one in (size, size + _OTHER)]
    return taken == [False, True]


def _forced(trials: Trials, length: int) -> Trials:
    return replace(trials, forced=Sizes(2 if length != 2 else 3, length, length), errors={})
