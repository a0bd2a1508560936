"""One side of a map, queries or keys: the tokens, their words, and the text."""

from __future__ import annotations

import bisect
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ...inspection import Word

MOST_CONTEXT = 32  # characters on each side of a word that a search shows


class SideWord(NamedTuple):
    """A word as sent to the client."""

    text: str
    label: str  # on one line, control characters replaced
    first: int  # its first token, and the token after its last
    end: int
    special: bool
    gap: str  # the text between the word before and this one
    tokens: list[str]


class Match(NamedTuple):
    """A match of a search."""

    word: int  # number of the first word, from 0
    first: int
    end: int
    before: str
    text: str
    after: str


@dataclass(frozen=True, eq=False)
class Side:
    """Tokens of a text, or of something without words.

    ``words`` are in order and cover all tokens; () if unknown. ``pieces`` are the texts of the tokens. ``prompt``:
    the model generated the tokens from here on; None if it generated none.
    """

    id: str
    name: str
    tokens: int
    words: Sequence[Word] = ()
    text: str = ""
    pieces: Sequence[str] = ()
    prompt: int | None = None

    @property
    def named(self) -> bool:
        return bool(self.words)

    @cached_property
    def _firsts(self) -> list[int]:
        return [word.first for word in self.words]

    @cached_property
    def _starts(self) -> list[int]:
        return [word.start for word in self.words]

    def word_at(self, token: int) -> int:
        """The number of a token's word."""
        return bisect.bisect_right(self._firsts, token) - 1

    def span(self, start: int, stop: int) -> list[SideWord]:
        """The words that overlap the tokens [start, stop)."""
        if not self.words or stop <= start:
            return []
        return [self._word(number) for number in range(max(0, self.word_at(start)), self.word_at(stop - 1) + 1)]

    def _word(self, number: int) -> SideWord:
        word = self.words[number]
        before = self.words[number - 1].stop if number else 0
        pieces = list(self.pieces[word.first : word.last]) if self.pieces else []
        gap = self.text[before : word.start] if word.stop > word.start else ""
        return SideWord(word.text, word.label, word.first, word.last, word.special, gap, pieces)

    def search(self, query: str, limit: int) -> tuple[int, list[Match]]:
        """The number of matches of ``query`` in the text, and the first ``limit`` of them.

        Case and accents are ignored: "STRASSE" finds "Straße", and "cafe" and "café" find each other.
        """
        (text, place), (sought, _) = self._folded, _folded(query)
        if not sought or not self.words:
            return 0, []
        matches: list[Match] = []
        total = end = 0
        at = text.find(sought)
        while at >= 0:
            if place(at) >= end:  # a letter that is several when folded counts once
                total, end = total + 1, self._end(place(at + len(sought) - 1))
                if len(matches) < limit:
                    matches.append(self._match(place(at), end))
            at = text.find(sought, at + len(sought))
        return total, matches

    @cached_property
    def _folded(self) -> tuple[str, Callable[[int], int]]:
        return _folded(self.text)

    def _end(self, last: int) -> int:
        """The end of a match whose last character is at ``last``: after the accents that follow it."""
        stop = last + 1
        while stop < len(self.text) and unicodedata.combining(self.text[stop]):
            stop += 1
        return stop

    def _match(self, start: int, stop: int) -> Match:
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        while first + 1 < len(self.words) and self.words[first].stop <= start:
            first += 1
        last = first
        while last + 1 < len(self.words) and self.words[last + 1].stop > self.words[last + 1].start < stop:
            last += 1
        before, after = self.text[max(0, start - MOST_CONTEXT) : start], self.text[stop : stop + MOST_CONTEXT]
        return Match(first, self.words[first].first, self.words[last].last, before, self.text[start:stop], after)


def _folded(text: str) -> tuple[str, Callable[[int], int]]:
    """The text folded for comparison, and the place in ``text`` of each of its characters.

    Letter by letter, as some become several ("ß") and accents none.
    """
    if text.isascii():
        return text.lower(), int
    parts = [
        "".join(c for c in unicodedata.normalize("NFD", letter.casefold()) if not unicodedata.combining(c))
        for letter in text
    ]
    ends = list(accumulate(map(len, parts)))
    return "".join(parts), lambda at: bisect.bisect_right(ends, at)


def side_of_labels(id: str, labels: Sequence[str]) -> Side:
    """A side whose tokens have these labels, each a word, joined by blanks."""
    words, at = [], 0
    for number, label in enumerate(labels):
        words.append(Word(label, at, at + len(label), number, number + 1))
        at += len(label) + 1
    return Side(id, id, len(words), words, " ".join(labels), list(labels))
