"""Attention with the heads dealt to ranks instead of the rows (Jacobs et al. 2023, "DeepSpeed Ulysses").

Rows of all heads become all rows of some heads by one exchange, the operator computes these, and a second exchange
brings their rows back. Query heads are dealt with their key heads if there are enough of these. Otherwise a key head
goes to every rank that has a query head of it, and is repeated there.

In a grid, each of its rows exchanges heads like that (Fang and Zhao 2024, "USP"). A rank then has some heads of what
all ranks in its row of the grid hold, and computes them by ring with the ranks of its column.

Shape legend: B batch, Hq / Hkv query and key-value heads, n rows of this rank, m rows of all ranks that exchange.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..operator._attention import run as run_call
from ..operator._call import CheckedCall, accumulator_of
from ..operator._dropout import HeadsDropout
from . import _ring
from ._exchange import exchanged
from ._heads import Heads, deal_heads, of_heads
from ._plan import HeadGroup, SequencePlan
from ._spans import Spans, cut, put, size

Dealt = tuple[tuple[Heads, ...], tuple[Spans, ...]]  # heads of each rank, and its rows among those of all


def run(plan: SequencePlan, tensors: tuple[Tensor, Tensor, Tensor], whole: CheckedCall) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows."""
    query, key, value = tensors
    group = plan._head_group(plan.grid[0])
    queries, keys = deal_heads(query.shape[1], key.shape[1], plan.grid[0])
    dealt: tuple[Dealt, ...] = (queries, group.places), (keys, group.key_places), (keys, group.key_places)
    query, key, value = Swap.apply(group, dealt, True, query, key, value)
    mine = queries[group.number]
    if mine:
        column = plan.column(mine)
        mask = column.mask if whole.mask is plan.mask else None
        call = call_of_heads(whole, (query, key, value), mine, keys[group.number], mask)
        if column.ranks == 1:
            out, lse = run_call(call, "auto", "saccade.distributed.attention")
        else:
            out, lse = _ring.run(column, call)
    else:
        learned = [x.reshape(-1)[:0] for x in whole.tensors()[3:]]
        out = query.new_zeros(*query.shape[:3], value.shape[3]) + sum(x.sum() for x in (query, key, value, *learned))
        lse = out.sum(-1, dtype=accumulator_of(query))
    dealt = (queries, group.places), (queries, group.places)
    out, lse = Swap.apply(group, dealt, False, out, lse[..., None])
    return out, lse[..., 0]


def call_of_heads(
    whole: CheckedCall, tensors: tuple[Tensor, Tensor, Tensor], mine: Heads, keys: Heads, mask: Any = None
) -> CheckedCall:
    """The part of a call with the query heads `mine`; key and value of `tensors` have the heads `keys`.

    Args:
        mask: of these heads, where it is made already.
    """
    query, key, value = tensors
    group = whole.heads // whole.kv_heads
    wanted = [head // group for head in mine]
    if wanted != [head for head in keys for _ in range(group)]:  # heads of a group that several ranks share
        order = torch.tensor([keys.index(head) for head in wanted], device=key.device)
        key, value = key.index_select(1, order), value.index_select(1, order)
    drawn = whole.dropout
    return replace(
        whole,
        query=query,
        key=key,
        value=value,
        mask=of_heads(whole.mask, mine) if mask is None else mask,
        bias=None if whole.bias is None else whole.bias._of_heads(mine),
        sink=None if whole.sink is None else whole.sink[list(mine)],
        dropout=None if drawn is None else HeadsDropout(drawn.p, drawn.seed, mine[0]),
        needs_lse=True,
    )


class Swap(torch.autograd.Function):
    """Tensors (B, H, n, W), this rank's rows of all heads, to (B, h, m, W), all rows of its heads; or back.

    `dealt` has the heads of each rank of the group, and the places of its rows among all, for each tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, group: HeadGroup, dealt: tuple[Dealt, ...], to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.dealt, ctx.to_heads = group, dealt, to_heads
        ctx.set_materialize_grads(True)
        swap = _to_heads if to_heads else _to_rows
        return tuple(swap(group, dealt, tensors, "attention, ulysses"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        swap = _to_rows if ctx.to_heads else _to_heads
        return None, None, None, *swap(ctx.group, ctx.dealt, cotangents, "attention, ulysses, backward")


def _to_heads(group: HeadGroup, dealt: tuple[Dealt, ...], tensors: Any, operation: str) -> list[Tensor]:
    ranks, me = range(len(group.places)), group.number
    sends = [(to, _heads_of(x, heads[to])) for to in ranks for x, (heads, _) in zip(tensors, dealt, strict=True)]
    into = [
        (rank, x.new_empty(x.shape[0], len(heads[me]), size(places[rank]), x.shape[3]))
        for rank in ranks
        for x, (heads, places) in zip(tensors, dealt, strict=True)
    ]
    received = _swapped(group, sends, into, operation)
    wholes = [
        x.new_empty(x.shape[0], len(heads[me]), sum(map(size, places)), x.shape[3])
        for x, (heads, places) in zip(tensors, dealt, strict=True)
    ]
    for rank in ranks:
        for n, (whole, (_, spans)) in enumerate(zip(wholes, dealt, strict=True)):
            put(whole, 2, spans[rank], received[rank * len(wholes) + n])
    return wholes


def _to_rows(group: HeadGroup, dealt: tuple[Dealt, ...], tensors: Any, operation: str) -> list[Tensor]:
    """The way back. Heads that several ranks have are added up, in the order of ranks."""
    ranks, me = range(len(group.places)), group.number
    sends = [(to, cut(x, 2, places[to])) for to in ranks for x, (_, places) in zip(tensors, dealt, strict=True)]
    totals = [
        x.new_empty(x.shape[0], max(mine[-1] + 1 for mine in heads if mine), size(places[me]), x.shape[3])
        for x, (heads, places) in zip(tensors, dealt, strict=True)
    ]
    into = [
        (rank, x.new_empty(x.shape[0], len(heads[rank]), size(places[me]), x.shape[3]))
        for rank in ranks
        for x, (heads, places) in zip(tensors, dealt, strict=True)
    ]
    received = _swapped(group, sends, into, operation)
    for n, (total, (heads, _)) in enumerate(zip(totals, dealt, strict=True)):
        written = 0  # heads
        for mine, part in zip(heads, received[n :: len(totals)], strict=True):
            if mine:
                shared = written - mine[0]
                total[:, mine[0] : written] += part[:, :shared]
                total[:, written : mine[-1] + 1] = part[:, shared:]
                written = mine[-1] + 1
    return totals


def _heads_of(x: Tensor, heads: Heads) -> Tensor:
    """A view of some heads, which follow one another."""
    return x.narrow(1, heads[0] if heads else 0, len(heads))


def _swapped(group: HeadGroup, sends: Any, into: Any, operation: str) -> list[Tensor]:
    """The received tensors, in the order of `into`; those of a rank for itself are not sent."""
    own = iter([x for to, x in sends if to == group.number])
    leaving = [(group.peers[rank], x.contiguous()) for rank, x in sends if rank != group.number]
    arriving = [(group.peers[rank], x) for rank, x in into if rank != group.number]
    received = iter(exchanged(group.process_group, leaving, arriving, operation))
    return [next(own) if rank == group.number else next(received) for rank, _ in into]
