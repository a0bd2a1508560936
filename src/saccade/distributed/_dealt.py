"""Rows, or keys, of a sequence in blocks of which each has one owner.

Shape legend: n blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..operator._masks._intervals import Span
from ._blocks import Array
from ._spans import Spans


@dataclass(frozen=True, eq=False)
class DealtRows:
    """Attributes:
    length: number of rows.
    block: rows of a block (the last one may have fewer).
    owner: int (n,), the rank of each block.
    ranks: number of ranks; some may hold nothing.
    """

    length: int
    block: int
    owner: Array
    ranks: int

    @cached_property
    def held(self) -> tuple[Spans, ...]:
        """For each rank the spans of rows that it holds, ascending."""
        return tuple(self.spans(self.owner == rank) for rank in range(self.ranks))

    def joined(self, width: int) -> DealtRows:
        """The same rows where `width` neighbouring ranks count as one."""
        return replace(self, owner=self.owner // width, ranks=self.ranks // width)

    def spans(self, blocks: Array) -> Spans:
        """Rows of the chosen blocks, bool (n,), as spans that do not touch."""
        edges = np.flatnonzero(np.diff(np.concatenate(([False], blocks, [False])))) * self.block
        edges = np.minimum(edges, self.length).tolist()
        return tuple(zip(edges[::2], edges[1::2], strict=True))

    def blocks(self, span: Span) -> slice:
        """The blocks that a span touches."""
        return slice(span[0] // self.block, -(-span[1] // self.block))

    def hull(self, span: Span, blocks: Array) -> Span:
        """The part of a span from the first to the last of some of its blocks, which are numbered within the span."""
        first, last = int(blocks[0]) * self.block, (int(blocks[-1]) + 1) * self.block
        return span[0] + first, min(span[0] + last, span[1])
