"""The map of one head of one item at any resolution, and the numbers of its rows.

A bin of level n holds 2^n x 2^n pairs; a tile is 256 x 256 bins. Fine tiles, at most 8,192 x 8,192 pairs, are computed
on request. Coarser ones come from a pyramid that is computed once, by one pass over all pairs. For a long text, before
the pyramid is needed, one row of each bin stands for all its rows.

Shape legend: Lq / Lk lengths.
"""

from __future__ import annotations

import threading
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....operator._biases import Span
from ....operator._pooled import Pooled, binned, head_problem, pooled
from ....operator._scores._score import ModifiedScores
from ....operator._statistics import Statistics, statistics
from ....operator._statistics._visibility import first_key
from ._budget import release_freed
from ._call import MapCall
from ._lse import GROUP, MapClosed, RowLse

SIDE = 256  # bins of a tile, on each side
What = Literal["weights", "logits", "bias"]
Pool = Literal["max", "mean"]

_BASE, _NARROW = 6, 48  # the first level of the pyramid; one less for wider keys, whose products take longer
_BINS = 2048  # largest side of the pyramid's first level, to limit its memory: 3 numbers a bin while it is computed
_RECEIVED = 20_000  # tokens up to which each key's received weight is computed with the other numbers
_FEW = 2**26  # pairs that are computed while a request waits: some 30 ms
_PRECISE = 2**25  # pairs of rows computed in float64, where single weights are read: some 100 ms
ROW_NUMBERS = ("entropy", "largest", "largest_at", "distance", "self", "previous", "first", "sink")


class MapTile(NamedTuple):
    """(rows, keys) float32, NaN where no pair of a bin is visible.

    ``sampled``: the number of rows that stand for all rows of a bin; 0: all rows count.
    """

    values: np.ndarray
    sampled: int


class RowOfMap(NamedTuple):
    """(Lk,) float64 ``weights`` and ``logits``, 0 and -inf where hidden, and the visible keys."""

    row: int
    weights: np.ndarray
    logits: np.ndarray
    visible: np.ndarray


class _Pyramid(NamedTuple):
    """The levels of each pool, from the base on, (rows, keys) float32."""

    levels: dict[str, list[np.ndarray]]

    @property
    def bytes(self) -> int:
        return sum(level.nbytes for levels in self.levels.values() for level in levels)


