"""Attention with the heads dealt to ranks instead of the rows (Jacobs et al. 2023, "DeepSpeed Ulysses").

Rows of all heads become all rows of some heads by one exchange, the operator computes these, and a second exchange
brings their rows back. Query heads are dealt with their key heads if there are enough of these. Otherwise a key head
goes to every rank that has a query head of it, and is repeated there.

Shape legend: B batch, Hq / Hkv query and key-value heads, n rows of this rank, L rows of all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..operator._attention import run as run_call
from ..operator._call import CheckedCall, accumulator_of
from ..operator._checks import make_call
from ..operator._masks import Mask, PerHead
from ..operator._masks._intervals import Kind, Region, throughout
from ._exchange import exchanged
from ._plan import SequencePlan

Heads = tuple[int, ...]


def run(plan: SequencePlan, tensors: tuple[Tensor, Tensor, Tensor], whole: CheckedCall) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows."""
    query, key, value = tensors
    queries, keys = deal_heads(query.shape[1], key.shape[1], plan.ranks)
    query, key, value = _Swap.apply(plan, (queries, keys, keys), True, query, key, value)
    mine = queries[plan.rank]
    if mine:
        out, lse = _computed(query, key, value, mine, keys[plan.rank], whole)
    else:
        learned = [x.reshape(-1)[:0] for x in whole.tensors()[3:]]
        out = query.new_zeros(*query.shape[:3], value.shape[3]) + sum(x.sum() for x in (query, key, value, *learned))
        lse = out.sum(-1, dtype=accumulator_of(query))
    out, lse = _Swap.apply(plan, (queries, queries), False, out, lse[..., None])
    return out, lse[..., 0]


def _computed(
    query: Tensor, key: Tensor, value: Tensor, mine: Heads, keys: Heads, whole: CheckedCall
) -> tuple[Tensor, Tensor]:
    """The operator's answer for query heads `mine`; `key` and `value` have the heads `keys`."""
    group = whole.heads // whole.kv_heads
    wanted = [head // group for head in mine]
    if wanted != [head for head in keys for _ in range(group)]:  # heads of a group that several ranks share
        order = torch.tensor([keys.index(head) for head in wanted], device=key.device)
        key, value = key.index_select(1, order), value.index_select(1, order)
    call = make_call(
        query,
        key,
        value,
        _of_heads(whole.mask, mine),
        bias=None if whole.bias is None else whole.bias._of_heads(mine),
        scale=whole.scale,
        softcap=whole.softcap,
        sink=None if whole.sink is None else whole.sink[list(mine)],
        needs_lse=True,
    )
    return run_call(call, "auto", "saccade.distributed.attention")


def deal_heads(heads: int, kv_heads: int, ranks: int) -> tuple[tuple[Heads, ...], tuple[Heads, ...]]:
    """The query heads of each rank, and the key heads that these read."""
    group = heads // kv_heads
    step = group if kv_heads >= ranks else 1
    edges = [rank * (heads // step) // ranks * step for rank in range(ranks + 1)]
    queries = tuple(tuple(range(*edges[rank : rank + 2])) for rank in range(ranks))
    return queries, tuple(tuple(sorted({head // group for head in mine})) for mine in queries)


class _Swap(torch.autograd.Function):
    """Tensors (B, H, n, W), this rank's rows of all heads, to (B, h, L, W), all rows of its heads; or back."""

    @staticmethod
    def forward(
        ctx: Any, plan: SequencePlan, heads: tuple[tuple[Heads, ...], ...], to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.plan, ctx.heads, ctx.to_heads, ctx.counts = plan, heads, to_heads, [x.shape[1] for x in tensors]
        ctx.set_materialize_grads(True)
        swap = _to_heads if to_heads else _to_rows
        return tuple(swap(plan, heads, tensors, "attention, ulysses", [0] * len(tensors)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        swap = _to_rows if ctx.to_heads else _to_heads
        return None, None, None, *swap(ctx.plan, ctx.heads, cotangents, "attention, ulysses, backward", ctx.counts)


def _to_heads(
    plan: SequencePlan, heads: tuple[tuple[Heads, ...], ...], tensors: Any, operation: str, _: list[int]
) -> list[Tensor]:
    ranks = range(plan.ranks)
    sends = [(to, x[:, list(of[to])].contiguous()) for to in ranks for x, of in zip(tensors, heads, strict=True)]
    into = [
        (rank, x.new_empty(x.shape[0], len(of[plan.rank]), plan.held(rank), x.shape[3]))
        for rank in ranks
        for x, of in zip(tensors, heads, strict=True)
    ]
    received = _swapped(plan, sends, into, operation)
    wholes = [
        x.new_empty(x.shape[0], len(of[plan.rank]), plan.length, x.shape[3])
        for x, of in zip(tensors, heads, strict=True)
    ]
    for rank in ranks:
        for n, whole in enumerate(wholes):
            done = 0
            for start, stop in plan.rows[rank]:
                whole[:, :, start:stop] = received[rank * len(wholes) + n][:, :, done : done + stop - start]
                done += stop - start
    return wholes


def _to_rows(
    plan: SequencePlan, heads: tuple[tuple[Heads, ...], ...], tensors: Any, operation: str, counts: list[int]
) -> list[Tensor]:
    """The way back. Heads that several ranks have are added up, in the order of ranks."""
    ranks, own = range(plan.ranks), plan.held(plan.rank)
    sends = [(to, plan.cut(x, 2, plan.rows[to]).contiguous()) for to in ranks for x in tensors]
    into = [
        (rank, x.new_empty(x.shape[0], len(of[rank]), own, x.shape[3]))
        for rank in ranks
        for x, of in zip(tensors, heads, strict=True)
    ]
    received = _swapped(plan, sends, into, operation)
    found = []
    for n, (x, of) in enumerate(zip(tensors, heads, strict=True)):
        count = max((head for held in of for head in held), default=-1) + 1
        total = x.new_zeros(x.shape[0], max(count, counts[n]), own, x.shape[3])
        for rank in ranks:
            total[:, list(of[rank])] += received[rank * len(tensors) + n]
        found.append(total)
    return found


def _swapped(plan: SequencePlan, sends: Any, into: Any, operation: str) -> list[Tensor]:
    """The received tensors, in the order of `into`; those of a rank for itself are not sent."""
    own = iter([x for to, x in sends if to == plan.rank])
    others = [message for message in into if message[0] != plan.rank]
    received = iter(exchanged(plan.group, [message for message in sends if message[0] != plan.rank], others, operation))
    return [next(own) if rank == plan.rank else next(received) for rank, _ in into]


def _of_heads(mask: Mask | None, heads: Heads) -> Mask | None:
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
