"""The minimum and maximum of a table over a range of indices, which `bounds` needs for the tables of a program."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from typing import Any

import numpy as np
from torch import Tensor

from ._language import Interval

_MOST = 1 << 18  # entries of a table that is looked at
Array = np.ndarray[Any, Any]


class TableEnds:
    """Ends of any box of a table's entries, for many boxes at once.

    The last axis is answered exactly, from minima over 1, 2, 4 ... entries. The axes before it are answered exactly
    where each box has one index of them, else by the ends over all of them.
    """

    def __init__(self, table: Tensor):
        self._table = table
        self._sizes = tuple(table.shape)

    def __call__(self, indices: Sequence[Interval]) -> Interval:
        if not self._sizes:
            value = self._rows[0][0].ravel()[0], self._rows[1][0].ravel()[0]
            return value
        if 0 in self._sizes or self._table.numel() > _MOST or self._table.device.type != "cpu":
            return np.float64(-np.inf), np.float64(np.inf)
        within = [(low >= 0) & (high <= size - 1) for (low, high), size in zip(indices, self._sizes, strict=True)]
        least, greatest = self._clipped(indices)
        inside = reduce(np.logical_and, within)
        # An index outside of the table is an error of whoever reads it: nothing may be decided without reading it.
        return np.where(inside, least, -np.inf), np.where(inside, greatest, np.inf)

    def _clipped(self, indices: Sequence[Interval]) -> Interval:
        boxes = [
            tuple(np.clip(end, 0, size - 1).astype(np.int64) for end in ends)
            for ends, size in zip(indices, self._sizes, strict=True)
        ]
        row: Any = np.int64(0)
        for (low, high), size in zip(boxes[:-1], self._sizes[:-1], strict=True):
            if not np.array_equal(low, high):
                return _least_and_greatest(*self._all, np.int64(0), *boxes[-1])
            row = row * size + low
        return _least_and_greatest(*self._rows, row, *boxes[-1])

    @cached_property
    def _rows(self) -> tuple[list[Array], list[Array]]:
        held = self._table.detach()
        values = (held if held.dtype.itemsize > 2 or not held.is_floating_point() else held.float()).numpy()
        values = values.reshape(-1, self._sizes[-1] if self._sizes else 1).astype(np.float64)
        missing = np.isnan(values)
        return _levels(np.where(missing, -np.inf, values), np.minimum), _levels(
            np.where(missing, np.inf, values), np.maximum
        )

    @cached_property
    def _all(self) -> tuple[list[Array], list[Array]]:
        low, high = (levels[0] for levels in self._rows)
        return _levels(low.min(axis=0, keepdims=True), np.minimum), _levels(high.max(axis=0, keepdims=True), np.maximum)


def _levels(values: Array, reduce: Any) -> list[Array]:
    """Reductions of (rows, L): level n has that of the 2**n entries that begin at each place."""
    levels, width = [values], 1
    while 2 * width <= values.shape[1]:
        last = levels[-1]
        levels.append(reduce(last[:, :-width], last[:, width:]))
        width *= 2
    return levels


def _least_and_greatest(lows: list[Array], highs: list[Array], row: Any, first: Any, last: Any) -> Interval:
    """The least and the greatest of entries first ... last of a row."""
    row, first, last = np.broadcast_arrays(row, first, last)
    level = np.frexp(last - first + 1)[1] - 1  # of the largest power of two that fits
    least, greatest = np.empty(row.shape), np.empty(row.shape)
    for n in np.unique(level):
        at = level == n
        places = row[at], first[at]
        ends = row[at], last[at] - (1 << int(n)) + 1
        least[at] = np.minimum(lows[n][places], lows[n][ends])
        greatest[at] = np.maximum(highs[n][places], highs[n][ends])
    return least, greatest
