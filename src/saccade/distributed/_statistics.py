"""Statistics and weights of a call on shards: heads are dealt as under "ulysses", and every rank gets all results.

A rank then has whole rows of its heads, so that what the operator computes is exact, and needs no second formula.

Shape legend: B batch, Hq / Hkv query and key-value heads, n rows of this rank, L rows of all, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..operator._biases import Bias
from ..operator._call import CheckedCall, without_autocast
from ..operator._statistics import Statistics, _compute
from ..operator._statistics._request import StatisticsRequest, make_request
from ..operator._statistics._visibility import RowVisibility, _first, _hides, row_visibility
from ..operator._unknown_arguments import advised
from ..operator._weights import Chosen, _indices, _slice
from ._attention import ShardedCall, agreed, checked
from ._exchange import exchanged
from ._faults import answered
from ._heads import Heads, deal_heads
from ._plan import SequencePlan, check_plan
from ._ulysses import Swap, call_of_heads


@advised
def statistics(
    query: Tensor,
    key: Tensor,
    *,
    plan: SequencePlan,
    value: Tensor | None = None,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    groups: Mapping[str, Tensor] | None = None,
    received: bool = True,
    top: int = 0,
    histograms: Collection[str] | bool | None = None,
) -> Statistics:
    """`saccade.statistics` of a whole sequence, of which each rank has its rows. Every rank of the plan calls it.

    Each rank computes some heads of all rows, under every layout. Results have no graph.

    Args:
        query: (B, Hq, n, D), the rows that `plan.shard` gives this rank. key: (B, Hkv, m, D). value: (B, Hkv, m, Dv).
        plan: of `saccade.distributed.plan`; it holds the mask.
        bias, scale, softcap, sink, groups, received, top, histograms: as in `saccade.statistics`, of the whole
            sequence.

    Returns:
        The statistics of the whole sequence, on every rank.

    Raises:
        TypeError, ValueError, RuntimeError: as `saccade.statistics` and `saccade.distributed.attention`.

    Example:
        >>> import torch, torch.distributed as dist, saccade
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> plan = saccade.distributed.plan(saccade.Causal(), 4)
        >>> query = key = plan.shard(torch.zeros(1, 2, 4, 16))
        >>> saccade.distributed.statistics(query, key, plan=plan).entropy[0, 0]  # log 1 ... log 4
        tensor([0.0000, 0.6931, 1.0986, 1.3863])
        >>> dist.destroy_process_group()
    """
    scoring = {"scale": scale, "softcap": softcap, "sink": sink}
    tensors = query, key, value

    def read(whole: CheckedCall) -> tuple[Any, ...]:
        request = make_request(whole, groups, received, top, histograms)
        return request, request.groups, request.received, request.top, sorted(request.histograms)

    with torch.no_grad():
        call, (request, *_) = _agreed("statistics", tensors, plan, bias, scoring, read)
        with without_autocast(call.whole.device):
            return _of_all_heads(plan, call, value is not None, request)


@advised
def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    plan: SequencePlan,
    rows: Chosen = None,
    keys: Chosen = None,
    heads: Chosen = None,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """`saccade.attention_weights` of a whole sequence, of which each rank has its rows. Every rank calls it.

    Each rank computes some heads, under every layout. Results have no graph.

    Args:
        query: (B, Hq, n, D), the rows that `plan.shard` gives this rank. key: (B, Hkv, m, D).
        plan: of `saccade.distributed.plan`; it holds the mask.
        rows, keys, heads: which of the whole sequence, as in `saccade.attention_weights`; the same on each rank.
        bias, scale, softcap, sink: as in `saccade.attention_weights`, of the whole sequence.

    Returns:
        (B, heads, rows, keys) on every rank, float32 (float64 for float64).

    Raises:
        IndexError, TypeError, ValueError, RuntimeError: as `saccade.attention_weights` and
            `saccade.distributed.attention`.

    Example:
        >>> import torch, torch.distributed as dist, saccade
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> plan = saccade.distributed.plan(saccade.Causal(), 4)
        >>> query = key = plan.shard(torch.zeros(1, 2, 4, 16))
        >>> saccade.distributed.attention_weights(query, key, plan=plan, rows=[1, 3], heads=0)
        tensor([[[[0.5000, 0.5000, 0.0000, 0.0000],
                  [0.2500, 0.2500, 0.2500, 0.2500]]]])
        >>> dist.destroy_process_group()
    """
    scoring = {"scale": scale, "softcap": softcap, "sink": sink}

    def read(whole: CheckedCall) -> tuple[Any, ...]:
        some = _indices(heads, whole.heads, "heads")
        every = list(range(whole.heads)) if some is None else some
        return None, _indices(rows, plan.length, "rows"), _indices(keys, plan.key_length, "keys"), every

    with torch.no_grad():
        call, (_, at_rows, at_keys, at_heads) = _agreed(
            "attention_weights", (query, key, None), plan, bias, scoring, read
        )
        dealt = deal_heads(call.whole.heads, call.whole.kv_heads, plan.ranks)
        own = _own_heads(plan, call, False, *dealt)
        chosen = [[head for head in mine if head in at_heads] for mine in dealt[0]]
        wholes = (at_rows, plan.length), (at_keys, plan.key_length)
        counts = [length if some is None else len(some) for some, length in wholes]
        every = call.whole.query.new_empty(query.shape[0], 0, *counts, dtype=call.whole.accumulator)
        if own is not None and chosen[plan.rank]:
            local = [head - dealt[0][plan.rank][0] for head in chosen[plan.rank]]
            every = _slice(own, at_rows, at_keys, local).contiguous()
        others = [rank for rank in range(plan.ranks) if rank != plan.rank]
        sends = [(rank, every) for rank in others]
        into = [(rank, every.new_empty(every.shape[0], len(chosen[rank]), *counts)) for rank in others]
        parts = exchanged(plan.group, sends, into, "attention_weights")
        parts.insert(plan.rank, every)
        order = [head for some in chosen for head in some]
        return torch.cat(parts, 1)[:, [order.index(head) for head in at_heads]]


def _agreed(
    operation: str,
    tensors: tuple[Any, Any, Any],
    plan: SequencePlan,
    bias: Any,
    scoring: dict[str, Any],
    read: Callable[[CheckedCall], tuple[Any, ...]],
) -> tuple[ShardedCall, Any]:
    """The checked call, and what `read` makes of the other arguments: all but its first value must be the same on all
    ranks. All ranks raise if one does."""
    check_plan(plan, cross=True)
    call, found, problem = None, None, None
    query, key, value = tensors
    if value is None and isinstance(key, Tensor) and key.dim() == 4:
        value = _without_memory(key)
    try:
        call = checked(query, key, value, plan, bias, scoring, whole_bias=True)
        found = read(call.whole)
    except (TypeError, ValueError, IndexError) as error:
        problem = error
    agreed(plan, call, problem, 0.0, operation, {} if found is None else {"arguments": found[1:]})
    assert call is not None
    return call, found


def _without_memory(key: Tensor) -> Tensor:
    """A value of width 1."""
    return key.new_zeros(()).expand(*key.shape[:3], 1)


def _own_heads(
    plan: SequencePlan, call: ShardedCall, has_value: bool, queries: tuple[Heads, ...], keys: tuple[Heads, ...]
) -> CheckedCall | None:
    """The call of this rank's heads over the whole sequence; None if it has none."""
    given, group = call.tensors if has_value else call.tensors[:2], plan._head_group(plan.ranks)
    dealt = (queries, group.places), *[(keys, group.key_places)] * (len(given) - 1)
    query, key, *value = Swap.apply(group, dealt, True, *given)
    if not queries[plan.rank]:
        return None
    tensors = query, key, value[0] if has_value else _without_memory(key)
    return call_of_heads(call.whole, tensors, queries[plan.rank], keys[plan.rank])


