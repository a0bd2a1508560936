"""Tables of series from files, and their windows.

Every error names the file, and the line and the column where there are any.

Shape legend: T rows, C series, S steps of the past, F steps of the forecast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np

from .._examples import column_names, read_table
from ._dates import even_step, read_dates, steps_between
from ._gaps import check_gaps, filled, numbers

if TYPE_CHECKING:
    from pandas import DatetimeIndex


@dataclasses.dataclass(frozen=True, eq=False)
class SeriesTable:
    """Series side by side.

    Args:
        path: where they come from.
        names: of the series, (C,).
        values: (T, C), float64.
        dates: (T,).
        step: from each date to the next, as pandas names it.
        last: the last date as the file has it.
    """

    path: Path
    names: tuple[str, ...]
    values: np.ndarray
    dates: DatetimeIndex
    step: str
    last: str


def read_series(
    path: Path,
    date: str,
    names: Sequence[str] | None = None,
    *,
    window: Mapping[str, int],
    step: str | None = None,
    fill: str = "none",
) -> SeriesTable:
    """The series of a .csv, .tsv or .jsonl.

    Args:
        date: the column of dates.
        names: the other columns; None: all there are.
        window: rows of each part of a window, by the options that say so; there must be one, at least 3 rows.
        step: of the dates; None finds it.
        fill: "none" or how rows and numbers that are missing are filled, as of `filled`, with a warning.

    Raises:
        FileNotFoundError: no such file.
        ValueError: errors of `read_table` and `read_dates`, uneven steps, gaps, cells without numbers, too few rows.
    """
    names = _others(path, date) if names is None else names
    rows = read_table(path, (date, *names))
    if fill == "none" or len(rows) < 3:
        _check_rows(path, len(rows), window)
    places = [place for place, _ in rows]
    written, *columns = zip(*(cells for _, cells in rows), strict=True)
    texts = [str(text).strip() for text in written]
    dates = read_dates(texts, places)
    if step is None:
        step = even_step(dates, places)
    grid = steps_between(dates, step, places)
    values = numbers(columns)
    gaps = [(places[row], names[n], columns[n][row]) for row, n in np.argwhere(np.isnan(values))]
    check_gaps(path, grid, dates, gaps, values.size, fill)
    if fill != "none":
        values = filled(path, names, values, dates, grid, fill)
        _check_rows(path, len(values), window)
    return SeriesTable(path, tuple(names), values, grid, step, texts[-1])


def _others(path: Path, date: str) -> list[str]:
    """All columns but the dates'."""
    names = column_names(path)
    others = [name for name in names if name != date]
    if date in names and not others:
        raise ValueError(f"{path}: no column except {date!r}, expected one for each series")
    return others


def _check_rows(path: Path, count: int, window: Mapping[str, int]) -> None:
    if count < sum(window.values()):
        parts = " and ".join(f"{name}={steps}" for name, steps in window.items())
        raise ValueError(f"{path}: {count} rows, expected at least {sum(window.values())}, one window of {parts}")


@dataclasses.dataclass(frozen=True, eq=False)
class SeriesWindow:
    """A window of a table: S rows to read and F to forecast. Unknown rows to forecast lie beyond the end of the table.

    Args:
        start: its first row.
        past, horizon: S and F.
    """

    table: SeriesTable
    start: int
    past: int
    horizon: int

    @property
    def now(self) -> int:
        """The first row to forecast."""
        return self.start + self.past

    @property
    def end(self) -> int:
        return self.now + self.horizon


@dataclasses.dataclass(frozen=True, eq=False)
class Windows(Sequence[SeriesWindow]):
    """Windows of a table, by their first rows."""

    table: SeriesTable
    past: int
    horizon: int
    starts: range

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, number: int) -> SeriesWindow: ...

    @overload
    def __getitem__(self, number: slice) -> Windows: ...

    def __getitem__(self, number: int | slice) -> SeriesWindow | Windows:
        if isinstance(number, slice):
            return dataclasses.replace(self, starts=self.starts[number])
        return SeriesWindow(self.table, self.starts[number], self.past, self.horizon)


LARGEST = 1e305  # a value; forecasts beyond the training rows have to stay below 1.8e308
FARTHEST = 1e12  # deviations from the mean; the model squares them in float32


def mean_and_deviation(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation (C,) of each series (T, C). The deviation of a constant series is 1.

    Both are taken of values near 1, by powers of two that cancel exactly: no float64 is the square of 1e300 or 1e-300.
    """
    powers = np.frexp(abs(rows).max(axis=0))[1]
    near = np.ldexp(rows, -powers)
    means, deviations = (np.ldexp(values, powers) for values in (near.mean(axis=0), near.std(axis=0)))
    return means, np.where((rows.min(axis=0) < rows.max(axis=0)) & (deviations > 0), deviations, 1.0)


def scaled(table: SeriesTable, means: np.ndarray, deviations: np.ndarray) -> np.ndarray:
    """The rows (T, C) of a table. ValueError for a value above `LARGEST`, or `FARTHEST` deviations from the mean."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = (table.values - means) / deviations
    wrong = np.argwhere(~(abs(found) <= FARTHEST) | (abs(table.values) > LARGEST))
    if len(wrong):
        row, column = wrong[0]
        raise ValueError(
            f"{table.path}: column {table.names[column]!r}: {table.values[row, column]:g} is too far from the training "
            f"rows, whose mean is {means[column]:g} and deviation {deviations[column]:g}; expected at most "
            f"{FARTHEST:g} deviations from the mean, and at most {LARGEST:g}"
        )
    return np.asarray(found)
