"""Masks given by their members: global tokens, and the edges of a graph."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from ._data import Subset, Table, bounded_table, describe
from ._intervals import Kind, Region, counted, either
from ._mask import Mask, Problem


class Global(Mask):
    """Global tokens see every key, and every query sees them: `position(i) in tokens or j in tokens`.

    Longformer (Beltagy et al., 2020) is `Window(w, w) | Global(tokens)`.

    Args:
        tokens: positions, integers (T,); or booleans (L,) or (B, L), which must reach as far as queries and keys do.

    Raises:
        TypeError: floats, uint8, or a single int.
        ValueError: a negative position, another rank; when used, booleans that are too short.

    ::

        Global([1]), Lq = Lk = 3
          . 1 .
          1 1 1
          . 1 .
    """

    tokens: Table
    _members: Subset

    def __init__(self, tokens: Sequence[int] | Sequence[bool] | Tensor):
        wanted = "positions (T,) of integers, or booleans (L,) or (B, L)"
        if isinstance(tokens, int):
            raise TypeError(f"Global: tokens must be {wanted}, got {describe(tokens)}")
        table = bounded_table(tokens, "Global: tokens", wanted, booleans=True)
        boolean = table.values.dtype == torch.bool
        if len(table.shape) not in ((1, 2) if boolean else (1,)) or (boolean and table.shape[0] == 0):
            raise ValueError(f"Global: tokens must be {wanted}, got {describe(table.values)}")
        if not boolean:
            if (table.host < 0).any():
                raise ValueError(f"Global: tokens has a negative position, {int(table.host.min())}")
            table = Table.holding(np.unique(table.host), table.device)
        self._set(tokens=table, _members=Subset(_marked(table)))

    def _own_shape(self) -> tuple[int, int]:
        return self._members.batch, 1

    def _tables(self) -> tuple[Table, ...]:
        return (self._members.table,)

    def _moved(self, device: torch.device | str) -> Mask:
        return self._with(tokens=self.tokens.to(device), _members=self._members.to(device))

    def _allow(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        return self._members.contains(b, position) | self._members.contains(b, key)

    def _region(self, region: Region) -> Kind:
        spans = (region.positions, region.keys)
        return either(self._members.kind(span, region.item) for span in spans)

    def _fits(self, problem: Problem) -> None:
        reached = max(problem.positions[1], problem.keys)
        if self.tokens.values.dtype == torch.bool and reached > self.tokens.shape[-1]:
            have = self.tokens.shape[-1]
            raise ValueError(f"Global: {have} booleans, but queries and keys reach position {reached - 1}")

    def _value(self) -> tuple[Hashable, ...]:
        return (self.tokens,)

    def __repr__(self) -> str:
        return f"Global({self.tokens!r})"


class Edges(Mask):
    """The edges of a graph: pairs (query position, key), each a directed edge along which the query attends.

    Queries go by position; in a problem of two different sets of nodes use `.at(0)`. Edges that leave the problem are
    not used. Stored sorted and once each: memory is that of the edges.

    Args:
        queries, keys: integers (E,), edge e lets the query at `queries[e]` attend to key `keys[e]`.

    Raises:
        TypeError: not integers.
        ValueError: lengths that differ, or a negative index.

    ::

        Edges([0, 2, 2], [1, 0, 2]), Lq = Lk = 3
          . 1 .
          . . .
          1 . 1
    """

    queries: Table
    keys: Table
    _starts: Table
    _steps: int

    def __init__(self, queries: Sequence[int] | Tensor, keys: Sequence[int] | Tensor):
        sides = [
            bounded_table(side, f"Edges: {name}", "integers (E,)")
            for side, name in ((queries, "queries"), (keys, "keys"))
        ]
        if any(len(side.shape) != 1 for side in sides) or sides[0].shape != sides[1].shape:
            came = f"{sides[0].shape} and {sides[1].shape}"
            raise ValueError(f"Edges: queries and keys must be integers (E,) of one length, got {came}")
        if any((side.host < 0).any() for side in sides):
            raise ValueError("Edges: queries and keys must not be negative")
        pairs = np.unique(np.stack([side.host for side in sides], axis=1), axis=0)
        starts = np.searchsorted(pairs[:, 0], np.arange(pairs[-1, 0] + 2 if len(pairs) else 1))
        device = next((side.device for side in sides if side.device is not None), None)
        named = zip(("queries", "keys", "_starts"), (pairs[:, 0], pairs[:, 1], starts), strict=True)
        self._set(_steps=int(np.diff(starts).max(initial=0)).bit_length())
        self._set(**{name: Table.holding(values.astype(np.int64), device) for name, values in named})

    def _tables(self) -> tuple[Table, ...]:
        return self.keys, self._starts

    def _moved(self, device: torch.device | str) -> Mask:
        names = ("queries", "keys", "_starts")
        return self._with(**{name: getattr(self, name).to(device) for name in names})

    def _allow(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        starts, keys = self._starts.on(key.device), self.keys.on(key.device)
        nodes, edges = starts.numel() - 1, keys.numel()
        if edges == 0:
            return torch.zeros_like(position, dtype=torch.bool)
        node = position.clamp(0, nodes - 1)
        low, end = starts[node], starts[node + 1]
        high = end
        # Bisection without branches, so that it also works on the scalars of a compiled mask function.
        for _ in range(self._steps):
            middle = (low + high) // 2
            right = (low < high) & (keys[middle.clamp(max=edges - 1)] < key)
            low, high = torch.where(right, middle + 1, low), torch.where(right, high, middle)
        found = (low < end) & (keys[low.clamp(max=edges - 1)] == key)
        return found & (position >= 0) & (position < nodes)

    def _region(self, region: Region) -> Kind:
        starts = self._starts.host
        first, last = (int(starts[min(max(p, 0), len(starts) - 1)]) for p in region.positions)
        keys = self.keys.host[first:last]
        kept = np.count_nonzero((keys >= region.keys[0]) & (keys < region.keys[1]))
        size = (region.positions[1] - region.positions[0]) * (region.keys[1] - region.keys[0])
        return counted(int(kept), size)

    def _value(self) -> tuple[Hashable, ...]:
        return self.queries, self.keys

    def __repr__(self) -> str:
        return f"Edges({self.queries!r}, {self.keys!r})"


def _marked(table: Table) -> Table:
    """Booleans (B or 1, L) of the positions listed, or those given."""
    if table.values.dtype == torch.bool:
        return Table.holding(np.atleast_2d(table.host), table.device)
    marks = np.zeros((1, int(table.host.max(initial=-1)) + 1), dtype=np.bool_)
    marks[0, table.host] = True
    return Table.holding(marks, table.device)