# --- statistics ---------------------------------------------------------------------------------------------------


def _of_all_heads(plan: SequencePlan, call: ShardedCall, has_value: bool, request: StatisticsRequest) -> Statistics:
    whole = call.whole
    # Where heads see different keys, a key counts if any head of its group sees it, and the first one is of all heads.
    differ = _hides(whole) or (whole.mask is not None and whole.mask._batch_and_heads()[1] > 1)
    queries, keys = deal_heads(whole.heads, whole.kv_heads, plan.ranks, whole_groups=differ)
    own, part = _own_heads(plan, call, has_value, queries, keys), None
    sight = None if own is None else row_visibility(own)
    if differ:
        some = [
            shown
            for shown in _gathered(plan, None if sight is None else _shown(sight, plan), whole)
            if shown is not None
        ]
        first = _first(torch.stack(torch.broadcast_tensors(*some), 1), whole.device)
        sight = None if sight is None else sight._replace(first=first)
    if own is not None and sight is not None:
        made = _compute._statistics(own, request, _compute.choose(own, request, "auto"), has_value, sight)
        part = _renumbered(made, queries[plan.rank], keys[plan.rank], whole.heads // whole.kv_heads)
    return _joined([part for part in _gathered(plan, part, whole) if part is not None], keys, differ)


def _shown(sight: RowVisibility, plan: SequencePlan) -> Tensor:
    """bool (B|1, Lk), keys that some head's row sees."""
    return sight.first.new_ones(1, plan.key_length).bool() if sight.keys is None else sight.keys.any(1)


def _gathered(plan: SequencePlan, value: Any, whole: CheckedCall) -> list[Any]:
    """The values of all ranks: tensors, statistics or None."""
    every: list[Any] = [None] * plan.ranks
    own = None if value is None else value.to("cpu")
    with answered(plan.group, "statistics"):
        dist.all_gather_object(every, own, plan.group)
    return [None if one is None else one.to(whole.device) for one in every]


def _renumbered(part: Statistics, mine: Heads, keys: Heads, group: int) -> Statistics:
    """The statistics with each key head once, and heads named by their numbers in the whole call."""
    repeated = [head // group for head in mine]
    heads = {}
    for what, numbers in part.heads.items():
        names = list(mine)
        if what in ("key", "value"):
            names = list(keys)
            if len(numbers["min"]) > len(names):
                chosen = [repeated.index(head) for head in names]
                numbers = {name: x[chosen] for name, x in numbers.items()}
        place = numbers["nonfinite_at"].clone()
        place[:, 1] = torch.where(place[:, 1] < 0, -1, torch.tensor(names, device=place.device))
        heads[what] = {**numbers, "nonfinite_at": place}
    return replace(part, heads=heads)


def _joined(parts: list[Statistics], keys: tuple[Heads, ...], differ: bool) -> Statistics:
    """The statistics of all heads; of a key head those of the first rank that has it."""
    first, held = parts[0], [heads for heads in keys if heads]
    rows = ("lse", "entropy", "largest", "largest_at", "distance", "counted", "top_weights", "top_keys")
    made: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts], 1) for name in rows}
    made["mass"] = {name: torch.cat([part.mass[name] for part in parts], 1) for name in first.mass}
    if first.received is not None:
        made["received"] = torch.cat([part.received for part in parts if part.received is not None], 1)
    if differ:
        made["keys_seen"] = torch.cat([part.keys_seen.expand(part.counted.shape) for part in parts], 1)
    known = [(n, at, head) for n, heads in enumerate(held) for at, head in enumerate(heads)]
    new = [(n, at) for place, (n, at, head) in enumerate(known) if head not in [other for *_, other in known[:place]]]
    made["heads"] = {
        what: {
            name: torch.stack([parts[n].heads[what][name][at] for n, at in new])
            if what in ("key", "value")
            else torch.cat([part.heads[what][name] for part in parts])
            for name in numbers
        }
        for what, numbers in first.heads.items()
    }
    items, _, *lengths = first.shape
    return replace(first, **made, shape=(items, made["lse"].shape[1], *lengths))
