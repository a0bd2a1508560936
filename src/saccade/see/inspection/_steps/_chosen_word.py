"""The word that a user names: by its text, its occurrence, or its number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from ....support._numbers import counted
from .._words import Word, about_tokens

_NEAR = 3  # similar words that an error names


def asking(
    words: Sequence[Word], wanted: str | int | None, nth: int | None, *, where: str = "text"
) -> tuple[Word, list[str]]:
    """The chosen word and notes on the choice; its last token is the query. Errors as in `find_word`."""
    many = about_tokens(words)
    default = many and wanted is None and nth is None
    number, note = _of_fewest_tokens(words) if default else find_word(words, wanted, nth, where=where)
    chosen, notes = words[number], [*filter(None, [many, note])]
    if chosen.last - chosen.first > 1:
        notes.append(f"'{chosen.label}' has {chosen.last - chosen.first} tokens: the query is the last of them")
    return chosen, notes


def _of_fewest_tokens(words: Sequence[Word]) -> tuple[int, str]:
    """The last of the words with the fewest tokens, and a note on the choice."""
    sizes = {i: word.last - word.first for i, word in enumerate(words) if not word.special and not word.is_delimiter}
    number = min(sizes, key=lambda i: (sizes[i], -i))
    return number, f"no word was given: '{words[number].label}', the last of {counted(sizes[number], 'token')}, is used"


def find_word(
    words: Sequence[Word], wanted: str | int | None, nth: int | None = None, *, where: str = "text"
) -> tuple[int, str]:
    """The index of the chosen word, and a note on the choice ("" for an unambiguous word).

    Args:
        words: of the text, special ones included.
        wanted: a word (``it``), one of its occurrences (``it:2``), or a number counted from 1 without special tokens;
            None is the last word that is not punctuation.
        nth: the occurrence, counted from 1.
        where: the name of the text in error messages.

    Raises:
        TypeError: neither a word nor a number.
        ValueError: no such word, occurrence or number; the message names similar words.
    """
    ordinary = [i for i, word in enumerate(words) if not word.special]
    if nth is not None:
        _check_occurrence(wanted, nth)
    if wanted is None:
        spoken = [i for i in ordinary if not words[i].is_delimiter] or ordinary
        return spoken[-1], f"no word was given: the last one, '{words[spoken[-1]].label}', is used"
    if not isinstance(wanted, str | int) or isinstance(wanted, bool):
        raise TypeError(f"word: expected a word or its number, got {wanted!r}")
    if isinstance(wanted, int):
        return _numbered(ordinary, wanted, where), ""
    text, occurrence = wanted.strip(), nth
    places = _places(words, text)
    match = re.fullmatch(r"(.+):(\d{1,9})", text, re.DOTALL)
    if not places and match and nth is None:
        text, occurrence = match[1], int(match[2])
        places = _places(words, text)
    if not places and text.isdigit() and occurrence is None:
        return _numbered(ordinary, int(text), where), ""
    if not places:
        raise ValueError(f"word: {text!r} is not in the {where}; {_near(words, text, where)}")
    if nth is not None and not 1 <= nth <= len(places):
        allowed = "1, the only occurrence" if len(places) == 1 else f"1 to {len(places)}, the occurrences"
        raise ValueError(f"nth: expected {allowed} of {text!r} in the {where}, got {nth}")
    if occurrence is not None and not 1 <= occurrence <= len(places):
        times = "once" if len(places) == 1 else f"{len(places)} times"
        raise ValueError(f"word: {text!r} occurs {times}, so there is no occurrence {occurrence}")
    chosen = places[(occurrence or 1) - 1]
    if occurrence is None and len(places) > 1:
        return (
            chosen,
            f"'{words[chosen].label}' occurs {len(places)} times: the first is used ({text}:2 is the next)",
        )
    return chosen, ""


def _check_occurrence(wanted: str | int | None, nth: int) -> None:
    if not isinstance(nth, int) or isinstance(nth, bool):
        raise TypeError(f"nth: expected the number of an occurrence, counted from 1, got {nth!r}")
    if not isinstance(wanted, str):
        raise ValueError("nth: it is the occurrence of a word; pass the word, too")


def _numbered(ordinary: list[int], number: int, where: str) -> int:
    if not 1 <= number <= len(ordinary):
        raise ValueError(f"word: {number} is not a word of this {where}, which has 1 to {len(ordinary):,}")
    return ordinary[number - 1]


def _places(words: Sequence[Word], text: str) -> list[int]:
    """The indices of the word as it is written; if there is none, of the word in any case of letters."""
    exact = [i for i, word in enumerate(words) if word.text == text]
    return exact or [i for i, word in enumerate(words) if word.text.casefold() == text.casefold()]


def _near(words: Sequence[Word], text: str, where: str) -> str:
    spoken = list(dict.fromkeys(word.label for word in words if not word.special))
    near = get_close_matches(text, spoken, _NEAR, 0.5)
    if near:
        return f"like it there is {' and '.join(repr(name) for name in near)}"
    return f"the {where} begins with {', '.join(map(repr, spoken[:_NEAR]))}"
