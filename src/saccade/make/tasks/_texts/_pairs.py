"""Texts with their translations: two aligned files, or a table with a column for each language.

Every error names the files, and the line where there is one.
"""

from __future__ import annotations

import codecs
import dataclasses
import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._examples import ENDINGS, read_lines, read_table

_LISTED = 20  # files, of those that there are


@dataclasses.dataclass(frozen=True)
class Pair:
    """A text and its translation.

    Args:
        target: None if it is unknown.
        place: file and line, for messages.
    """

    source: str
    target: str | None
    place: str


def is_table(path: Path) -> bool:
    return path.suffix.lower() in ENDINGS


def aligned_files(path: Path, languages: Sequence[str]) -> list[Path]:
    """`corpus/train.de` for `corpus/train` and "de", or the same with .gz, for each language; files need not exist."""
    plain = [Path(f"{path}.{language}") for language in languages]
    packed = [Path(f"{file}.gz") for file in plain]
    return [other if other.exists() and not file.exists() else file for file, other in zip(plain, packed, strict=True)]


def read_pairs(path: Path, source: str, target: str) -> list[Pair]:
    """All pairs, those without a word included.

    Args:
        path: a table, or what two aligned files begin with.
        source, target: the columns, or the endings.

    Raises:
        FileNotFoundError: a file is missing; those that begin alike are listed.
        ValueError: files of unequal length, no line, a column that there is not, no text, no UTF-8.
    """
    if is_table(path):
        rows = read_table(path, (source, target))
        return [Pair(_text(one, source, place), _text(other, target, place), place) for place, (one, other) in rows]
    files = aligned_files(path, (source, target))
    for file in files:
        if not file.exists():
            raise FileNotFoundError(_missing(path, file))
    first, second = map(read_lines, files)
    if len(first) != len(second):
        (least, shorter), (most, longer) = sorted(zip(map(len, (first, second)), files, strict=True))
        raise ValueError(
            f"{longer}: line {least + 1} of {most} has no partner, {shorter} ends at line {least}; "
            "expected as many lines in both"
        )
    return [Pair(one, other, f"{path}: line {n}") for n, (one, other) in enumerate(zip(first, second, strict=True), 1)]


def read_sources(path: Path, source: str) -> list[Pair]:
    """Texts to translate: a column of a table, or the lines of any other file, .gz too. Errors as of `read_pairs`."""
    if is_table(path):
        return [Pair(_text(text, source, place), None, place) for place, (text,) in read_table(path, (source,))]
    return [Pair(text, None, f"{path}: line {n}") for n, text in enumerate(read_lines(path), 1)]


def _missing(path: Path, file: Path) -> str:
    if path.is_file() and path.suffix:
        begin = path.with_suffix("").with_suffix("") if path.suffix == ".gz" else path.with_suffix("")
        return f"{path}: is one file of two; give what both begin with: {begin}{_as_options(_endings(begin))}"
    endings = _endings(path)
    listed = ", ".join(f"{path.name}.{one}" for one in endings[:_LISTED]) or "none"
    return (
        f"{file}: no such file, nor {file.name}.gz; DATA is a table, or what two aligned files begin with; "
        f"texts that begin with {path.name}.: {listed}{_as_options(endings)}"
    )


def _as_options(endings: Sequence[str]) -> str:
    """Advice to pass the first two endings as source and target; "" if there are fewer."""
    names = [ending.removesuffix(".gz") for ending in endings[:2]]
    return f", with source={names[0]!r} target={names[1]!r}" if len(names) > 1 else ""


def _endings(path: Path) -> list[str]:
    """The endings of text files whose names begin with `path` and a dot."""
    there = sorted(path.parent.glob(f"{glob.escape(path.name)}.*")) if path.name else []
    return [one.name[len(path.name) + 1 :] for one in there if one.is_file() and _may_be_text(one)]


def _may_be_text(file: Path) -> bool:
    if is_table(file):
        return False
    if file.suffix == ".gz":
        return True
    with file.open("rb") as content:
        first = content.read(4096)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(first)  # a character that is cut off at the end is none wrong
    except UnicodeDecodeError:
        return False
    return b"\0" not in first


def _text(value: Any, column: str, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place}: expected a text in {column!r}, got {value!r:.40}")
    return value
