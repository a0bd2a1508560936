"""A mask given as a function of batch item, head, query position and key index."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._programs._language import Program as Traced
from .._programs._tracing import NotTraceable, check_arguments, traced
from .._surroundings import lasting
from ._data import describe, of_vmap, whole
from ._intervals import Kind, Region
from ._mask import Mask, MaskProblem
from ._program import ProgramScope
from ._recognised import sizes_of
from ._traced import HeldMask, TracedMask, kept

_LEAVES = ("b", "h", "q", "k")


class Predicate(Mask):
    """A mask given as a function of batch item, query head, query position and key index.

    The function is traced once with scalars, like a mask_mod of FlexAttention: `table[b][q]`, arithmetic, comparisons,
    `&`, `|`, `torch.where`. What it says is then known by tile, so that empty tiles cost nothing, and where it is one
    of Saccade's masks it is computed as this. Captured tensors are read anew at each call, and changes of them noticed.

    A function that cannot be traced gets int64 tensors that broadcast against each other. It must work element by
    element and not look at values from Python, and its answers must not change from call to call. Tensors in its
    closure stay on their device: `.to(device)` does not move them.

    The function gets the query's *position*, so `Predicate(lambda b, h, q, k: k <= q)` is `Causal()`.

    Args:
        fn: `fn(b, h, q, k) -> bool`.
        batch: how many batch items `fn` tells apart. None: as many as tables have that it indexes by b; without such
            a table, `fn` must not use b, and any use of it raises a ValueError.
        heads: how many query heads `fn` tells apart; the same for h.

    Raises:
        TypeError: `fn` is not callable, or returns something other than a bool tensor.
        IndexError: when the mask is used, an index outside of a captured tensor.

    Example:
        >>> import saccade
        >>> saccade.Predicate(lambda b, h, q, k: (k <= q) & (k % 2 == 0)).picture(4, 4)
        Predicate(<lambda>)
          0      3
        0 ██······
        1 ██······
        2 ██··██··
        3 ██··██··
        4 queries down, 4 keys across; █ attends, · masked
    """

    fn: Callable[[Any, Any, Tensor, Tensor], Tensor]
    batch: int | None
    heads: int | None

    def __init__(self, fn: Callable[..., Tensor], *, batch: int | None = None, heads: int | None = None):
        if not callable(fn):
            raise TypeError(f"Predicate: fn must be a function of (b, h, q, k), got {describe(fn)}")
        check_arguments(fn, _LEAVES, "Predicate: fn")
        self._set(
            fn=fn,
            batch=None if batch is None else whole(batch, "Predicate: batch", least=1),
            heads=None if heads is None else whole(heads, "Predicate: heads", least=1),
        )

    def _own_batch_and_heads(self) -> tuple[int, int]:
        made = self._program()
        return (self.batch or 1, self.heads or 1) if made is None else made._batch_and_heads()

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        made = self._program()
        if made is not None:
            return made.allows(b, h, row, position, key)
        item = _Undeclared("b", "batch") if self.batch is None else b
        head = _Undeclared("h", "heads") if self.heads is None else h
        try:
            answer = self.fn(item, head, position, key)
        except RuntimeError as error:
            if "Boolean value of Tensor" not in str(error):
                raise
            words = "`if`, `and`, `or`, `not` and chained comparisons"
            raise TypeError(
                f"Predicate: fn needs a value in Python, as of {words}; use torch.where, &, |, ~"
            ) from error
        if not isinstance(answer, Tensor) or answer.dtype != torch.bool:
            raise TypeError(f"Predicate: fn must return a bool tensor, got {describe(answer)}")
        return answer if answer.dim() >= key.dim() else answer.expand(np.broadcast_shapes(position.shape, key.shape))

    def region_kind(self, region: Region) -> Kind:
        made = self._program()
        return "partial" if made is None else made.region_kind(region)

    def _reading(self, keys: int) -> str:
        """The mask that the function is recognised as in a call with so many keys: a line of `explain`."""
        made = self._program()
        if made is not None:
            known = made.recognised(keys)
            return f"a program of {len(made.traced.nodes)} nodes" if known is None else f"recognised as {known!r}"
        try:
            traced(self.fn, _LEAVES, name="Predicate: fn")
        except (NotTraceable, TypeError, ValueError) as refused:
            return f"called for each pair, as it cannot be traced: {refused}"
        return "called for each pair"

    def fits(self, problem: MaskProblem) -> None:
        made = self._program(thoroughly=True)  # a call begins: what changed since the last one is noticed
        if made is None:
            return
        known, given = sizes_of(made.traced, made.fixed_tables), (self.batch, self.heads)
        there = (problem.batch, "batch items"), (problem.heads, "query heads")
        for size, wanted, (count, what) in zip(known, given, there, strict=True):
            if wanted is None and size is not None and count is not None and count > size:
                raise IndexError(f"Predicate: fn reads a tensor with {size} of the {count} {what}: {self!r}")

    def _in_kernels(self, scope: ProgramScope) -> Mask:
        made = self._program()
        return self if made is None else made._in_kernels(scope)

    def _reads(self) -> Hashable:
        made = self._program(thoroughly=True)
        return None if made is None else (made,)

    def _program(self, thoroughly: bool = False) -> TracedMask | None:
        """The traced function, with its captured tensors as they are now. None: it cannot be traced.

        Args:
            thoroughly: whether contents are compared where the count of writes says that nothing changed.
        """
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return None
        try:
            program, tables = traced(self.fn, _LEAVES, name="Predicate: fn")
        except (NotTraceable, TypeError, ValueError):
            return None  # called as it is, it says itself what is wrong
        if any(of_vmap(table) for table in tables):
            return None
        held: HeldMask | None = self._remembered("traced", (0, 0))
        if held is not None and held.program is program and held.are(tables, thoroughly):
            return held.mask
        made = HeldMask(program, tables, self._made(program, tables))
        self._set(_memos={**self._memos, "traced": ((0, 0), None, made)})
        return made.mask

    @lasting
    def _made(self, program: Traced, tables: Sequence[Tensor]) -> TracedMask:
        known, uses = sizes_of(program, tables), program.depends[program.outputs[0]]
        sizes = [given or size for given, size in zip((self.batch, self.heads), known, strict=True)]
        for size, leaf, argument in zip(sizes, "bh", ("batch", "heads"), strict=True):
            if size is None and leaf in uses:
                raise ValueError(f"Predicate: fn uses {leaf}; say how many there are: Predicate(fn, {argument}=...)")
        return TracedMask(program, [kept(table) for table in tables], *(size or 1 for size in sizes))

    def _value(self) -> tuple[Hashable, ...]:
        return self.fn, self.batch, self.heads

    def __repr__(self) -> str:
        sizes = "".join(f", {n}={v}" for n, v in (("batch", self.batch), ("heads", self.heads)) if v is not None)
        return f"Predicate({getattr(self.fn, '__qualname__', repr(self.fn))}{sizes})"


class _Undeclared:
    """Stands for an argument that a predicate said it does not use; any use raises."""

    def __init__(self, name: str, size: str):
        self._message = f"Predicate: fn uses {name}; say how many there are: Predicate(fn, {size}=...)"

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ValueError(self._message)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __neg__ = __index__ = __bool__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __and__ = __rand__ = __or__ = __ror__ = _refuse
    __xor__ = __rxor__ = __getitem__ = __iter__ = __len__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in (*args, *(kwargs or {}).values()):
            for value in argument if isinstance(argument, tuple | list) else (argument,):
                if isinstance(value, cls):
                    value._refuse()
        raise ValueError("Predicate: fn uses an argument that was not declared")
