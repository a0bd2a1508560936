"""Missing rows and numbers of a table of series: reported together, or filled.

Shape legend: T rows, C series, R rows of the filled table.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pandas import DatetimeIndex

FILLS = ("none", "previous", "linear")
_EMPTY = ("", "-", "na", "n/a", "nan", "none", "null")  # cells that say that there is no number
_LISTED = 20  # places of each kind


def numbers(columns: Sequence[Sequence[Any]]) -> np.ndarray:
    """Cells of C columns as float64 (T, C), NaN for those that are not finite numbers."""
    import pandas as pd

    found = [pd.to_numeric(pd.Series(cells, dtype=object), errors="coerce").to_numpy(np.float64) for cells in columns]
    values = np.stack(found, axis=1)
    return np.where(np.isfinite(values), values, np.nan)


def check_gaps(
    path: Path,
    grid: DatetimeIndex,
    dates: DatetimeIndex,
    cells: Sequence[tuple[str, str, Any]],
    count: int,
    fill: str,
) -> None:
    """ValueError that lists missing dates and cells; a warning instead where they are filled.

    Args:
        grid: the dates that there should be.
        cells: without a number: their place, their column, and what they hold.
        count: of all cells.

    Raises:
        ValueError: also for a cell that holds something, where gaps are filled.
    """
    missing = grid.difference(dates)
    told = []
    if len(missing):
        plural = "dates are" if len(missing) > 1 else "date is"
        told.append(f"{len(missing):,} {plural} missing: {_listed(_ranges(grid, missing))}")
    if cells:
        named = [f"{place.removeprefix(f'{path}: ')} {column!r} ({cell!r:.40})" for place, column, cell in cells]
        told.append(f"{len(cells):,} of {count:,} cells have no number: {_listed(named)}")
    if not told:
        return
    odd = next((one for one in cells if str(one[2]).strip().lower() not in _EMPTY and one[2] is not None), None)
    if fill != "none" and odd is None:
        warnings.warn(f"{path}: {'; '.join(told)}; filled: {fill}", stacklevel=2)
        return
    advice = "fill=previous or fill=linear fills them" if odd is None else f"{odd[2]!r:.40} is no empty cell: fix it"
    raise ValueError(f"{path}: {'; '.join(told)}; {advice}")


def filled(
    path: Path, names: Sequence[str], values: np.ndarray, dates: DatetimeIndex, grid: DatetimeIndex, fill: str
) -> np.ndarray:
    """Values (R, C) at all dates of the grid, of those (T, C) at some.

    Args:
        fill: "previous": the last number before; "linear": on the line to the next number, the last one where there is
            none.

    Raises:
        ValueError: a series that begins with a gap.
    """
    import pandas as pd

    begins = np.flatnonzero(np.isnan(values[0]))
    if len(begins):
        listed = ", ".join(repr(names[n]) for n in begins.tolist())
        raise ValueError(f"{path}: no number in the first row of {listed}, and none before it to fill from")
    frame = pd.DataFrame(values, index=dates).reindex(grid)
    whole = frame.ffill() if fill == "previous" else frame.reset_index(drop=True).interpolate()
    return whole.to_numpy(np.float64)


def _ranges(grid: DatetimeIndex, missing: DatetimeIndex) -> list[str]:
    """Runs of missing dates, as `2024-01-05` or `2024-01-05 to 2024-01-07`."""
    places = grid.get_indexer(missing)
    runs = np.split(missing, np.flatnonzero(np.diff(places) > 1) + 1)
    days = (grid == grid.normalize()).all()
    ends = [[str(date.date() if days else date) for date in (run[0], run[-1])] for run in map(list, runs)]
    return [first if first == last else f"{first} to {last}" for first, last in ends]


def _listed(parts: Sequence[str]) -> str:
    more = f" and {len(parts) - _LISTED:,} more" if len(parts) > _LISTED else ""
    return ", ".join(parts[:_LISTED]) + more
