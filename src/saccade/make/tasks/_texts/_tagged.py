"""Texts with tagged words from files: columns as of the CoNLL tasks, or JSON lines with spans.

Every error names the file and the line.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from .._examples import read_content, read_lines, read_table, text_lines
from ._entities import BIO, OUTSIDE, Entity, check_tag, tags_of

SPLITTERS = {"signs": pre_tokenizers.BertPreTokenizer, "spaces": pre_tokenizers.WhitespaceSplit}
_DOCUMENT = "-DOCSTART-"  # a line of the CoNLL 2003 files that is no word
_SPANS = "spans"
_TAG = re.compile("[BIES]-.")
_COMMENT = re.compile(r"# ?[\w.:-]+ =(\s|$)|#(begin|end) document\b")  # of CoNLL-U; of CoNLL 2012


@dataclasses.dataclass(frozen=True)
class TaggedText:
    """A text and its words.

    Args:
        words: the characters `text[start:stop]` of each.
        tags: of each word; None if unknown.
        place: file and line, for messages: `news.conll: line 7`.
    """

    text: str
    words: tuple[tuple[int, int], ...]
    tags: tuple[str, ...] | None
    place: str

    @property
    def truth(self) -> list[str]:
        """The tags; only of labelled examples."""
        assert self.tags is not None
        return list(self.tags)

    def word(self, number: int) -> str:
        """A word as written in the text."""
        start, stop = self.words[number]
        return self.text[start:stop]


def split_text(text: Any, place: str, words: str) -> TaggedText:
    """A text split into words, by "signs" (spaces, and every punctuation mark is a word) or only by "spaces"."""
    if not isinstance(text, str):
        raise ValueError(f"{place}: expected a text, got {text!r:.40}")
    spans = tuple(span for _, span in SPLITTERS[words]().pre_tokenize_str(text))
    if not spans:
        raise ValueError(f"{place}: the text has no word")
    return TaggedText(text, spans, None, place)


def read_plain(path: Path, words: str) -> list[TaggedText]:
    """Texts without tags: a .jsonl with `text`, a .txt with one a line, empty lines too, else columns."""
    kind = path.suffix.lower()
    if kind == ".jsonl":
        return [split_text(text, place, words) for place, (text,) in read_table(path, ("text",))]
    if kind != ".txt":
        return read_columns(path, None, (), tagged=False)
    lines = [(f"{path}: line {n}", line) for n, line in enumerate(read_lines(path), 1)]
    if not any(line.strip() for _, line in lines):
        raise ValueError(f"{path}: holds no text")
    return [split_text(line, at, words) if line.strip() else TaggedText(line, (), None, at) for at, line in lines]


# --- columns ----------------------------------------------------------------------------------------------------------


def read_columns(path: Path, column: int | None, known: Sequence[str], *, tagged: bool = True) -> list[TaggedText]:
    """Sentences with an empty line between them: a word a line, in the first column, and its tag in another.

    Columns are parted by tabs where a line has one, else by spaces (U+0020). Comments before a sentence, `# id 17` and
    `# text = ...`, are left out; a first column `#` in a line with the columns of the others and a tag is a word.

    Args:
        column: of tags, counted from 1; None is the last.
        known: the tags that there may be; none is any.

    Raises:
        FileNotFoundError, ValueError: no such file, no sentence, too few columns, a tag of no scheme, an unknown one.
    """
    sentences: list[TaggedText] = []
    rows: list[tuple[str, str | None, str]] = []
    for number, cells in _cells(path):
        if cells is None:
            sentences += [_sentence(rows)] if rows else []
            rows = []
            continue
        place = f"{path}: line {number}"
        rows.append((cells[0], _tag(cells, column, known, place) if tagged else None, place))
    sentences += [_sentence(rows)] if rows else []
    if not sentences:
        raise ValueError(f"{path}: holds no words")
    return sentences


def _cells(path: Path) -> Iterator[tuple[int, list[str] | None]]:
    """The number and columns of each line, None for an empty line. ValueError if a line has another number of columns
    than the first."""
    lines = [(line, _split(line)) for line in text_lines(read_content(path))]
    usual = next((cells for line, cells in lines if cells and not line.startswith("#")), [])
    columns = len(usual)
    begins = True
    for number, (line, cells) in enumerate(lines, 1):
        if not cells:
            yield number, None
        if not cells or (begins and _is_comment(line, cells, usual)):
            begins = True
            continue
        begins = False
        columns = columns or len(cells)
        if len(cells) != columns:
            raise ValueError(f"{path}: line {number} has {len(cells)} columns, expected {columns} as in the first")
        if not cells[0]:
            raise ValueError(f"{path}: line {number}: the first column is empty, expected a word")
        if cells[0] != _DOCUMENT:
            yield number, cells


def _split(line: str) -> list[str]:
    if not line.strip():
        return []
    # Not at other spaces, such as U+00A0, which stand inside of words.
    return [cell.strip(" ") for cell in line.split("\t")] if "\t" in line else re.findall("[^ ]+", line)


def _is_comment(line: str, cells: list[str], usual: list[str]) -> bool:
    """Whether a first line of a sentence is a comment; `usual` is a line that is none."""
    if _COMMENT.match(line) or cells[0].startswith("# "):
        return True
    if cells[0] != "#" or "\t" in line:
        return False
    return len(cells) != len(usual) or (_has_tag(usual) and not _has_tag(cells))


def _has_tag(cells: list[str]) -> bool:
    return any(cell == OUTSIDE or _TAG.match(cell) for cell in cells[1:])


def _tag(cells: list[str], column: int | None, known: Sequence[str], place: str) -> str:
    wanted = len(cells) if column is None else column
    if wanted > len(cells) or len(cells) < 2:
        where = "the last" if column is None else f"column {column}"
        raise ValueError(f"{place} has {len(cells)} columns, expected a word and, in {where}, its tag")
    return _known(check_tag(cells[wanted - 1], place), known, place)


def _known(tag: str, known: Sequence[str], place: str) -> str:
    if known and tag not in known:
        raise ValueError(f"{place}: the tag {tag!r} is not in the training data, which has {', '.join(known)}")
    return tag


def _sentence(rows: list[tuple[str, str | None, str]]) -> TaggedText:
    words, at = [], 0
    for word, _, _ in rows:
        words.append((at, at + len(word)))
        at += len(word) + 1
    tags = tuple(tag for _, tag, _ in rows if tag is not None)
    text = " ".join(word for word, _, _ in rows)
    return TaggedText(text, tuple(words), tags if len(tags) == len(rows) else None, rows[0][2])


# --- spans ------------------------------------------------------------------------------------------------------------


def read_spans(path: Path, words: str, known: Sequence[str]) -> list[TaggedText]:
    """Texts of a .jsonl: `{"text": ..., "spans": [{"start": 0, "end": 5, "label": "person"}]}`, ends not included.

    Args:
        words: how texts are split, as of `split_text`.
        known: as of `read_columns`.

    Raises:
        FileNotFoundError, ValueError: as of `read_table`; spans that are outside of their text, overlap, or cut a word.
    """
    return [_spanned(text, spans, place, words, known) for place, (text, spans) in read_table(path, ("text", _SPANS))]


def _spanned(text: Any, spans: Any, place: str, words: str, known: Sequence[str]) -> TaggedText:
    example = split_text(text, place, words)
    if not isinstance(spans, list):
        raise ValueError(f"{place}: spans: expected a list, got {spans!r:.40}")
    checked = sorted(_checked(span, len(text), place) for span in spans)
    for (_, end, _), (start, stop, _) in itertools.pairwise(checked):
        if start < end:
            raise ValueError(f"{place}: the span {start} to {stop} overlaps the one before, which ends at {end}")
    tags = tags_of([_entity(example, span) for span in checked], len(example.words), BIO)
    return dataclasses.replace(example, tags=tuple(_known(tag, known, place) for tag in tags))


def _checked(span: Any, length: int, place: str) -> tuple[int, int, str]:
    values = [span.get(name) for name in ("start", "end", "label")] if isinstance(span, dict) else [None]
    start, end, label = values if len(values) == 3 else (None, None, None)
    whole = type(start) is int and type(end) is int
    if not whole or not isinstance(label, str) or not label:
        raise ValueError(f"{place}: expected a span with start, end and label, got {span!r:.60}")
    if not 0 <= start < end <= length:  # type: ignore[operator]
        raise ValueError(f"{place}: the span {start} to {end} is not in the text, which has {length} characters")
    return start, end, label  # type: ignore[return-value]


def _entity(example: TaggedText, span: tuple[int, int, str]) -> Entity:
    """The words of a span."""
    start, end, label = span
    inside = [n for n, (first, last) in enumerate(example.words) if first < end and start < last]
    if not inside:
        raise ValueError(f"{example.place}: the span {start} to {end} holds no word")
    for n in (inside[0], inside[-1]):
        first, last = example.words[n]
        if first < start or end < last:
            word = example.word(n)
            raise ValueError(f"{example.place}: the span {start} to {end} cuts the word {word!r} ({first} to {last})")
    return Entity(label, inside[0], inside[-1] + 1)
