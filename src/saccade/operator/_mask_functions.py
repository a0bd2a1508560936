"""A `mask_mod` of PyTorch as one of Saccade's masks: recognised, as a program, or called as it is.

Shape legend: B batch, H query heads, Lq / Lk lengths. A `mask_mod` gets scalars (b, h, q_idx, kv_idx): q_idx is the
row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._derived import state
from ._masks import Mask, Predicate
from ._masks._traced import TracedMask
from ._programs._captured import reached
from ._programs._language import Program
from ._programs._tracing import NotTraceable, traced

_LEAVES = ("b", "h", "q", "k")
Lengths = tuple[int, int]
Kinds = np.ndarray[Any, Any]


@dataclass(eq=False)
class MaskFunction:
    """A mask function, and the numbers of batch items and heads for which it differs.

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
    def of(cls, fn: Callable[..., Tensor], batch: int, heads: int, device: torch.device) -> MaskFunction:
        """The function for B batch items and H heads.

        Raises:
            TypeError: not a function of (b, h, q_idx, kv_idx) that returns a boolean.
            ValueError: it captures tensors of another device.
        """
        try:
            trace = traced(fn, _LEAVES, name="mask_mod", device=device)
        except NotTraceable:
            inside = reached(fn)
            value = (inside.key, *map(state, inside.tensors)) if inside.guarded else (object(),)
            return cls(fn, None, (), batch, heads, value)
        program, tables = trace.program, tuple(trace.tables)
        used = program.depends[program.outputs[0]]
        items, many = (size if name in used else 1 for name, size in (("b", batch), ("h", heads)))
        return cls(fn, program, tables, items, many, (program, *map(state, tables)))

    @cached_property
    def _traced(self) -> TracedMask | None:
        """The program with its own copies of tables, which later writes do not change."""
        if self.program is None:
            return None
        return TracedMask(self.program, [table.detach().clone() for table in self.tables], self.batch, self.heads)

    def mask(self, lengths: Lengths) -> Mask | None:
        """The mask of a problem of (Lq, Lk); None if all pairs are visible."""
        made = self._traced
        if made is None:
            return _placed(Predicate(_by_pair(self.fn), batch=self.batch, heads=self.heads), lengths)
        if (self.kinds((self.batch, self.heads, 1, 1), lengths, lengths) == 1).all():
            return None
        known = made.recognised(lengths[1])
        return _placed(known if known is not None and _fits(known, lengths) else made, lengths)

    def kinds(self, shape: tuple[int, int, int, int], size: Lengths, lengths: Lengths) -> Kinds:
        """The proved kind of each block of `size`, (B, H, nq, nk): 1 all visible, 0 none, -1 not known."""
        if self._traced is None:
            return np.full(shape, -1)
        rows, keys = (
            np.stack([start := np.arange(count) * side, np.minimum(start + side, length) - 1], axis=-1)
            for count, side, length in zip(shape[2:], size, lengths, strict=True)
        )
        full, empty = self._traced.decided(rows[None], keys)
        return np.broadcast_to(np.where(full, 1, np.where(empty, 0, -1)), shape)


def _placed(mask: Mask, lengths: Lengths) -> Mask:
    """The mask with row i at position i, which is the default placement if the lengths are equal."""
    return mask if lengths[0] == lengths[1] else mask.at(0)


def _fits(mask: Mask, lengths: Lengths) -> bool:
    """Whether the mask holds for so many rows and keys: documents end where their ids end."""
    try:
        _placed(mask, lengths).check(None, None, *lengths, None)
    except ValueError:
        return False
    return True


def _by_pair(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of scalars as a function of index tensors that broadcast, as PyTorch's eager code calls it."""

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        pairs = torch.broadcast_tensors(b, h, q, k)
        with TransformGetItemToIndex():
            return torch.vmap(fn)(*(index.reshape(-1) for index in pairs)).reshape(pairs[0].shape)

    return rule
