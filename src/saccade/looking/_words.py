"""Words of a text, and which pieces of the tokenizer make them up.

A word is a run of letters and digits (apostrophes inside belong to it), a single punctuation mark, a single
ideograph, or a run of line breaks. A piece that reaches over several of these joins them into one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

START = "<s>"
_APOSTROPHES = "'’"  # noqa: RUF001
_IDEOGRAPHS = ((0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
_JOINER = "\u200d"


@dataclass(frozen=True)
class Word:
    """``text[start:stop]``, made of the pieces ``first <= i < last`` (positions in the model's input)."""

    text: str
    start: int
    stop: int
    first: int
    last: int

    @property
    def is_start(self) -> bool:
        return self.first == 0

    @property
    def is_delimiter(self) -> bool:
        """Whether it is punctuation or a line break: no letter or digit in it."""
        return not self.is_start and not any(c.isalnum() for c in self.text)

    @property
    def label(self) -> str:
        """The word as it can be shown on one line: no control characters, line breaks drawn."""
        if self.text and not self.text.strip("\n"):
            return "⏎"
        return "".join("⏎" if c == "\n" else "�" if unicodedata.category(c) in ("Cc", "Cs") else c for c in self.text)


def split_words(text: str) -> list[tuple[int, int]]:
    """The words of ``text`` as (start, stop) in characters, in order."""
    spans, i = [], 0
    while i < len(text):
        stop = _end_of_word(text, i)
        if not text[i].isspace() or text[i] == "\n":
            spans.append((i, stop))
        i = stop
    return spans


def _end_of_word(text: str, i: int) -> int:
    first = text[i]
    if first == "\n":
        return _run(text, i, lambda c: c == "\n")
    if first.isspace():
        return i + 1
    if first.isalnum() and not _is_ideograph(first):
        stop = _run(text, i, _in_word)
        while stop + 1 < len(text) and text[stop] in _APOSTROPHES and _in_word(text[stop + 1]):
            stop = _run(text, stop + 1, _in_word)
        return stop
    stop = _run(text, i + 1, _is_mark)
    while stop < len(text) and text[stop - 1] == _JOINER and not text[stop].isspace():
        stop = _run(text, stop + 1, _is_mark)  # an emoji made of several joined ones is one mark
    return stop


def _run(text: str, i: int, belongs: Callable[[str], bool]) -> int:
    while i < len(text) and belongs(text[i]):
        i += 1
    return i


def _in_word(c: str) -> bool:
    return (c.isalnum() and not _is_ideograph(c)) or _is_mark(c)


def _is_mark(c: str) -> bool:
    return c > "\x7f" and (unicodedata.category(c)[0] == "M" or c in "\u200c\u200d")


def _is_ideograph(c: str) -> bool:
    return c >= "\u3040" and any(low <= ord(c) <= high for low, high in _IDEOGRAPHS)


def group(text: str, spans: Sequence[tuple[int, int]], words: Iterable[tuple[int, int]] | None = None) -> list[Word]:
    """The start token and then the words of ``text``, each with its pieces.

    ``spans`` are the pieces' characters without the start token; piece ``i`` stands at position ``i + 1`` of the
    model's input. Every piece belongs to exactly one word; blanks belong to the word after them.
    """
    found = list(split_words(text) if words is None else words)
    groups: list[list[int]] = []  # first word, last word, first piece, end of pieces
    at = waiting = 0
    for piece, (start, stop) in enumerate(spans):
        while at < len(found) and found[at][1] <= start:
            at += 1
        last = at
        while last + 1 < len(found) and found[last + 1][0] < stop:
            last += 1
        if at == len(found) or found[at][0] >= stop:
            continue  # a blank waits for its word
        if groups and groups[-1][1] >= at:
            groups[-1][1], groups[-1][3] = max(last, groups[-1][1]), piece + 1
        else:
            groups.append([at, last, waiting, piece + 1])
        waiting = piece + 1
    if groups:
        groups[-1][3] = len(spans)
    out = [Word(START, 0, 0, 0, 1)]
    for a, b, first, end in groups:
        start, stop = found[a][0], found[b][1]
        out.append(Word(text[start:stop], start, stop, first + 1, end + 1))
    return out
