"""Labelled texts from files: CSV, TSV, JSONL.

Every error names the file, and the line where there is one.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...support._plain_values import parsed_json

SEPARATORS = {".csv": ",", ".tsv": "\t"}
ENDINGS = (*SEPARATORS, ".jsonl")
_LISTED = 20  # columns, of those that there are
_PART = 2**28  # bytes that any compressed file may hold
_RATIO = 200  # bytes for each of a larger one; texts reach 10, matrices of words 100
_NAMED = 3  # in a warning, of those that are left out
_SIGNS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_QUOTED = re.compile(r'"(?:[^"]|"")*"')

Row = tuple[int, list[str]]
"""The line at which a row of a table begins, and its cells."""


@dataclasses.dataclass(frozen=True)
class TextExample:
    """A text of a class.

    Args:
        place: file and line, for messages: `reviews.csv: line 7`.
        label: None if it is unknown; a tuple where a text may have several.
    """

    text: str
    label: str | tuple[str, ...] | None
    place: str


class TooLarge(ValueError):
    """A compressed file that holds far more than its size suggests."""


class UnusableExamples(ValueError):
    """Examples that a task cannot use, such as empty ones, unless an option leaves them out.

    Args:
        problem: with the place of the first, and what to do about it.
        option: the field that leaves them out.
    """

    def __init__(self, problem: str, option: str):
        super().__init__(f"{problem}, or let {option} leave them out")
        self.problem, self.option = problem, option


class MissingColumns(ValueError):
    """A table without columns that a task reads; `columns` are their names, from which a command knows its options."""

    def __init__(self, message: str, columns: Sequence[str]):
        super().__init__(message)
        self.columns = tuple(columns)


def read_table(path: Path, columns: Sequence[str]) -> list[tuple[str, tuple[Any, ...]]]:
    """The place of each row and its values in `columns`, of a .csv, .tsv or .jsonl.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another ending, no rows, a missing column (the existing ones are listed), a duplicate column, a
            short row, an unbalanced quote, a line that is not a JSON object, not UTF-8.
    """
    read = _of_json if _kind(path) == ".jsonl" else _of_csv
    rows = list(read(path, read_content(path), columns))
    if not rows:
        raise ValueError(f"{path}: holds no examples")
    return rows


def column_names(path: Path) -> list[str]:
    """The columns that the first line of a .csv, .tsv or .jsonl names. Errors as of `read_table`."""
    if _kind(path) != ".jsonl":
        return next((cells for _, cells in _rows(path, read_content(path))), [])
    lines = (line for line in text_lines(read_content(path)) if line.strip())
    try:
        first = parsed_json(next(lines, "{}"))
    except ValueError:
        return []
    return list(first) if isinstance(first, dict) else []


def warn_left_out(places: Sequence[str], total: int, why: str) -> None:
    """Warn of examples that are left out of `total`, with the place of the first. `why`: "texts are empty and"."""
    if places:
        more = f" and {len(places) - _NAMED:,} more" if len(places) > _NAMED else ""
        first = ", ".join(places[:_NAMED])
        warnings.warn(f"{len(places):,} of {total:,} {why} left out: {first}{more}", stacklevel=3)


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, .gz too. ValueError if there is none."""
    lines = text_lines(read_content(path))
    if not lines:
        raise ValueError(f"{path}: holds no lines")
    return lines


def text_lines(content: str) -> list[str]:
    """The lines of a text. They end with a line feed or with a carriage return and a line feed.

    `str.splitlines` breaks at form feeds and U+2028, too: files of two languages would not break at the same places.
    """
    *lines, last = content.split("\n")
    return [line.removesuffix("\r") for line in (lines if not last else [*lines, last])]


def _kind(path: Path) -> str:
    """The ending of an existing table's name."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(ENDINGS)}")
    return path.suffix.lower()


def read_content(path: Path) -> str:
    """The whole text of a file, .gz too, with line feeds at the ends of lines.

    FileNotFoundError, or ValueError if it is a folder, damaged, or no UTF-8.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder, expected a file")
    try:
        content = _unpacked(path) if path.suffix == ".gz" else path.read_bytes()
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged, not a gzip file ({error})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8 (at byte {error.start:,})") from None


def _unpacked(path: Path) -> bytes:
    """The content of a .gz, read in parts: a small file may hold any number of zeros."""
    parts, size = [], 0
    with gzip.open(path) as file:
        while part := file.read(_PART):
            parts.append(part)
            size += len(part)
            check_unpacked(path, size)
    return b"".join(parts)


def check_unpacked(path: Path, size: int) -> None:
    """TooLarge if a compressed file unpacks to far more bytes than texts do."""
    if size > max(_PART, _RATIO * path.stat().st_size):
        raise TooLarge(f"{path}: unpacks to more than {_RATIO} times its size; unpack it yourself if that is right")


