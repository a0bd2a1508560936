"""Which heads a rank computes, and the mask of some heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..operator._masks import Mask, PerHead
from ..operator._masks._intervals import Kind, Region, throughout

Heads = tuple[int, ...]


def deal_heads(
    heads: int, kv_heads: int, ranks: int, whole_groups: bool = False
) -> tuple[tuple[Heads, ...], tuple[Heads, ...]]:
    """The query heads of each rank, and the key heads that these read: of one rank each if there are enough, or by
    `whole_groups`."""
    group = heads // kv_heads
    step = group if whole_groups or kv_heads >= ranks else 1
    edges = [rank * (heads // step) // ranks * step for rank in range(ranks + 1)]
    queries = tuple(tuple(range(*edges[rank : rank + 2])) for rank in range(ranks))
    return queries, tuple(tuple(sorted({head // group for head in mine})) for mine in queries)


def of_heads(mask: Mask | None, heads: Heads) -> Mask | None:
    """The mask of some heads, which follow one another."""
    if mask is None or mask._batch_and_heads()[1] == 1:
        return mask
    if isinstance(mask, PerHead):
        return PerHead([mask.masks[head] for head in heads])
    return _SomeHeads(mask, heads[0], len(heads))


class _SomeHeads(Mask):
    """Heads `first`, ..., `first + count - 1` of a mask that differs by head."""

    fields = ("part", "first", "count")

    part: Mask
    first: int
    count: int

    def __init__(self, part: Mask, first: int, count: int) -> None:
        self._set(part=part, first=first, count=count)

    def _batch_and_heads(self) -> tuple[int, int]:
        return self.part._batch_and_heads()[0], self.count

    def placement(self) -> Any:
        return self.part.placement()

    def moved(self, device: torch.device | str) -> Mask:
        return _SomeHeads(self.part.to(device), self.first, self.count)

    def _device(self) -> torch.device | None:
        return self.part._device()

    def allows(self, b: Tensor, h: Tensor, row: Tensor, position: Tensor, key: Tensor) -> Tensor:
        return self.part.allows(b, h + self.first, row, position, key)

    def region_kind(self, region: Region) -> Kind:
        heads = range(self.count) if region.head is None else (region.head,)
        return throughout(self.part.region_kind(region._replace(head=head + self.first)) for head in heads)
