"""Padding: keys that nobody may attend to, and queries that attend to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._data import OwnedTensor, Subset, bounded_table, describe, lasting, traced, zeros_and_ones
from ._intervals import Kind, Region, both
from ._mask import Mask, MaskProblem, common
from ._program import Opcode, ProgramScope, ProgramWriter

Kept = Sequence[int] | Sequence[Sequence[bool]] | Tensor


class PaddingSides(NamedTuple):
    """The rows that see a key, (B or 1, 1, Lq), None where all do; and the keys that some row sees, (B or 1, 1, Lk)."""

    rows: Tensor | None
    keys: Tensor


class Padding(Mask):
    """The real tokens of a padded batch: key j attends if item b keeps it, and query i likewise if `queries` is given.

    Padded keys are never attended to. Padded queries give empty rows: output 0, no gradient. Without `queries` the
    rows of padded queries are computed like any other. Rows and keys are counted from 0, whatever `.at` says.

    Args:
        keys: lengths (B,), integers: the first `lengths[b]` keys are kept. Or booleans (B, Lk), True = keep.
        queries: the same for the query rows, or None.

    Raises:
        TypeError: floats, uint8, or booleans that are not (B, L).
        ValueError: a negative length or another rank; when the mask is used, a length beyond L.

    Example:
        >>> import saccade
        >>> saccade.Padding([2, 3], queries=[1, 3]).picture(3, 3, item=0)
        Padding([2, 3], queries=[1, 3])
          0    2
        0 ████··
        1 ······
        2 ······
        3 queries down, 3 keys across, item 0 of 2; █ attends, · masked
    """

    fields = ("keys", "queries")

    keys: Subset
    queries: Subset | None
    positional = False

    def __init__(self, keys: Kept, queries: Kept | None = None):
        self._set(keys=kept(keys, "keys"), queries=None if queries is None else kept(queries, "queries"))
        self._own_batch_and_heads()

    def _own_batch_and_heads(self) -> tuple[int, int]:
        return common(self.keys.batch, 1 if self.queries is None else self.queries.batch, "batch items"), 1

    def tables(self) -> tuple[OwnedTensor, ...]:
        return (self.keys.table,) if self.queries is None else (self.keys.table, self.queries.table)

    def moved(self, device: torch.device | str) -> Mask:
        return self.replaced(
            keys=self.keys.to(device), queries=None if self.queries is None else self.queries.to(device)
        )

    def sides(self, Lq: int, Lk: int, device: torch.device) -> PaddingSides:
        """Which rows and keys take part, for lengths that fit."""
        # Every layer of a model asks the same. On an accelerator a remembered tensor would have to know of streams and
        # of graphs being captured; one made while a compiler or a dispatch mode looks on may not be a plain tensor, and
        # one made while a trace is recorded belongs to the trace.
        if device.type != "cpu" or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or traced():
            return self._marked_sides(Lq, Lk, device)
        known: PaddingSides | None = self._remembered("sides", (Lq, Lk))
        if known is None:
            known = self._marked_sides(Lq, Lk, device)
            self._remember("sides", (Lq, Lk), known)
        return known

    @lasting
    def _marked_sides(self, Lq: int, Lk: int, device: torch.device) -> PaddingSides:
        keys = self.keys.marks(Lk, device)
        rows = None if self.queries is None else self.queries.marks(Lq, device)
        if not self.keys.everywhere(Lk):
            some = keys.any(1, keepdim=True)
            rows = some.expand(-1, Lq) if rows is None else rows & some
        if self.queries is not None and not self.queries.everywhere(Lq):
            keys = keys & self.queries.marks(Lq, device).any(1, keepdim=True)
        keys = keys if Lq else torch.zeros_like(keys)
        return PaddingSides(None if rows is None else rows[:, None], keys[:, None])

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        real = self.keys.contains(b, key)
        return real if self.queries is None else real & self.queries.contains(b, row)

    def region_kind(self, region: Region) -> Kind:
        kind = self.keys.kind(region.keys, region.item)
        return kind if self.queries is None else both((kind, self.queries.kind(region.rows, region.item)))

    def fits(self, problem: MaskProblem) -> None:
        fits(self.keys, problem.keys, "keys", problem.exact)
        if self.queries is not None:
            fits(self.queries, problem.rows, "queries", problem.exact)

    @property
    def by_key(self) -> bool:
        return self.queries is None

    def write(self, program: ProgramWriter, scope: ProgramScope) -> None:
        rows = None if self.queries is None else self.queries.table
        program.write(Opcode.PADDING, program.table(self.keys.table), program.table(rows))

    def __repr__(self) -> str:
        return f"Padding({self.keys!r}{'' if self.queries is None else f', queries={self.queries!r}'})"


def kept(source: Any, name: str) -> Subset:
    """The tokens that `source`, lengths (B,) or booleans (B, L), keeps."""
    wanted = "lengths (B,) of integers or booleans (B, L)"
    if isinstance(source, int):
        raise TypeError(f"Padding: {name} must be {wanted}, got {describe(source)}")
    if isinstance(source, Tensor) and source.dim() == 2 and source.dtype != torch.bool and zeros_and_ones(source):
        raise TypeError(
            f"Padding: {name} must be {wanted}, got {describe(source)}: all its values are 0 and 1: write .bool()"
        )
    table = bounded_table(source, f"Padding: {name}", wanted, booleans=True)
    boolean = table.values.dtype == torch.bool
    if len(table.shape) != (2 if boolean else 1):
        raise ValueError(f"Padding: {name} must be {wanted}, got {describe(table.values)}")
    if not (boolean or torch.compiler.is_compiling()) and (table.host < 0).any():
        raise ValueError(f"Padding: {name} has a negative length, {int(table.host.min())}")
    return Subset(table)


def fits(subset: Subset, length: int, name: str, exact: bool) -> None:
    """ValueError unless the lengths stay within `length`, or the booleans are that many (at least, if not exact)."""
    if subset.size is None:
        if exact and not torch.compiler.is_compiling() and subset.extent[1] > length:
            raise ValueError(f"Padding: a length of {subset.extent[1]} {name} is beyond the {length} {name} there are")
    elif subset.size < length or (exact and subset.size > length):
        raise ValueError(f"Padding: booleans (B, L) for {subset.size} {name}, but there are {length} {name}")
