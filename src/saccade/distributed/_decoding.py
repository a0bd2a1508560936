"""Decoding against keys and values that are shared by several processes.

Each rank attends from the new tokens to the keys that it holds, and all ranks merge the outputs. One row for each head
and rank travels, however long the sequence is.

Shape legend: B batch, Hq / Hkv query and key-value heads, n rows of this rank, L new tokens, T tokens with these,
D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..operator._attention import merge
from ..operator._biases import Bias
from ..operator._call import CheckedCall, accumulator_of, share_of_keys, sink_lse, without_autocast
from ..operator._checks import check_inputs, make_call
from ..operator._masks import Mask, as_mask
from ..operator._masks._data import bounded
from ..operator._masks._intervals import Span
from ..operator.nn.cache import GrowingLayer
from ..operator.nn.cache.fitting import bias_in_order, in_order
from ..operator.nn.cache.layer import NewTokens
from ..operator.nn.cache.new_rows import NewRows
from . import _tiles
from ._attention import ShardedCall, agreed
from ._exchange import exchanged
from ._plan import SequencePlan, check_plan
from ._ring import EVERYTHING
from ._tiles import EMPTY, Pair, TileSettings


class ShardedCache:
    """The keys and values of one layer, of which each rank of a plan holds some. Every rank makes one.

    It begins with the rows of a prompt, as `attention` computed with them. `decode` adds tokens: to the rank with the
    fewest, until that one has taken `block` of them in a row. All items of the batch have as many tokens.

    Args:
        key: (B, Hkv, n, D), the rows that `plan.shard` gives this rank, turned by their positions.
        value: (B, Hkv, n, Dv).
        plan: of the prompt.
        block: how many tokens in a row a rank takes: a step computes with each run of tokens apart.

    Raises:
        TypeError, ValueError: tensors that are not the plan's shards; a block below 1.

    Example:
        >>> import torch, torch.distributed as dist, saccade
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> plan = saccade.distributed.plan(saccade.Causal(), 128)
        >>> cache = saccade.distributed.ShardedCache(*torch.randn(2, 1, 2, 128, 64), plan=plan)
        >>> query, (key, value) = torch.randn(1, 8, 1, 64), torch.randn(2, 1, 2, 1, 64)
        >>> saccade.distributed.decode(query, key, value, cache=cache).shape
        torch.Size([1, 8, 1, 64])
        >>> cache.length, cache.held  # of two ranks: (129, (65, 64))
        (129, (129,))
        >>> cache.rollback(1)
        >>> dist.destroy_process_group()
    """

    def __init__(self, key: Tensor, value: Tensor, *, plan: SequencePlan, block: int = 256) -> None:
        check_plan(plan)
        _, key, value = check_inputs(key, key, value)
        if key.shape[2] != plan.held(plan.rank):
            raise ValueError(f"key has {key.shape[2]} rows (axis 2), expected the {plan.held(plan.rank)} of plan.shard")
        self.plan, self.block = plan, bounded(block, "block", least=1)
        # Which rank holds which tokens, in order of positions; the first ones are the prompt's.
        self._runs = sorted((start, stop, rank) for rank, spans in enumerate(plan.rows) for start, stop in spans)
        self._prompt = len(self._runs)
        self._layer = GrowingLayer()
        with torch.no_grad():
            self._layer.append(key, value, None)

    @property
    def length(self) -> int:
        """Tokens that all ranks hold together."""
        return self._runs[-1][1] if self._runs else 0

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens that each rank holds."""
        ranks, sizes = [run[2] for run in self._runs], [stop - start for start, stop, _ in self._runs]
        return tuple(np.bincount(ranks, sizes, self.plan.ranks).astype(np.int64).tolist())

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values on this rank, unused slots included."""
        return self._layer.nbytes

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens. Every rank calls it.

        Raises:
            TypeError: not an int. ValueError: negative, or more than there are.
        """
        count, before = bounded(count, "rollback: count", least=0), self.held[self.plan.rank]
        if count > self.length:
            raise ValueError(f"rollback: expected at most the {self.length} tokens there are, got {count}")
        end = self.length - count
        self._runs = [(start, min(stop, end), rank) for start, stop, rank in self._runs if start < end]
        self._prompt = min(self._prompt, len(self._runs))
        self._layer.rollback(before - self.held[self.plan.rank])

    def reorder(self, items: Tensor) -> None:
        """Beam search: item b becomes a copy of item `items[b]`; as `saccade.nn.LayerCache.reorder`."""
        self._layer.reorder(items)

    def _take(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens to one rank, and return all keys and values of this rank."""
        held, end, count = self.held, self.length, key.shape[2]
        start, owner = end, held.index(min(held))
        if len(self._runs) > self._prompt and end - self._runs[-1][0] < self.block:
            start, _, owner = self._runs.pop()
        self._runs.append((start, end + count, owner))
        mine = count if owner == self.plan.rank else 0
        kept = self._layer.append(key[:, :, :mine], value[:, :, :mine], None)
        assert isinstance(kept.key, Tensor) and isinstance(kept.value, Tensor)
        return kept.key, kept.value

    def _own(self) -> Iterator[tuple[Span, Span]]:
        """Spans of this rank's tokens, and where they are in its tensors."""
        done = 0
        for start, stop, rank in self._runs:
            if rank == self.plan.rank:
                yield (start, stop), (done, done + stop - start)
                done += stop - start


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    cache: ShardedCache,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Add new tokens to a cache, and attend from them to all that it holds. Every rank of its plan calls it.

    Equal to `saccade.attention` of these queries with the whole cache, up to rounding, and the same bit for bit on all
    ranks. No graph is recorded.

    Args:
        query: (B, Hq, L, D) of the new tokens, the same on every rank.
        key, value: (B, Hkv, L, D) and (B, Hkv, L, Dv) of these tokens, the same on every rank, which adds them to one.
        mask, bias: of the whole sequence, in positions, as in `saccade.nn.LayerCache.append`. None: everything seen so
            far, no bias.
        scale, softcap, sink: as in `saccade.attention`.

    Returns:
        (B, Hq, L, Dv) in the input dtype, on every rank.

    Raises:
        TypeError, ValueError: as `saccade.attention` and `saccade.nn.LayerCache.append`; no new token; arguments that
            are not the same on all ranks (masks and values are not compared). Every rank raises, and nothing is added.
        RankFailed: a rank has ended, hangs, or raised an error.

    Example:
        >>> import torch, torch.distributed as dist, saccade
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> prompt, new = torch.randn(2, 1, 2, 16, 8), torch.randn(3, 1, 2, 1, 8)
        >>> plan = saccade.distributed.plan(saccade.Causal(), 16)
        >>> cache = saccade.distributed.ShardedCache(*(plan.shard(x) for x in prompt), plan=plan)
        >>> out = saccade.distributed.decode(*new, saccade.Window(7, 0), cache=cache)
        >>> key, value = torch.cat([prompt, new[1:]], 3)
        >>> torch.allclose(out, saccade.attention(new[0], key, value, saccade.Window(7, 0)), atol=1e-6)
        True
        >>> dist.destroy_process_group()
    """
    scoring = {"bias": bias, "scale": scale, "softcap": softcap, "sink": sink}
    return decode_with_lse(query, key, value, mask, cache, scoring, {})[0]


def decode_with_lse(
    query: Any, key: Any, value: Any, mask: Any, cache: Any, scoring: dict[str, Any], facts: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """As `decode`, with lse (B, Hq, L) as of `saccade.attention_with_lse`; ranks compare `facts`, too."""
    if not isinstance(cache, ShardedCache):
        raise TypeError(f"cache must be a ShardedCache, got {type(cache).__name__}")
    call, problem, plan = None, None, cache.plan
    with torch.no_grad():
        try:
            call = _checked(query, key, value, mask, cache, **scoring)
            facts = facts | {"new tokens": key.shape[2]}
        except (TypeError, ValueError) as error:
            problem = error
        agreed(plan, call, problem, 0.0, "decode", facts | {"tokens": cache.length})
        assert call is not None
        whole, (query, key, value) = call.whole, call.tensors
        with without_autocast(query.device):
            parts = list(_parts(whole, cache, query, *cache._take(key, value)))
            out, lse = _merged(plan, merge(parts))
            every = sink_lse(lse, whole.sink)
            out = out * share_of_keys(lse, every)[..., None]
            return out.to(query.dtype), every.to(accumulator_of(query))


def _checked(
    query: Any, key: Any, value: Any, mask: Any, cache: ShardedCache, bias: Any = None, **scoring: Any
) -> ShardedCall:
    query, key, value = check_inputs(query, key, value)
    count, before = query.shape[2], np.array([cache.length])
    if count == 0 or key.shape[2] != count:
        raise ValueError(f"query and key have {count} and {key.shape[2]} rows (axis 2), expected those of new tokens")
    cache._layer._arriving(NewTokens(key, value, None, None, None))
    arriving, length = NewRows.of(None, count), cache.length + count
    fitted = in_order(as_mask(mask), before, arriving, length, query.shape[0])
    given = None if bias is None else bias_in_order(bias, before, arriving, length)
    wholes = [query.new_empty(()).expand(*x.shape[:2], length, x.shape[3]) for x in (key, value)]
    whole = make_call(query, wholes[0], wholes[1], fitted, bias=given, needs_lse=True, **scoring)
    return ShardedCall(whole, (query, key, value), whole.bias, False)


def _parts(whole: CheckedCall, cache: ShardedCache, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Pair]:
    """Attention to each span of this rank's keys, in float64; at first to none."""
    out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    yield out, out.new_full(out.shape[:3], EMPTY)
    bias, parameter = (None, None) if whole.bias is None else (whole.bias._form(), whole.bias.parameter)
    settings = TileSettings(cache.plan, None, bias, whole.scale, whole.softcap, None, False)
    rows, lengths = (0, whole.length_q), (whole.length_q, whole.length_k)
    for keys, (start, stop) in cache._own():
        kind = "full" if whole.mask is None else whole.mask.kind(rows, keys, *lengths)
        if kind == "empty":
            continue
        scores = None if parameter is None else settings.scores_of(parameter, rows, keys)
        call = settings.call(rows, keys, query, key[:, :, start:stop], value[:, :, start:stop], scores)
        if kind == "partial" or bias is not None:
            mask = EVERYTHING if whole.mask is None else whole.mask
            call = replace(call, mask=mask.slice(rows, keys, lengths=lengths))
        out, lse = _tiles.forward(call)
        yield out.double(), lse


def _merged(plan: SequencePlan, own: Pair) -> Pair:
    """The parts of all ranks together, in the order of ranks, so that every rank gets the same."""
    packed = torch.cat((own[0], own[1][..., None]), 3)
    others = [rank for rank in range(plan.ranks) if rank != plan.rank]
    into = [(rank, torch.empty_like(packed)) for rank in others]
    every = exchanged(plan.group, [(rank, packed) for rank in others], into, "decode")
    every.insert(plan.rank, packed)
    return merge([(part[..., :-1], part[..., -1]) for part in every])