def _of_csv(path: Path, content: str, columns: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    (_, names), *rows = _rows(path, content) or [(1, [])]
    separated = separated_otherwise(path, content)
    cells = [row for _, row in rows]
    _check_columns(path, columns, names, " in the first line, which must name them", separated, cells)
    for name in columns:
        if names.count(name) > 1:
            raise ValueError(f"{path}: the column {name!r} is there twice")
    places = [names.index(name) for name in columns]
    for line, row in rows:
        if len(row) != len(names):
            quotes = "; put a cell with a comma in quotes" if len(row) > len(names) and path.suffix == ".csv" else ""
            raise ValueError(
                f"{path}: line {line} has {len(row)} cells, expected {len(names)} as in the first line{quotes}"
            )
        yield f"{path}: line {line}", tuple(row[place] for place in places)


def _rows(path: Path, content: str) -> list[Row]:
    """The rows that are not empty, that of the column names first."""
    separator = SEPARATORS[path.suffix.lower()]
    if separator == ",":
        return _quoted_rows(path, content, separator)
    # Most .tsv files know no quotes: a cell that begins with one is text. So lines are rows, unless their cells do not
    # add up and those of quoted rows do: then quotes hold tabs and line ends.
    lines = [(number, line.split(separator)) for number, line in enumerate(text_lines(content), 1) if line]
    rows = [(number, [_without_quotes(cell) for cell in cells]) for number, cells in lines]
    if _even(rows):
        return rows
    try:
        quoted = _quoted_rows(path, content, separator)
    except ValueError:
        return rows
    return quoted if _even(quoted) else rows


def _even(rows: Sequence[Row]) -> bool:
    return len({len(cells) for _, cells in rows}) < 2


def _without_quotes(cell: str) -> str:
    return cell[1:-1].replace('""', '"') if _QUOTED.fullmatch(cell) else cell


def _quoted_rows(path: Path, content: str, separator: str) -> list[Row]:
    """Rows as of RFC 4180. ValueError with its first line for one whose quotes do not close."""
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=separator, strict=True)
    usual = csv.field_size_limit(max(csv.field_size_limit(), len(content)))  # no cell is longer than the file
    rows, line = [], 1
    try:
        for row in reader:
            rows += [(line, row)] if row else []
            line = reader.line_num + 1
    except csv.Error:
        separated = separated_otherwise(path, content)
        if separated:
            raise ValueError(f"{path}: no table of this ending{separated}") from None
        raise ValueError(
            f"{path}: line {line}: unbalanced quote; a cell that begins with one ends with one, and those inside are "
            "doubled"
        ) from None
    finally:
        csv.field_size_limit(usual)
    return rows


def _of_json(path: Path, content: str, columns: Sequence[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for number, line in enumerate(text_lines(content), 1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            values = parsed_json(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error})") from None
        if not isinstance(values, dict):
            raise ValueError(f"{where}: expected an object with {' and '.join(map(repr, columns))}, got {line:.40}")
        _check_columns(Path(where), columns, values)
        yield where, tuple(values[name] for name in columns)


def separated_otherwise(path: Path, content: str) -> str:
    """Advice if the first line of a table has other separators than its file ending promises; otherwise ""."""
    separator = SEPARATORS[path.suffix.lower()]
    names = _QUOTED.sub("", content.partition("\n")[0])
    other = next((sign for sign in ";\t," if sign in names), None)
    if other is None or separator in names:
        return ""
    ending = next((ending for ending, sign in SEPARATORS.items() if sign == other), None)
    cure = f"name it {path.stem}{ending}"
    if ending is None:
        cure = f"pandas.read_csv({path.name!r}, sep={other!r}).to_csv('new.csv', index=False) writes such a file"
    return f"; it has {_SIGNS[other]}, expected {_SIGNS[separator]} between cells: {cure}"


def _check_columns(
    path: Path, columns: Sequence[str], names: Any, where: str = "", advice: str = "", rows: Sequence[list[str]] = ()
) -> None:
    """Raise MissingColumns, with the number of empty cells in each existing column of `rows`."""
    missing = [name for name in columns if name not in names]
    if missing:
        shown = list(names)[:_LISTED]
        empty = [sum(len(row) > at and not row[at].strip() for row in rows) for at in range(len(shown))]
        counts = [f" (empty in {count} of {len(rows)} rows)" if count else "" for count in empty]
        listed = ", ".join(f"{known!r}{count}" for known, count in zip(shown, counts, strict=True))
        wanted = f"column{'s' if len(missing) > 1 else ''} {' and '.join(map(repr, missing))}"
        has = f"it has {listed}" if listed else "there are no columns"
        raise MissingColumns(f"{path}: no {wanted}{where}; {has}{advice}", missing)
