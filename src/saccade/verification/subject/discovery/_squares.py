"""Targets that accept one length only, or no longer one, because their mask is as wide as something other than the
sequence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ...findings._finding import Location, TargetError
from .._reading import Reading
from .._source import line_with
from .._steady import takes
from .._subject import Subject
from . import _sizes
from ._trials import TargetTrials, TrialSizes

_MASKING = re.compile(r"mask|tril|triu|causal|where\(")
_MOST, _OTHER = 256, 5
# A square is made of two sides that are written alike: torch.ones(head_size, head_size).
_MADE = r"(?:ones|zeros|full|empty|tril|triu|view)\w*\(.*?(?<![\w.])(?P<side>{})\s*,\s*(?P=side)\s*[,)]"
_OF_A_HEAD = (
    r"(?:\w+\.)*(?:head_?(?:size|dim|width)|(?:dim|d|size|width)_?head|d_k|dk)"
    r"|[\w.]+\s*//\s*(?:\w+\.)*(?:\w*heads?|h|H)|[\w.]+\.(?:shape\[-1\]|size\(-1\))"
)
_OF_THE_MODEL = r"(?:\w+\.)*(?:embed_dim|embed_size|emb_dim|model_dim|d_model|n_embd|hidden_size)"
_OF_LENGTHS = r"(?:\w+\.)*(?:block\w*|context\w*|ctx\w*|n_ctx|max\w*|n_positions|seq\w*|length|len|T|L)"

Working = Callable[[TargetTrials, Reading], Reading | None]


def square_of(trials: TargetTrials, reading: Reading, working: Working) -> TargetError | None:
    """The error of a target whose mask is, for example, (head_size, head_size) instead of (length, length); None if no
    such length makes a call work, or the error is not raised at a mask."""
    for name, size in _widths(trials, reading):
        raised = _raised(trials, reading, working, size)
        if raised is None or raised.location is None or not _MASKING.search(raised.location.code):
            continue
        if reading.form == "attention" and not _follows(trials, reading, working, size):
            continue
        words = f"it takes {size} positions alone: the mask is ({name}, {name}), where (length, length) is expected"
        return TargetError(f"{raised.error}, with {size + 1} positions: {words}", raised.location)
    return None


@dataclass(frozen=True)
class SquareLimit:
    """Why a target takes nothing longer than its heads, or itself, are wide."""

    words: str
    line: Location | None  # that makes the mask; None: how it is made is not known, and it may be by chance


def sliced_square(subject: Subject, longest: int, error: TargetError) -> SquareLimit | None:
    """The limit of a target that fails beyond `longest` positions because its mask is (head_size, head_size)."""
    named = {size: name for name, size in reversed([*_widths(TargetTrials(subject.target), subject.reading)])}
    if longest not in named or error.location is None or not _MASKING.search(error.location.code):
        return None
    name = named[longest]
    made = f"the mask is ({name}, {name}), where (length, length) is expected"
    written = _OF_THE_MODEL if name == "embed_dim" else _OF_A_HEAD
    line = line_with(subject, _MADE.format(written))
    if line is None or not _MASKING.search(line.code):  # a square of something else, as a state or a rotation
        line = error.location if _widens(subject, longest) else None
    of_lengths = line_with(subject, _MADE.format(_OF_LENGTHS)) is not None
    if line is not None and not of_lengths:
        return SquareLimit(made, line)
    if line is None and (of_lengths or longest in _sizes.lengths(subject.target)):
        return None
    return SquareLimit(f"{longest} is its {name}, too: that may be chance, or {made}", None)


def _widens(subject: Subject, longest: int) -> bool:
    """Whether heads that are wider take longer inputs, where their width can be chosen."""
    if subject.form != "attention":
        return False
    wider = replace(subject, reading=replace(subject.reading, width=subject.reading.width + _OTHER))
    return takes(wider, 2, longest + 1)


def head_width(trials: TargetTrials, reading: Reading) -> int | None:
    """The width of a head, if it is known."""
    if reading.form == "attention":
        return reading.width
    named = next(_sizes.head_widths(trials.target), None)
    return named or (reading.width // reading.heads if reading.heads else None)


def _widths(trials: TargetTrials, reading: Reading) -> Iterator[tuple[str, int]]:
    named = [
        ("head_size", head_width(trials, reading)),
        ("embed_dim", reading.width),
        ("num_heads", reading.heads),
        *(("head_size", width) for width in _sizes.projected(trials.target)),
    ]
    given: set[int] = set()
    for name, size in named:
        if size is not None and 1 < size <= _MOST and size not in given:
            given.add(size)
            yield name, size


def _raised(trials: TargetTrials, reading: Reading, working: Working, size: int) -> TargetError | None:
    """The error at the next length, if this length works and the previous one does not."""
    if working(_forced(trials, size), reading) is None or working(_forced(trials, size - 1), reading) is not None:
        return None
    longer = _forced(trials, size + 1)
    return None if working(longer, reading) is not None else next(iter(longer.errors.values()), None)


def _follows(trials: TargetTrials, reading: Reading, working: Working, size: int) -> bool:
    """Whether the only accepted length changes with the width of the inputs."""
    wider = replace(reading, width=reading.width + _OTHER)
    taken = [working(_forced(trials, length), wider) is not None for length in (size, size + _OTHER)]
    return taken == [False, True]


def _forced(trials: TargetTrials, length: int) -> TargetTrials:
    return replace(trials, forced=TrialSizes(2 if length != 2 else 3, length, length), errors={})
