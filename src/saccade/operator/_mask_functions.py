"""A `mask_mod` of PyTorch as one of Saccade's masks: recognised, as a program, or called as it is.

Shape legend: B batch, H query heads, Lq / Lk lengths. A `mask_mod` gets scalars (b, h, q_idx, kv_idx): q_idx is the
row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._derived import state
from ._masks import Mask, Predicate
from ._programs._captured import reached
from ._programs._language import Interval, Program, bounds, evaluate
from ._programs._tracing import NotTraceable, traced

_LEAVES = ("b", "h", "q", "k")
Lengths = tuple[int, int]


@dataclass(frozen=True, eq=False)
class MaskFunction:
    """A function, and how many batch items and heads it tells apart.

    Attributes:
        program: the function's program; None where it cannot be traced.
        tables: the tensors that the program reads.
        value: equal for functions that mean the same; it changes with every tensor that the function captures.
    """

    fn: Callable[..., Tensor]
    program: Program | None
    tables: tuple[Tensor, ...]
    batch: int
    heads: int
    value: tuple[Any, ...]

    @classmethod
    def of(cls, fn: Callable[..., Tensor], batch: int, heads: int) -> MaskFunction:
        """The function for B batch items and H heads.

        Raises:
            TypeError: not a function of (b, h, q_idx, kv_idx) that returns a boolean.
        """
        try:
            trace = traced(fn, _LEAVES, name="mask_mod")
        except NotTraceable:
            inside = reached(fn)
            value = (inside.key, *map(state, inside.tensors)) if inside.guarded else (object(),)
            return cls(fn, None, (), batch, heads, value)
        program, tables = trace.program, tuple(trace.tables)
        used = program.depends[program.outputs[0]]
        items, many = (size if name in used else 1 for name, size in (("b", batch), ("h", heads)))
        return cls(fn, program, tables, items, many, (program, *map(state, tables)))

    def mask(self, lengths: Lengths) -> Mask | None:
        """The mask of a problem of (Lq, Lk); None where all pairs are visible."""
        if self.program is None:
            called: Mask = Predicate(_by_pair(self.fn), batch=self.batch, heads=self.heads)
            return _placed(called, lengths)
        if (self.kinds((self.batch, self.heads, 1, 1), lengths, lengths) == 1).all():
            return None
        rule = _evaluated(self.program, tuple(table.detach().clone() for table in self.tables))
        items, many = (size if size > 1 else None for size in (self.batch, self.heads))
        return _placed(Predicate(rule, batch=items, heads=many), lengths)

    def kinds(self, shape: tuple[int, int, int, int], size: Lengths, lengths: Lengths) -> np.ndarray[Any, Any]:
        """What is sure of each block of `size`, (B, H, nq, nk): 1 all visible, 0 none, -1 not known."""
        if self.program is None:
            return np.full(shape, -1)
        ends = bounds(self.program, _leaves(shape, size, lengths))[self.program.outputs[0]]
        return np.broadcast_to(np.where(ends[0] == ends[1], ends[0], -1), shape)


def _placed(mask: Mask, lengths: Lengths) -> Mask:
    """Row i at position i; where the lengths are equal it stands there by itself."""
    return mask if lengths[0] == lengths[1] else mask.at(0)


def _leaves(shape: tuple[int, int, int, int], size: Lengths, lengths: Lengths) -> dict[str, Interval]:
    item, head = np.arange(shape[0]).reshape(-1, 1, 1, 1), np.arange(shape[1]).reshape(1, -1, 1, 1)
    spans = []
    for axis, (side, length) in enumerate(zip(size, lengths, strict=True)):
        start = np.arange(shape[2 + axis]).reshape((-1, 1) if axis == 0 else (-1,)) * side
        spans.append((start.astype(float), np.minimum(start + side, length).astype(float) - 1))
    points = [array.astype(float) for array in (item, head)]
    return {"b": (points[0],) * 2, "h": (points[1],) * 2, "q": spans[0], "k": spans[1]}


def _evaluated(program: Program, tables: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    """The program as a function of index tensors that broadcast."""
    used = program.depends[program.outputs[0]]

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        def load(node: int, indices: list[Tensor]) -> Tensor:
            table = tables[program.nodes[node].value]  # type: ignore[index]
            return table[tuple(indices)]

        leaves = {name: leaf for name, leaf in zip(_LEAVES, (b, h, q, k), strict=True) if name in used}
        return evaluate(program, leaves, load, torch.float32)[0]

    return rule


def _by_pair(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of scalars as a function of index tensors that broadcast, as PyTorch's eager code calls it."""

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        pairs = torch.broadcast_tensors(b, h, q, k)
        with TransformGetItemToIndex():
            return torch.vmap(fn)(*(index.reshape(-1) for index in pairs)).reshape(pairs[0].shape)

    return rule
