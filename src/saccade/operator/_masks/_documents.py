"""Documents packed into one sequence: a query sees the keys of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._data import OwnedTensor, bounded_table, describe
from ._intervals import Kind, Region, Span
from ._mask import Mask, MaskProblem, common
from ._program import Opcode, ProgramScope, ProgramWriter

Ids = Sequence[int] | Sequence[Sequence[int]] | Tensor | OwnedTensor


class Documents(Mask):
    """Pairs within one document: `query_ids[position(i)] == key_ids[j]`.

    With one set of ids they belong to positions: key j is in document `ids[j]` and the query at position p in
    `ids[p]`, so `Causal() & Documents(ids)` keeps working with a cache. Ids may be longer than the keys so far, and
    need not be sorted. With `key_ids` the two sides are different sequences (cross-attention): row i is in
    `query_ids[i]`, and both have exactly one id per query and per key.

    Args:
        query_ids: integers (L,) or (B, L).
        key_ids: integers (Lk,) or (B, Lk), or None: the same ids on both sides.

    Raises:
        TypeError: booleans, floats or uint8.
        ValueError: another rank; when the mask is used, fewer ids than positions reached.

    Example:
        >>> import saccade
        >>> (saccade.Causal() & saccade.Documents([0, 0, 1])).picture(3, 3)
        Causal() & Documents([0, 0, 1])
          0    2
        0 ██····
        1 ████··
        2 ····██
        3 queries down, 3 keys across; █ attends, · masked
    """

    fields = ("query_ids", "key_ids")

    query_ids: OwnedTensor
    key_ids: OwnedTensor | None
    _rows: _Ranges
    _keys: _Ranges

    def __init__(self, query_ids: Ids, key_ids: Ids | None = None):
        self._set(query_ids=_ids(query_ids, "query_ids"), key_ids=None if key_ids is None else _ids(key_ids, "key_ids"))
        self._own_batch_and_heads()
        self._prepare()

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Sequence[int] | Tensor, key_cu_seqlens: Sequence[int] | Tensor | None = None
    ) -> Documents:
        """Documents from cumulative lengths: document n holds the tokens `cu[n] <= t < cu[n + 1]`.

        Args:
            cu_seqlens: integers (N + 1,), starting at 0, never falling; as for flash-attn's variable-length calls.
            key_cu_seqlens: the same for the keys where they are another sequence, with as many documents.
        """
        queries = _cumulative(cu_seqlens, "cu_seqlens")
        if key_cu_seqlens is None:
            return cls(_expanded(queries))
        keys = _cumulative(key_cu_seqlens, "key_cu_seqlens")
        if keys.shape != queries.shape:
            raise ValueError(f"cu_seqlens has {queries.shape[0] - 1} documents, key_cu_seqlens {keys.shape[0] - 1}")
        return cls(_expanded(queries), _expanded(keys))

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return self.key_ids is None

    def _prepare(self) -> None:
        """Host-side ids for interval arithmetic, sorted where the documents allow it."""
        rows = self.query_ids.host
        keys = rows if self.key_ids is None else self.key_ids.host
        if self.key_ids is None:
            rows = keys = _renumbered(rows)
        self._set(_rows=_Ranges(rows), _keys=_Ranges(keys))

    def _own_batch_and_heads(self) -> tuple[int, int]:
        keys = 1 if self.key_ids is None else _batch(self.key_ids)
        return common(_batch(self.query_ids), keys, "batch items"), 1

    def tables(self) -> tuple[OwnedTensor, ...]:
        return (self.query_ids,) if self.key_ids is None else (self.query_ids, self.key_ids)

    def moved(self, device: torch.device | str) -> Mask:
        return self.replaced(
            query_ids=self.query_ids.to(device), key_ids=None if self.key_ids is None else self.key_ids.to(device)
        )

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        where = position if self.key_ids is None else row
        query, real = _looked_up(self.query_ids, b, where)
        other, also_real = _looked_up(self.query_ids if self.key_ids is None else self.key_ids, b, key)
        return (query == other) & real & also_real

    def region_kind(self, region: Region) -> Kind:
        where = region.positions if self.key_ids is None else region.rows
        inside = self._rows.within(where) and self._keys.within(region.keys)
        rows, keys = self._rows.extremes(where, region.item), self._keys.extremes(region.keys, region.item)
        if rows is None or keys is None or ((rows[1] < keys[0]) | (keys[1] < rows[0])).all():
            return "empty"
        same = (rows[0] == rows[1]) & (keys[0] == keys[1]) & (rows[0] == keys[0])
        return "full" if inside and same.all() else "partial"

    def fits(self, problem: MaskProblem) -> None:
        have, keys = self._rows.size, self._keys.size
        if self.key_ids is None:
            reached = max(problem.positions[1], problem.keys) if problem.rows else problem.keys
            if reached > have:
                raise ValueError(f"Documents: {have} ids, but queries and keys reach position {reached - 1}")
        elif (
            have < problem.rows
            or keys < problem.keys
            or (problem.exact and (have, keys) != (problem.rows, problem.keys))
        ):
            raise ValueError(
                f"Documents: {have} query_ids and {keys} key_ids for {problem.rows} queries and {problem.keys} keys"
            )

    @property
    def sees_itself(self) -> bool:
        return self.key_ids is None

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        program.write(Opcode.DOCUMENTS, program.table(self.query_ids), program.table(self.key_ids))

    def __repr__(self) -> str:
        return f"Documents({self.query_ids!r}{'' if self.key_ids is None else f', key_ids={self.key_ids!r}'})"


class _Ranges:
    """Least and greatest id in any span of positions, per batch item. Sorted ids answer from the ends of the span."""

    def __init__(self, ids: np.ndarray):
        self.ids = np.atleast_2d(ids)
        self.size = self.ids.shape[1]
        self.sorted = bool((self.ids[:, 1:] >= self.ids[:, :-1]).all())

    def within(self, span: Span) -> bool:
        return span[0] >= 0 and span[1] <= self.size

    def extremes(self, span: Span, item: int | None) -> tuple[np.ndarray, np.ndarray] | None:
        start, stop = max(span[0], 0), min(span[1], self.size)
        if start >= stop:
            return None
        one = item is not None and self.ids.shape[0] > 1
        ids = self.ids[item : item + 1] if one and item is not None else self.ids
        if self.sorted:
            return ids[:, start], ids[:, stop - 1]
        return ids[:, start:stop].min(axis=1), ids[:, start:stop].max(axis=1)


def _renumbered(ids: np.ndarray) -> np.ndarray:
    """The same documents numbered in the order in which they appear, if each is contiguous; else unchanged."""
    table = np.atleast_2d(ids)
    if not table.shape[1]:
        return table
    runs = np.concatenate([np.zeros_like(table[:, :1]), np.cumsum(table[:, 1:] != table[:, :-1], axis=1)], axis=1)
    pieces = all(len(np.unique(row)) == run[-1] + 1 for row, run in zip(table, runs, strict=True))
    return runs if pieces else table


def _looked_up(table: OwnedTensor, b: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The id at each index, and whether there is one."""
    ids = table.on(index.device)
    size = ids.shape[-1]
    if size == 0:
        return torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool)
    inside = (index >= 0) & (index < size)
    index = index.clamp(0, size - 1)
    if ids.dim() == 1:
        return ids[index], inside
    return ids[b if ids.shape[0] > 1 else torch.zeros_like(b), index], inside


def _batch(table: OwnedTensor) -> int:
    return 1 if len(table.shape) == 1 else table.shape[0]


def _ids(source: Any, name: str) -> OwnedTensor:
    if isinstance(source, OwnedTensor):
        return source
    wanted = "integers (L,) or (B, L)"
    table = OwnedTensor.of(source, f"Documents: {name}", wanted, booleans=False, integers=True)
    if len(table.shape) not in (1, 2):
        raise ValueError(f"Documents: {name} must be {wanted}, got {describe(table.values)}")
    return table


def _cumulative(source: Any, name: str) -> OwnedTensor:
    table = bounded_table(source, f"Documents: {name}", "integers (N + 1,)")
    host = table.host
    if host.ndim != 1 or host.size < 2 or host[0] != 0 or (np.diff(host) < 0).any():
        raise ValueError(f"Documents: {name} must be (N + 1,) integers that start at 0 and never fall, got {table!r}")
    return table


def _expanded(cu_seqlens: OwnedTensor) -> OwnedTensor:
    lengths = np.diff(cu_seqlens.host)
    return OwnedTensor.holding(np.repeat(np.arange(len(lengths), dtype=np.int64), lengths), cu_seqlens.device)
