"""Words of a text, and which pieces of the tokenizer make them up.

A word is a run of letters and digits (apostrophes inside belong to it), a single punctuation mark, a single
ideograph, or a run of line breaks. In scripts that put no blanks between words (Thai, Lao, Khmer, Burmese) it is one
letter with its vowels and marks, as word borders need a dictionary there. A piece that reaches over several of these
joins them into one. A special token of the model is a word of its own, without characters unless the text spells it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

START = "<s>"
"""How the start of the text, a token without characters, is written."""
_APOSTROPHES = "'’"  # noqa: RUF001
_IDEOGRAPHS = ((0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
_JOINER = "\u200d"
# Thai and Lao; Burmese; Khmer; Tai Le to New Tai Lue; Tai Tham; Balinese; Javanese and Burmese; Burmese and Tai Viet.
_UNSPACED = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x1950, 0x19DF), (0x1A20, 0x1AAF), (0x1B00, 0x1B7F)),
    *((0xA980, 0xA9FF), (0xAA60, 0xAADF)),
)
_VOWELS_BEFORE = "\u0e40\u0e41\u0e42\u0e43\u0e44\u0ec0\u0ec1\u0ec2\u0ec3\u0ec4\u19b5\u19b6\u19b7\u19ba"
_VOWELS_AFTER = "\u0e30\u0e32\u0e33\u0e45\u0eb0\u0eb2\u0eb3"
_STACKING = "\u1039\u17d2\u1a60\u1b44\ua9c0"  # the letter after it stands below the one before
MANY_TOKENS = 2.0  # tokens a word on average, from which on words are no units for the model


@dataclass(frozen=True)
class Word:
    """A word ``text[start:stop]``, made of the tokens ``first <= i < last`` (positions in the model's input).

    Example:
        >>> from saccade.inspection import Word
        >>> word = Word("barn", start=8, stop=12, first=3, last=5)
        >>> word.label, word.is_delimiter
        ('barn', False)
        >>> Word(",", start=12, stop=13, first=5, last=6).is_delimiter
        True
    """

    text: str
    start: int
    stop: int
    first: int
    last: int
    special: bool = False  # a special token such as <s> or [SEP]

    @property
    def is_delimiter(self) -> bool:
        """Whether the word is punctuation or a line break: without letters and digits."""
        return not self.special and not any(c.isalnum() for c in self.text)

    @property
    def label(self) -> str:
        """The word on one line: without control characters, with signs for line breaks."""
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
    if _is_unspaced(first):
        return _end_of_cluster(text, i)
    if first.isalnum() and not _is_ideograph(first):
        stop = _run(text, i, _in_word)
        while stop + 1 < len(text) and text[stop] in _APOSTROPHES and _in_word(text[stop + 1]):
            stop = _run(text, stop + 1, _in_word)
        return stop
    stop = _run(text, i + 1, _is_mark)
    while stop < len(text) and text[stop - 1] == _JOINER and not text[stop].isspace():
        stop = _run(text, stop + 1, _is_mark)  # an emoji of several joined ones is one mark
    return stop


def _end_of_cluster(text: str, i: int) -> int:
    stop = i + 1 + (text[i] in _VOWELS_BEFORE and i + 1 < len(text) and _is_unspaced(text[i + 1]))
    stop = _run(text, stop, _goes_on)
    while stop < len(text) and text[stop - 1] in _STACKING and _is_unspaced(text[stop]):
        stop = _run(text, stop + 1, _goes_on)
    return stop


def _goes_on(c: str) -> bool:
    return _is_mark(c) or c in _VOWELS_AFTER


def _run(text: str, i: int, belongs: Callable[[str], bool]) -> int:
    while i < len(text) and belongs(text[i]):
        i += 1
    return i


def _in_word(c: str) -> bool:
    return (c.isalnum() and not _is_ideograph(c) and not _is_unspaced(c)) or _is_mark(c)


def _is_mark(c: str) -> bool:
    return c > "\x7f" and (unicodedata.category(c)[0] == "M" or c in "\u200c\u200d")


def _is_unspaced(c: str) -> bool:
    return c >= "\u0e00" and c.isalnum() and any(low <= ord(c) <= high for low, high in _UNSPACED)


def tokens_a_word(words: Sequence[Word]) -> float:
    """The mean number of tokens of a word; marks and special tokens are left out. 0 without words."""
    counts = [word.last - word.first for word in words if not word.special and not word.is_delimiter]
    return sum(counts) / len(counts) if counts else 0.0


def about_tokens(words: Sequence[Word]) -> str:
    """A note on texts whose words have several tokens each; "" for other texts."""
    average = tokens_a_word(words)
    if average < MANY_TOKENS:
        return ""
    return (
        f"this tokenizer cuts a word of this text into {average:.1f} tokens on average; the model attends from token "
        "to token, and its heads' roles are about tokens"
    )


def _is_ideograph(c: str) -> bool:
    return c >= "\u3040" and any(low <= ord(c) <= high for low, high in _IDEOGRAPHS)


def group(
    text: str,
    spans: Sequence[tuple[int, int]],
    words: Iterable[tuple[int, int]] | None = None,
    *,
    before: Sequence[str] = (START,),
    after: Sequence[str] = (),
    special: Iterable[int] = (),
) -> list[Word]:
    """The words of ``text``, each with its tokens, and the special tokens around them.

    Every token belongs to exactly one word. A blank belongs to the word after it.

    Args:
        spans: the characters of each token, as (start, stop). Token ``i`` has position ``len(before) + i`` in the
            model's input.
        words: the words as (start, stop); None: `split_words` of the text.
        before: the texts of the special tokens before the text.
        after: the texts of the special tokens after the text.
        special: indices of tokens of the text that are special.

    Example:
        >>> from saccade.inspection import group
        >>> words = group("an owlet", [(0, 2), (2, 6), (6, 8)])  # the pieces "an", " owl" and "et"
        >>> [(word.text, word.first, word.last) for word in words]
        [('<s>', 0, 1), ('an', 1, 2), ('owlet', 2, 4)]
    """
    spelled = set(special)
    ranges = _around_special(split_words(text) if words is None else words, [spans[i] for i in sorted(spelled)])
    out = [Word(name, 0, 0, i, i + 1, True) for i, name in enumerate(before)]
    shift = len(before)
    for a, b, first, end in _groups(ranges, spans):
        start, stop = ranges[a][0], ranges[b][1]
        marked = any(i in spelled for i in range(first, end))
        out.append(Word(text[start:stop], start, stop, first + shift, end + shift, marked))
    shift, size = shift + len(spans), len(text)
    return out + [Word(name, size, size, i, i + 1, True) for i, name in enumerate(after, shift)]


def _groups(ranges: list[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[list[int]]:
    """For each word: first and last of the ``ranges`` that it joins, first token, end of its tokens."""
    groups: list[list[int]] = []
    at = waiting = 0
    for piece, (start, stop) in enumerate(spans):
        while at < len(ranges) and ranges[at][1] <= start:
            at += 1
        last = at
        while last + 1 < len(ranges) and ranges[last + 1][0] < stop:
            last += 1
        if at == len(ranges) or ranges[at][0] >= stop:
            continue  # a blank belongs to the next word
        if groups and groups[-1][1] >= at:
            groups[-1][1], groups[-1][3] = max(last, groups[-1][1]), piece + 1
        else:
            groups.append([at, last, waiting, piece + 1])
        waiting = piece + 1
    if groups:
        groups[-1][3] = len(spans)
    return groups


def _around_special(words: Iterable[tuple[int, int]], special: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The words, with each special span as a separate word even if it cuts another."""
    out = list(special)
    for start, stop in words:
        at = start
        for a, b in special:
            if a < stop and b > at:
                out += [(at, a)] if at < a else []
                at = b
        out += [(at, stop)] if at < stop else []
    return sorted(out)
