"""The lse of one head's rows, computed for rows as they are needed.

Shape legend: Lq / Lk lengths.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from ....operator._call import CheckedCall
from ....operator._pooled import row_lse
from ._budget import release_freed

BLOCK, GROUP = 256, 2**28  # rows that become known together, and pairs computed before other threads have a turn


class MapClosed(Exception):
    """The run was closed while something was computed."""


class RowLse:
    """(Lq,) float64 of the rows needed so far; ``precise``: from logits in float64."""

    def __init__(self, call: CheckedCall, place: tuple[int, int], precise: bool) -> None:
        self._call, self._place, self._precise = call, place, precise
        self._lock = threading.Lock()
        self._values: Tensor | None = None
        self._known = np.zeros(-(-call.length_q // BLOCK), bool)
        self.closed = False

    @property
    def bytes(self) -> int:
        return 0 if self._values is None else self._values.nbytes

    @property
    def busy(self) -> bool:
        return self._lock.locked()

    def unknown(self, rows: range) -> int:
        """The number of rows without a value in the blocks of these rows."""
        return BLOCK * int((~self._known[rows.start // BLOCK : -(-rows.stop // BLOCK)]).sum())

    def of(self, rows: range) -> Tensor:
        """All known values, these rows included; the first time they are computed from their pairs."""
        with self._lock:
            if self._values is None:
                self._values = torch.full((self._call.length_q,), float("nan"), dtype=torch.float64)
        end = -(-rows.stop // BLOCK)
        step = max(1, GROUP // (BLOCK * self._call.length_k))
        for first in range(rows.start // BLOCK, end, step):
            if self.closed:
                raise MapClosed
            self._learn(first, min(first + step, end))
        return self._values

    def _learn(self, first: int, last: int) -> None:
        """Compute the blocks from ``first`` to ``last``."""
        with self._lock:
            if not self._known[first:last].all():
                part = range(first * BLOCK, min(last * BLOCK, self._call.length_q))
                assert self._values is not None
                self._values[part.start : part.stop] = row_lse(self._call, self._place, part, precise=self._precise)
                self._known[first:last] = True
                release_freed()
