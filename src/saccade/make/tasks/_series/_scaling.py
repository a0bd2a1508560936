"""Series by mean and deviation of their training rows, for values of any size that float64 has.

Shape legend: T rows, C series.
"""

from __future__ import annotations

import numpy as np

from ._table import SeriesTable

LARGEST = 1e305  # a value; forecasts beyond the training rows have to stay below 1.8e308
FARTHEST = 1e12  # deviations from the mean; the model squares them in float32


def mean_and_deviation(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each series (T, C), (C,). The deviation of a constant series is 1.

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
