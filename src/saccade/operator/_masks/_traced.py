"""Masks that are a program: what a mask function is traced to.

Shape legend: B batch, H query heads, n tiles of r rows by c keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._programs._ends import TableEnds
from .._programs._language import Interval, Node, Program as Traced, bounds, evaluate
from .._surroundings import no_transform
from ._data import OwnedTensor, extent
from ._intervals import Kind, Region, Span
from ._mask import Mask, MaskProblem
from ._program import ProgramScope

_ROUNDING = 2.0**-20  # of floats that are computed in float32
_SAMPLE, _WHOLE = 4096, 1 << 20  # bytes of a table that are compared: of a large one some
_COPIED = 1 << 20  # bytes of a captured tensor that a mask copies, as other masks do
Bits = np.ndarray[Any, Any]


class Contents:
    """A tensor's contents at one moment, compared: of a large one the count of writes and a sample."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor  # keeps the memory, so that its address means it
        self._layout = tensor.dtype, tuple(tensor.shape), tensor.device
        self._digest = _digest(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Contents) and self._layout == other._layout and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._layout)


def _digest(tensor: Tensor) -> Hashable:
    held = tensor.detach()
    version = None if held.is_inference() else held._version
    if held.device.type != "cpu":
        return held.data_ptr(), held.stride(), version
    size = held.numel() * held.element_size()
    if size <= _WHOLE:
        return hash(held.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    sample = held.as_strided((_SAMPLE,), (max(held.numel() // _SAMPLE, 1),)) if held.is_contiguous() else held[:1]
    return held.data_ptr(), held.stride(), version, hash(sample.reshape(-1).view(torch.uint8).numpy().tobytes())


class TracedMask(Mask):
    """The pairs at which a program of b, h, q and k is true.

    Args:
        traced: the program. Its q is the query's position.
        tables: the tensors that it reads.
        batch, heads: the numbers of batch items and heads for which it differs; 1 if it does not depend on them.
    """

    traced: Traced
    fixed_tables: tuple[Tensor, ...]
    batch: int
    heads: int
    _ends: tuple[TableEnds, ...]
    _forms: dict[int | None, Mask | None]

    by_lengths = True  # what cannot be recognised is worked out for the rows and keys of a call

    def __init__(self, traced: Traced, tables: Sequence[Tensor], batch: int = 1, heads: int = 1):
        uses = traced.depends[traced.outputs[0]]
        self._set(
            traced=traced,
            fixed_tables=tuple(table.detach() for table in tables),
            batch=batch if "b" in uses else 1,
            heads=heads if "h" in uses else 1,
            _ends=tuple(map(TableEnds, tables)),
            _forms={},
        )

    def _own_batch_and_heads(self) -> tuple[int, int]:
        return self.batch, self.heads

    def _value(self) -> tuple[Hashable, ...]:
        return self.traced, tuple(map(Contents, self.fixed_tables)), self.batch, self.heads

    def moved(self, device: torch.device | str) -> Mask:
        return TracedMask(self.traced, [table.to(device) for table in self.fixed_tables], self.batch, self.heads)

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        leaves = {"b": b, "h": h, "q": position, "k": key}
        bits = evaluated(self.traced, self.fixed_tables, leaves)
        return bits if bits.dim() >= key.dim() else bits.expand(np.broadcast_shapes(position.shape, key.shape))

    def region_kind(self, region: Region) -> Kind:
        known = self.recognised(None)
        if known is not None and region.positions[0] >= 0:
            return known.region_kind(region)
        leaves = {
            "b": _whole(self.batch, region.item),
            "h": _whole(self.heads, region.head),
            "q": (np.float64(region.positions[0]), np.float64(region.positions[1] - 1)),
            "k": (np.float64(region.keys[0]), np.float64(region.keys[1] - 1)),
        }
        low, high = self._bounds(leaves)
        return "full" if low == 1 else "empty" if high == 0 else "partial"

    def decided(self, positions: Bits, keys: Bits) -> tuple[Bits, Bits]:
        """Whether tiles are full, and whether they are empty: (B, H, R, C) each.

        Args:
            positions: the first and last position of each tile's rows, (B or 1, R, 2).
            keys: the first and last of each tile's keys, (C, 2).
        """
        items, heads = np.arange(self.batch, dtype=np.float64), np.arange(self.heads, dtype=np.float64)
        leaves = {
            "b": (items[:, None, None, None],) * 2,
            "h": (heads[None, :, None, None],) * 2,
            "q": tuple(positions[:, None, :, None, end].astype(np.float64) for end in (0, 1)),
            "k": tuple(keys[None, None, None, :, end].astype(np.float64) for end in (0, 1)),
        }
        low, high = self._bounds(leaves)  # type: ignore[arg-type]
        shape = (max(self.batch, len(positions)), self.heads, positions.shape[1], len(keys))
        return np.broadcast_to(np.asarray(low) == 1, shape), np.broadcast_to(np.asarray(high) == 0, shape)

    def _bounds(self, leaves: dict[str, Interval]) -> Interval:
        def ends(node: Node, indices: Sequence[Interval]) -> Interval:
            return self._ends[int(node.value or 0)](indices)

        return bounds(self.traced, leaves, entries=ends, rounding=_ROUNDING)[self.traced.outputs[0]]

    def recognised(self, keys: int | None) -> Mask | None:
        """The built-in mask that is equivalent for `keys` keys (None: for any number) at positions from 0 on; None if
        there is none."""
        from ._recognised import recognised

        if keys not in self._forms:
            made = recognised(self.traced, self.fixed_tables, keys=keys, batch=self.batch, heads=self.heads)
            self._set(_forms={**self._forms, keys: made})
        return self._forms[keys]

    def _in_kernels(self, scope: ProgramScope) -> Mask:
        known, positions = self.recognised(scope.keys[1]), standing(scope.rows, scope.offset)
        if known is None or positions[0] < 0:
            return self
        try:
            known._check_fit(MaskProblem(scope.rows[1], scope.keys[1], positions, exact=False))
        except ValueError:
            return self
        return known

    def __repr__(self) -> str:
        return f"TracedMask(<{len(self.traced.nodes)} nodes>)"


def _whole(size: int, chosen: int | None) -> Interval:
    if chosen is not None and size > 1:
        return np.float64(chosen), np.float64(chosen)
    return np.float64(0), np.float64(size - 1)


def evaluated(program: Traced, tables: Sequence[Tensor], leaves: dict[str, Tensor]) -> Tensor:
    """The program's value at indices that broadcast. IndexError where an index is outside of its table."""
    wide = any(table.dtype == torch.float64 for table in tables)

    def load(node: int, index: list[Tensor]) -> Tensor:
        number = int(program.nodes[node].value or 0)
        _check_inside(number, tables[number], index)
        return tables[number][tuple(index)]

    return evaluate(program, leaves, load, torch.float64 if wide else torch.float32)[0]


def _check_inside(number: int, table: Tensor, index: Sequence[Tensor]) -> None:
    """Indices from the end are made explicit by the tracer: a negative one is a position before the first."""
    for axis, (places, size) in enumerate(zip(index, table.shape, strict=True)):
        if places.numel() and places.device.type == "cpu" and no_transform():
            low, high = (int(end) for end in torch.aminmax(places))
            if low < 0 or high >= size:
                raise IndexError(
                    f"mask function: index {low if low < 0 else high} is out of bounds for axis {axis} of captured "
                    f"tensor {number}, of shape {tuple(table.shape)}"
                )


def standing(rows: Span, offset: int | OwnedTensor) -> Span:
    """The positions that rows reach, over all batch items."""
    low, high = extent(offset, None)
    return rows[0] + low, rows[1] + high


class HeldMask:
    """A function's program with the tensors that it captured, as they were."""

    def __init__(self, program: Traced, tables: Sequence[Tensor], mask: TracedMask):
        self.program, self.mask = program, mask
        self._tables, self._versions = tuple(tables), tuple(map(_version, tables))
        self._contents = tuple(map(Contents, tables))

    def are(self, tables: Sequence[Tensor], thoroughly: bool) -> bool:
        """Whether `tables` are the captured tensors with the same contents.

        Args:
            thoroughly: whether contents are compared where the count of writes says that nothing changed.
        """
        same = all(a is b for a, b in zip(tables, self._tables, strict=True))
        if same and not thoroughly and tuple(map(_version, tables)) == self._versions:
            return True
        return tuple(map(Contents, tables)) == self._contents


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def kept(table: Tensor) -> Tensor:
    held = table.detach()
    return held.clone() if held.numel() * held.element_size() <= _COPIED else held
