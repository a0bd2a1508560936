"""Masks given by their members: global tokens, and the edges of a graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ._data import OwnedTensor, Subset, bounded_table, describe
from ._intervals import Kind, Region, Span, counted, either
from ._mask import Mask, MaskProblem
from ._program import Opcode, ProgramScope, ProgramWriter

_NEAR = 1 << 20  # positions below it have a table of all positions: no search, and alike for all lengths in a graph


class Global(Mask):
    """Global tokens see every key, and every query sees them: `position(i) in tokens or j in tokens`.

    Longformer (Beltagy et al., 2020) is `Window(w, w) | Global(tokens)`.

    Args:
        tokens: positions, integers (T,); or booleans (L,) or (B, L), which must reach as far as queries and keys do.

    Raises:
        TypeError: floats, uint8, or a single int.
        ValueError: a negative position, another rank; when the mask is used, booleans that are too short.

    Example:
        >>> import saccade
        >>> saccade.Global([1]).picture(3, 3)
        Global([1])
          0    2
        0 ··██··
        1 ██████
        2 ··██··
        3 queries down, 3 keys across; █ attends, · masked
    """

    fields = ("tokens",)
    by_position = True

    tokens: OwnedTensor
    members: Subset | SparseSubset

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
            table = OwnedTensor.holding(np.unique(table.host), table.device)
        self._set(tokens=table, members=members(table))

    @property
    def by_lengths(self) -> bool:  # type: ignore[override]
        """Whether the tokens are only in a list, without a table of positions."""
        return isinstance(self.members, SparseSubset)

    def _own_batch_and_heads(self) -> tuple[int, int]:
        return self.members.batch, 1

    def tables(self) -> tuple[OwnedTensor, ...]:
        return (self.members.table,)

    def moved(self, device: torch.device | str) -> Mask:
        return self.replaced(tokens=self.tokens.to(device), members=self.members.to(device))

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        return self.members.contains(b, position) | self.members.contains(b, key)

    def region_kind(self, region: Region) -> Kind:
        spans = (region.positions, region.keys)
        return either(self.members.kind(span, region.item) for span in spans)

    def fits(self, problem: MaskProblem) -> None:
        reached = max(problem.positions[1], problem.keys)
        if self.tokens.values.dtype == torch.bool and reached > self.tokens.shape[-1]:
            have = self.tokens.shape[-1]
            raise ValueError(f"Global: {have} booleans, but queries and keys reach position {reached - 1}")

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        if isinstance(self.members, Subset):
            program.write(Opcode.GLOBAL, program.table(self.members.table))
        elif scope.beyond:
            program.work_out(self, scope, program)
        else:
            # The table is of the keys and, behind them, of the positions of this call's rows.
            keys = scope.keys[1]
            marks = np.isin(
                np.concatenate([np.arange(keys), _moved_near(scope, keys, program)]), self.members.table.host
            )
            program.write(Opcode.GLOBAL, program.table(torch.from_numpy(marks)))

    def __repr__(self) -> str:
        return f"Global({self.tokens!r})"


class Edges(Mask):
    """The edges of a graph: pairs (query position, key), each a directed edge along which the query attends.

    Queries go by position; in a problem of two different sets of nodes use `.at(0)`. Edges that leave the problem are
    not used. They are stored sorted and once each: memory is that of the edges.

    Args:
        queries: integers (E,); edge e lets the query at `queries[e]` attend to key `keys[e]`.
        keys: integers (E,).

    Raises:
        TypeError: indices that are not integers.
        ValueError: lengths that differ, or a negative index.

    Example:
        >>> import saccade
        >>> saccade.Edges([0, 2, 2], [1, 0, 2]).picture(3, 3)
        Edges([0, 2, 2], [1, 0, 2])
          0    2
        0 ··██··
        1 ······
        2 ██··██
        3 queries down, 3 keys across; █ attends, · masked
    """

    fields = ("queries", "keys")

    queries: OwnedTensor
    keys: OwnedTensor
    _nodes: OwnedTensor | None  # the query positions that have edges; None: a table of all positions is small
    _starts: OwnedTensor  # node n, or position n, has the edges from `_starts[n]` to `_starts[n + 1] - 1`
    _steps: int

    def __init__(self, queries: Sequence[int] | Tensor, keys: Sequence[int] | Tensor):
        sides = [
            bounded_table(side, f"Edges: {name}", "integers (E,)")
            for side, name in ((queries, "queries"), (keys, "keys"))
        ]
        if any(len(side.shape) != 1 for side in sides) or sides[0].shape != sides[1].shape:
            got = f"{sides[0].shape} and {sides[1].shape}"
            raise ValueError(f"Edges: queries and keys must be integers (E,) of one length, got {got}")
        if any((side.host < 0).any() for side in sides):
            raise ValueError("Edges: queries and keys must not be negative")
        pairs = np.unique(np.stack([side.host for side in sides], axis=1), axis=0)
        nodes = np.unique(pairs[:, 0])
        scattered = not _dense_enough(nodes, len(pairs))
        every = nodes if scattered else np.arange(nodes.max(initial=-1) + 1)
        starts = np.append(np.searchsorted(pairs[:, 0], every), len(pairs))
        device = next((side.device for side in sides if side.device is not None), None)
        named = zip(("queries", "keys", "_starts"), (pairs[:, 0], pairs[:, 1], starts), strict=True)
        self._set(_steps=int(np.diff(starts).max(initial=0)).bit_length())
        self._set(_nodes=OwnedTensor.holding(nodes, device) if scattered else None)
        self._set(**{name: OwnedTensor.holding(values.astype(np.int64), device) for name, values in named})

    @property
    def by_lengths(self) -> bool:  # type: ignore[override]
        """Whether the edges are found by a list of the positions that have some, without a table of positions."""
        return self._nodes is not None

    def tables(self) -> tuple[OwnedTensor, ...]:
        return (self.keys, self._starts) if self._nodes is None else (self.keys, self._starts, self._nodes)

    def moved(self, device: torch.device | str) -> Mask:
        names = ("queries", "keys", "_starts", *(() if self._nodes is None else ("_nodes",)))
        return self.replaced(**{name: getattr(self, name).to(device) for name in names})

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        starts, keys = self._starts.on(key.device), self.keys.on(key.device)
        nodes, edges = starts.numel() - 1, keys.numel()
        if edges == 0:
            return torch.zeros_like(position, dtype=torch.bool)
        if self._nodes is None:
            node, there = position.clamp(0, nodes - 1), (position >= 0) & (position < nodes)
        else:
            node, there = _found(self._nodes.on(key.device), position)
        end = starts[node + 1]
        low = _bisected(keys, key, starts[node], end, self._steps)
        return there & (low < end) & (keys[low.clamp(max=edges - 1)] == key)

    def region_kind(self, region: Region) -> Kind:
        if self.by_lengths and torch.compiler.is_compiling():  # which cannot look at values on the host
            return "partial"
        first, last = np.searchsorted(self.queries.host, region.positions)
        keys = self.keys.host[first:last]
        kept = np.count_nonzero((keys >= region.keys[0]) & (keys < region.keys[1]))
        size = (region.positions[1] - region.positions[0]) * (region.keys[1] - region.keys[0])
        return counted(int(kept), size)

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        starts, keys = self._starts.values, self.keys.values
        if self.by_lengths:
            positions = _moved_near(scope, 0, program)
            first, last = np.searchsorted(self.queries.host, [positions, positions + 1])
            counts = last - first
            ends = np.cumsum(counts)
            edges = np.arange(counts.sum()) + np.repeat(first - (ends - counts), counts)
            starts, keys = torch.from_numpy(np.append(0, ends)), torch.from_numpy(self.keys.host[edges])
        program.write(Opcode.EDGES, program.table(starts), program.table(keys))

    def __repr__(self) -> str:
        return f"Edges({self.queries!r}, {self.keys!r})"


class SparseSubset:
    """A set of positions, sorted: what `Subset` is, for positions too far away for a table of booleans."""

    batch = 1

    def __init__(self, table: OwnedTensor):
        self.table = table

    def contains(self, b: Tensor, index: Tensor) -> Tensor:
        return _found(self.table.on(index.device), index)[1]

    def kind(self, span: Span, item: int | None) -> Kind:
        if torch.compiler.is_compiling():  # which cannot look at values on the host
            return "partial"
        first, last = np.searchsorted(self.table.host, span)
        return counted(int(last - first), span[1] - span[0])

    def to(self, device: torch.device | str) -> SparseSubset:
        moved = self.table.to(device)
        return self if moved is self.table else SparseSubset(moved)


def members(tokens: OwnedTensor) -> Subset | SparseSubset:
    """The set of the positions that are listed, or that booleans (B, L) or (L,) mark."""
    if tokens.values.dtype == torch.bool:
        return Subset(OwnedTensor.holding(np.atleast_2d(tokens.host), tokens.device))
    if not _dense_enough(tokens.host, len(tokens.host)):
        return SparseSubset(tokens)
    marks = np.zeros((1, int(tokens.host.max(initial=-1)) + 1), dtype=np.bool_)
    marks[0, tokens.host] = True
    return Subset(OwnedTensor.holding(marks, tokens.device))


def _dense_enough(positions: np.ndarray, count: int) -> bool:
    """Whether a table of all positions up to the last is small, or not much larger than `count` entries are."""
    return bool(positions.max(initial=-1) < max(_NEAR, 16 * count))


def _moved_near(scope: ProgramScope, first: int, program: ProgramWriter) -> np.ndarray:
    """The positions of this call's rows, one span for each different offset; they are counted from `first` on.

    It is placed so that its position `first + n` is the n-th of these, however far away and apart they are.
    """
    top, bottom = scope.rows
    offsets = np.array([scope.offset]) if isinstance(scope.offset, int) else scope.offset.host
    distinct, which = np.unique(offsets, return_inverse=True)
    moved = which.reshape(-1) * (bottom - top) + first - top
    many = len(moved) != 1
    program.write(Opcode.AT, int(many), program.table(torch.from_numpy(moved)) if many else int(moved[0]))
    return (distinct[:, None] + np.arange(top, bottom)).ravel()


def _bisected(values: Tensor, wanted: Tensor, low: Tensor, high: Tensor, steps: int) -> Tensor:
    """The first index in [low, high) with a value of at least the wanted one; else `high`."""
    # Without branches, so that it also works on the scalars of a compiled mask function.
    for _ in range(steps):
        middle = (low + high) // 2
        right = (low < high) & (values[middle.clamp(max=values.numel() - 1)] < wanted)
        low, high = torch.where(right, middle + 1, low), torch.where(right, high, middle)
    return low


def _found(values: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """For each wanted number, an index into ascending values, and whether the value at that index equals the number."""
    count = values.numel()
    none = torch.zeros_like(wanted)
    place = _bisected(values, wanted, none, none + count, count.bit_length()).clamp(max=count - 1)
    return place, values[place] == wanted