class HeadPyramid:
    """The map of one head of one item of a call, at all levels."""

    def __init__(self, call: MapCall, item: int, head: int) -> None:
        self.call, self.item, self.head = call, item, head
        _, _, self.length_q, self.length_k = call.shape
        narrow = call.call.query.shape[3] <= _NARROW
        self.base = max(_BASE - (not narrow), ((max(self.length_q, self.length_k) - 1) // _BINS).bit_length())
        # One lock for each slow computation, so that none waits for another.
        self._locks = {what: threading.Lock() for what in ("numbers", "weights", "logits")}
        self._numbers: dict[str, np.ndarray] | None = None
        self._lse, self._precise_lse = (RowLse(call.call, (item, head), precise) for precise in (False, True))
        self._pyramids: dict[str, _Pyramid] = {}
        self._row: RowOfMap | None = None

    @property
    def bytes(self) -> int:
        """The memory used beyond queries and keys."""
        numbers = 0 if self._numbers is None else sum(part.nbytes for part in self._numbers.values())
        return (
            numbers
            + self._lse.bytes
            + self._precise_lse.bytes
            + sum(pyramid.bytes for pyramid in list(self._pyramids.values()))
        )

    @property
    def busy(self) -> bool:
        """Whether a thread computes something."""
        return self._lse.busy or self._precise_lse.busy or any(lock.locked() for lock in self._locks.values())

    def close(self) -> None:
        """Stop computations at their next part, by `MapClosed`."""
        self._lse.closed = self._precise_lse.closed = True

    def tile(self, what: What, pool: Pool, level: int, row: int, key: int, *, exact: bool = True) -> MapTile:
        """A tile of these numbers; smaller at the right and bottom edges.

        Raises:
            IndexError: it is outside of the map.
        """
        size = SIDE << level
        rows = range(row * size, min(self.length_q, (row + 1) * size))
        keys = range(key * size, min(self.length_k, (key + 1) * size))
        if row < 0 or key < 0 or not rows or not keys:
            raise IndexError(
                f"tile: row {row}, key {key} of level {level} is outside of {self.length_q} x {self.length_k}"
            )
        if what == "bias":
            return self._bias_tile(pool, rows, keys, 1 << level, exact)
        if level >= self.base:
            if what not in self._pyramids and not exact and self.length_q * self.length_k > _FEW:
                return self._sampled(what, pool, rows, keys, 1 << level)
            levels = self._pyramid(what).levels[pool]
            top, left = SIDE * row, SIDE * key
            return MapTile(levels[min(level - self.base, len(levels) - 1)][top : top + SIDE, left : left + SIDE], 0)
        if what == "weights" and not exact and level and self._lse.unknown(rows) * self.length_k > _FEW:
            return self._sampled(what, pool, rows, keys, 1 << level)
        return MapTile(_values(self._pooled(what, rows, keys, (1 << level, 1 << level)), pool), 0)

    def _pooled(
        self, what: str, rows: range | Tensor, keys: range, bins: tuple[int, int], *, rough: bool = False
    ) -> Pooled:
        """``rough``: in float32 even for few enough weights for float64."""
        if self._lse.closed:
            raise MapClosed
        logits = what == "logits"
        precise = not rough and bins == (1, 1) and len(rows) * self.length_k <= _PRECISE
        known = self._precise_lse if precise else self._lse
        lse = None if logits or isinstance(rows, Tensor) else known.of(rows)
        return pooled(self.call.call, (self.item, self.head), rows, keys, bins, lse, logits=logits, precise=precise)

    def _sampled(self, what: str, pool: Pool, rows: range, keys: range, size: int) -> MapTile:
        """One row of each bin, the middle one: exact for these rows."""
        return MapTile(_values(self._pooled(what, _middles(rows, size), keys, (1, size)), pool), 1)

    def _pyramid(self, what: str) -> _Pyramid:
        with self._locks[what]:
            if what not in self._pyramids:
                size = 1 << self.base
                step = max(1, GROUP // (size * self.length_k)) * size
                planes = None
                for start in range(0, self.length_q, step):
                    rows = range(start, min(start + step, self.length_q))
                    pooled = self._pooled(what, rows, range(self.length_k), (size, size))
                    if planes is None:
                        planes = pooled.sums.new_empty(3, -(-self.length_q // size), pooled.sums.shape[1])
                    for plane, part in zip(planes, pooled, strict=True):
                        plane[start // size : start // size + len(part)] = part
                assert planes is not None
                self._pyramids[what] = _levels(Pooled(*planes.unbind(0)))
                del planes
                release_freed()
            return self._pyramids[what]

    def _bias_tile(self, pool: Pool, rows: range, keys: range, size: int, exact: bool) -> MapTile:
        """The bias where the pair is visible; coarse tiles sample one row of each bin, ``exact`` or not."""
        call = self.call.call
        if call.bias is None or isinstance(call.bias, ModifiedScores):
            raise ValueError("what: this call has no bias" + (f", but {call.bias!r}" if call.bias is not None else ""))
        problem, _, _, parameter = head_problem(call, self.item, self.head)
        every = len(rows) * len(keys) <= (_FEW if exact else _FEW // 16)
        chosen = torch.arange(rows.start, rows.stop) if every else _middles(rows, size)
        step = size * max(1, 2**20 // (size * len(keys))) if every else 64
        of_keys = Span(0, len(keys), torch.arange(keys.start, keys.stop))
        lines = []
        for at in chosen.split(step):
            of_rows = Span(0, len(at), at, unbroken=False)
            part = call.bias._part(parameter, at, of_keys.index, None) if parameter is not None else None
            (scores,) = problem.bias_tiles(part, of_rows, of_keys)
            shown = problem.visible(of_rows, of_keys, "partial")
            shape = (len(of_rows), len(keys))
            values = scores[0, 0].float().expand(shape)
            visible = values != float("-inf")
            visible = visible if shown is None else visible & shown[0, 0].expand(shape)
            lines.append(_values(binned(values, visible, (size if every else 1, size)), pool))
        return MapTile(np.concatenate(lines), 0 if every else 1)

    def numbers(self) -> dict[str, np.ndarray]:
        """The statistics of every row, (Lq,) float32 by name: `ROW_NUMBERS`, and "received" (Lk,) of shorter maps."""
        with self._locks["numbers"]:
            if self._numbers is None:
                call, item, head = self.call.alone(self.item, self.head)
                received = max(self.length_q, self.length_k) <= _RECEIVED
                measured = statistics(call.query, call.key, **call.scoring(), received=received)
                self._numbers = _row_numbers(measured, item, head)
            return self._numbers

    def first_key(self) -> int:
        """The first key that any row sees, which `statistics` counts as "first"."""
        call, item, _ = self.call.alone(self.item, self.head)
        first = first_key(call)
        return int(first[item if len(first) > 1 else 0])

    def weights_and_visible(self, rows: Tensor, *, rough: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """(r, Lk) weights of these rows, 0 where hidden, and the visible keys."""
        pooled = self._pooled("weights", rows, range(self.length_k), (1, 1), rough=rough)
        return pooled.sums.float().cpu().numpy(), (pooled.counts > 0).cpu().numpy()

    def row(self, row: int) -> RowOfMap:
        """One row; the latest one is kept, as pairs are requested one by one."""
        known = self._row
        if known is None or known.row != row:
            pooled = self._pooled("logits", torch.tensor([row]), range(self.length_k), (1, 1))
            logits, sink = pooled.largest[0].double(), self.call.call.sink
            lse = logits.logsumexp(0)
            if sink is not None:
                lse = torch.logaddexp(lse, sink[self.head].double())
            lse = torch.where(lse == float("inf"), float("nan"), lse)
            weights = torch.exp(logits - torch.where(lse == float("-inf"), 0.0, lse))
            known = RowOfMap(row, weights.numpy(), logits.numpy(), (pooled.counts[0] > 0).numpy())
            self._row = known
        return known

    def bias(self, row: int, key: int) -> float | None:
        """The bias of a pair, None without one and for a `Score`, which adds none."""
        call = self.call.call
        if call.bias is None or isinstance(call.bias, ModifiedScores):
            return None
        problem, _, _, parameter = head_problem(call, self.item, self.head)
        at_row, at_key = torch.tensor([row]), torch.tensor([key])
        part = call.bias._part(parameter, at_row, at_key, None) if parameter is not None else None
        (scores,) = problem.bias_tiles(part, Span(0, 1, at_row, unbroken=False), Span(0, 1, at_key, unbroken=False))
        return float(scores.reshape(-1)[0])

    def product(self, row: int, key: int) -> float:
        """q_i . k_j, without the scale."""
        call = self.call.call
        query = call.query[self.item, self.head, row].double()
        return float(query @ call.key[self.item, self.head // (call.heads // call.kv_heads), key].double())

    def looked_at_by(self, keys: list[int]) -> np.ndarray:
        """(Lq,): the sum of each row's weights on these keys."""
        total = np.zeros(self.length_q, np.float64)
        for start in sorted({key - key % 16 for key in keys}):
            stop = min(start + 16, self.length_k)
            pooled = self._pooled("weights", range(self.length_q), range(start, stop), (1, 1))
            for key in keys:
                if start <= key < stop:
                    total += pooled.sums[:, key - start].numpy()
        return total


def _middles(rows: range, size: int) -> Tensor:
    """The middle row of each bin."""
    starts = torch.arange(rows.start, rows.stop, size)
    return starts + torch.clamp(rows.stop - starts, max=size) // 2


def _values(pooled: Pooled, pool: Pool) -> np.ndarray:
    return np.asarray((pooled.top if pool == "max" else pooled.mean).float().cpu().numpy())


def _levels(base: Pooled) -> _Pyramid:
    """The base and all coarser levels, down to one bin."""
    levels: dict[str, list[np.ndarray]] = {"max": [], "mean": []}
    now = base
    while True:
        levels["max"].append(_values(now, "max"))
        levels["mean"].append(_values(now, "mean"))
        if max(now.sums.shape) <= 1:
            return _Pyramid(levels)
        now = _halved(now)


def _halved(pooled: Pooled) -> Pooled:
    down, right = pooled.sums.shape[0] % 2, pooled.sums.shape[1] % 2
    shape = (pooled.sums.shape[0] + down) // 2, 2, (pooled.sums.shape[1] + right) // 2, 2
    sums, counts = (
        torch.nn.functional.pad(part, (0, right, 0, down)).view(shape).sum((1, 3))
        for part in (pooled.sums, pooled.counts)
    )
    largest = torch.nn.functional.pad(pooled.largest, (0, right, 0, down), value=float("-inf")).view(shape).amax((1, 3))
    return Pooled(sums, largest, counts)


def _row_numbers(statistics: Statistics, item: int, head: int) -> dict[str, np.ndarray]:
    names = {"self": "mass.self", "previous": "mass.previous", "first": "mass.first", "sink": "mass.sink"}
    out = {}
    for name in ROW_NUMBERS:
        rows = statistics.largest_at if name == "largest_at" else statistics.of(names.get(name, name))
        counted = statistics.counted.expand(statistics.lse.shape)[item, head]
        out[name] = torch.where(counted, rows[item, head].float(), float("nan")).numpy()
    if statistics.received is not None:
        out["received"] = statistics.received[item, head].float().numpy()
    return out
