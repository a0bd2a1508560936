"""Which rows of a call are real tokens, read from the padding on the host.

Shape legend: B batch, L new rows. An array of one entry speaks for all items, one of B entries for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from ..._masks import Padding


@dataclass(frozen=True, eq=False)
class NewRows:
    """New rows: the tokens of item b are the rows `left[b] ... left[b] + count[b] - 1`, all others are padding."""

    rows: int
    left: np.ndarray  # int64 (1,) or (B,)
    count: np.ndarray  # int64, the same shape

    @classmethod
    def of(cls, padding: Padding | None, rows: int) -> NewRows:
        """`rows` new rows, of which `padding` marks the real tokens.

        Raises:
            TypeError: not a Padding. ValueError: a Padding of another number of rows, or with a gap between tokens.
        """
        if padding is None:
            # A compiler looks into no function that keeps its answers.
            return _all_real(rows) if torch.compiler.is_compiling() else _without_padding(rows)
        kept = _checked(padding).keys
        table: np.ndarray = kept.table.host
        if kept.by_length:
            if table.max(initial=0) > rows:
                raise ValueError(f"padding: a length of {table.max()}, but {rows} new rows came")
            return cls(rows, *alike(np.zeros_like(table), table))
        if table.shape[1] != rows:
            raise ValueError(f"padding: booleans (B, L) for {table.shape[1]} rows, but {rows} new rows came")
        return cls(rows, *alike(*_runs(table)))

    @property
    def whole(self) -> bool:
        """Whether there is no padding."""
        return self.count.size == 1 and int(self.count[0]) == self.rows

    @cached_property
    def summary(self) -> tuple[int, bytes, bytes]:
        """The rows in a form that can be compared."""
        return self.rows, self.left.tobytes(), self.count.tobytes()

    def check_batch(self, batch: int, padding: Padding | None) -> None:
        if padding is not None and padding.keys.batch != batch:
            raise ValueError(f"padding: made for a batch of {padding.keys.batch}, the new keys have a batch of {batch}")

    def real(self) -> np.ndarray:
        """Which rows are tokens: bool (1 or B, rows)."""
        row = np.arange(self.rows)
        return (row >= self.left[:, None]) & (row < (self.left + self.count)[:, None])

    def queries(self) -> list[int] | list[list[bool]]:
        """The tokens as an argument of `Padding`: lengths if all padding is on the right, else rows of booleans."""
        return self.real().tolist() if self.left.any() else self.count.tolist()


def _all_real(rows: int) -> NewRows:
    return NewRows(rows, np.zeros(1, np.int64), np.full(1, rows))


_without_padding = lru_cache(maxsize=64)(_all_real)  # every layer asks at every step


def alike(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """The arrays (B,). If no array differs between the items, each is shortened to one entry."""
    if all(array.size == 1 or (array.size and (array == array[0]).all()) for array in arrays):
        return tuple(array[:1] for array in arrays)
    return tuple(np.broadcast_arrays(*arrays))


def _checked(padding: Padding) -> Padding:
    if not isinstance(padding, Padding):
        raise TypeError(f"padding: expected a Padding of the new rows, got {type(padding).__name__}")
    if padding.queries is not None and padding.queries != padding.keys:
        raise ValueError("padding: its queries are the rows of its keys, so pass only Padding(keys)")
    return padding


def _runs(real: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first, number) of the True in each row of (B, L)."""
    count = real.sum(1)
    if not real.shape[1]:
        return count, count
    left = np.where(count > 0, real.argmax(1), 0)
    last = real.shape[1] - real[:, ::-1].argmax(1)
    holes = np.flatnonzero((count > 0) & (last - left != count))
    if holes.size:
        row = int(holes[0])
        raise ValueError(
            f"padding: item {row} has tokens in rows {np.flatnonzero(real[row]).tolist()}, with a gap; "
            "tokens must be adjacent, padded on the left or on the right"
        )
    return left, count


def per_item(counts: int | Tensor, batch: int | None, name: str) -> np.ndarray:
    """A count for all, or one for each item, as an array (1,) or (B,) of numbers that are not negative."""
    if isinstance(counts, Tensor) and counts.dim():
        if counts.dtype.is_floating_point or counts.dtype.is_complex or counts.element_size() == 1:
            raise TypeError(f"{name}: must be an int or int64 (B,), got {counts.dtype}")
        if counts.dim() != 1 or (batch is not None and counts.shape[0] != batch):
            raise ValueError(f"{name}: must be an int or one for each of {batch} items, got {tuple(counts.shape)}")
        array = counts.cpu().numpy().astype(np.int64)
    else:
        if isinstance(counts, bool) or not hasattr(counts, "__index__"):
            raise TypeError(f"{name}: must be an int or int64 (B,), got {counts!r}")
        array = np.full(1, counts.__index__(), np.int64)
    if (array < 0).any():
        raise ValueError(f"{name}: must not be negative, got {int(array.min())}")
    return array
