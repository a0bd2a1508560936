"""Output to a terminal: text from files and arguments without the characters that command a terminal."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast

from ._waiting import WaitingLine

__all__ = ["cleaned_streams", "printable", "standard_input", "uncleaned"]

# C0 but tab and line feed, DEL, C1, bidirectional embeddings, overrides and isolates; and halves of surrogate pairs,
# which is how Python holds bytes of file names that are not UTF-8: 0x9B is C1's CSI.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BAR = re.compile(r"(?:\r|(?:\x1b\[A)+\Z)?")


def printable(text: str) -> str:
    """`text` with U+FFFD instead of every character that a terminal acts upon; tabs and line feeds stay."""
    return _COMMANDS.sub("\ufffd", text)


def uncleaned(stream: TextIO) -> TextIO:
    """The stream itself, for data in a pipe and for a console that cleans on its own."""
    if not isinstance(stream, _Cleaned):
        return stream
    stream.begin()
    return stream.stream


def standard_input() -> TextIO:
    """Standard input, after our waiting line has been removed from the terminal."""
    uncleaned(sys.stderr)
    return sys.stdin


@contextlib.contextmanager
def cleaned_streams() -> Iterator[None]:
    """A block that cleans all text written to `sys.stdout` and `sys.stderr`: messages, warnings and other libraries'
    logs.

    Until the first output, a line on a terminal counts the seconds.
    """
    outer = sys.stdout, sys.stderr
    waiting = None if sys.stderr is None else WaitingLine(uncleaned(sys.stderr))

    def begin() -> None:
        if waiting is not None:
            waiting.end()

    # Other libraries' bars return to the start of the line and climb; no message of ours is written like that.
    sys.stdout, sys.stderr = (
        cast(TextIO, _Cleaned(uncleaned(stream), begin, bars=bars)) if stream is not None else stream
        for stream, bars in zip(outer, (False, True), strict=True)
    )
    try:
        yield
    finally:
        begin()
        sys.stdout, sys.stderr = outer


class _Cleaned:
    """A text stream that cleans what is written and otherwise behaves as the original."""

    def __init__(self, stream: TextIO, begin: Callable[[], None], *, bars: bool):
        self.stream, self.begin = stream, begin
        self._bars = bars

    def write(self, text: str) -> int:
        self.begin()
        moves = _BAR.match(text).end() if self._bars else 0  # type: ignore[union-attr]
        self.stream.write(text[:moves] + printable(text[moves:]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
