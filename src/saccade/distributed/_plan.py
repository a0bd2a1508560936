"""The plan: which rank holds which rows of a sequence, what travels between ranks, and shards of tensors."""

from __future__ import annotations

import copy
import hashlib
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..operator._masks import Mask, as_mask
from ..operator._masks._algebra import And
from ..operator._masks._data import bounded
from ..operator._masks._intervals import Span
from ._blocks import BlockTable, block_size, survey
from ._costs import CallSizes, Grid, because, cheapest, layouts_of
from ._dealing import imbalance, in_grid, needed, received
from ._dealt import DealtRows
from ._exchange import Message, agree, agree_quickly, exchanged
from ._faults import answered, report_uncaught
from ._heads import Heads, of_heads
from ._prediction import predicted
from ._spans import Spans, cut, put, size, within
from ._speed import speed_of

_NARROWER = 16  # masks of layers whose plans are remembered
LAYOUTS = ("auto", "ring", "gathered", "ulysses")


def plan(
    mask: Mask | Tensor | None,
    length: int,
    group: Any = None,
    layout: str | tuple[int, int] = "auto",
    *,
    sizes: CallSizes | None = None,
) -> SequencePlan:
    """Deal the rows of a sequence to the ranks of a process group. Every rank calls it, with the same arguments.

    Rows are dealt in blocks, so that ranks compute equally many visible pairs and hold about equally many rows. Keys
    are held where their rows are.

    Args:
        mask: who sees whom in the whole sequence, as in `saccade.attention`; it may differ by item and head.
        length: rows of the whole sequence, as many as keys. Padding is part of the mask.
        group: a process group of torch.distributed; None: all ranks.
        layout: "ring": each step computes with one part of the keys while the next part arrives. "gathered": all keys
            that a rank needs arrive before it computes, and are held. "ulysses": each rank computes some heads of all
            rows. (h, s), with h * s ranks: h neighbouring ranks share the heads of their rows, and s such head groups
            form a ring. "auto": the fastest as predicted, with its backward pass; without `sizes` it compares ring and
            gathered, with `sizes` all. The first such plan of a group measures for 1 to 2 seconds how fast its ranks
            compute and exchange messages.
        sizes: of the calls' tensors, for "auto".

    Raises:
        RankFailed: a rank has ended, hangs, or raised an error. From the first plan on, uncaught exceptions of a rank
            are reported to the others (`sys.excepthook`).
        RuntimeError: torch.distributed has no process group.
        TypeError, ValueError: an argument is wrong, or not the same on all ranks; every rank raises it.

    Example:
        >>> import torch, torch.distributed as dist, saccade
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> plan = saccade.distributed.plan(saccade.Causal(), 128)
        >>> plan.rows  # of two ranks: (((0, 32), (96, 128)), ((32, 96),))
        (((0, 128),),)
        >>> dist.destroy_process_group()
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "saccade.distributed.plan: there is no process group: call torch.distributed.init_process_group() first, "
            "in each process that torchrun starts"
        )
    if dist.get_rank(group) < 0:
        raise ValueError("plan: this process is no rank of the group: only the group's ranks call plan")
    report_uncaught()
    table, problem = None, None
    try:
        layout = _checked_layout(layout, dist.get_world_size(group))
        if not isinstance(sizes, CallSizes | None):
            raise TypeError(f"plan: sizes must be a CallSizes or None, got {sizes!r} ({type(sizes).__name__})")
        if sizes is not None and layout != "auto":
            raise ValueError(f"plan: sizes are read with layout='auto' only, got layout={layout!r}")
        length, mask = bounded(length, "plan: length", least=1), as_mask(mask)
        table = survey(mask, length, block_size(length, dist.get_world_size(group)))
    except (TypeError, ValueError) as error:
        problem = error
    facts = {
        "length": length,
        "layout": layout,
        "sizes": str(sizes),
        "error": None if problem is None else str(problem),
        "mask": "" if table is None else table.digest,
    }
    agree(group, {**facts, "_mask": _shortened(mask)}, "plan")
    if problem is not None:
        raise problem
    assert table is not None and not isinstance(mask, Tensor)
    reason = "named by the caller"
    if layout == "auto":
        layout, reason = _chosen(table, group, sizes)
    return SequencePlan(mask, table, group, layout, reason)


def _chosen(table: BlockTable, group: Any, sizes: CallSizes | None) -> tuple[str | Grid, str]:
    """The cheapest layout and the reason, as rank 0 predicts them."""
    world = dist.get_process_group_ranks(group or dist.group.WORLD)
    if len(world) == 1:
        return "ring", "one rank has all rows"
    speed = speed_of(group, sizes or CallSizes())
    chosen: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        costs = predicted(table, sizes or CallSizes(), speed, layouts_of(len(world), sizes))
        best = cheapest(costs)
        chosen = [best.grid if best.layout == "grid" else best.layout, f"{because(costs)} (measured: {speed})"]
    with answered(group, "plan, the choice of a layout"):
        dist.broadcast_object_list(chosen, world[0], group)
    layout, reason = chosen
    return layout, reason


def _checked_layout(layout: Any, ranks: int) -> str | Grid:
    if isinstance(layout, str) and layout in LAYOUTS:
        return layout
    if not isinstance(layout, tuple) or len(layout) != 2:
        raise ValueError(f"plan: layout must be (h, s) or one of {', '.join(LAYOUTS)}; got {layout!r}")
    width, rows = (bounded(size, "plan: layout", least=1) for size in layout)
    if width * rows != ranks:
        raise ValueError(f"plan: layout {layout} is a grid of {width * rows} ranks, expected {ranks}")
    return width, rows


class HeadGroup(NamedTuple):
    """Ranks that deal heads among each other in place of their rows."""

    process_group: Any
    peers: tuple[int, ...]  # their numbers in the process group
    number: int  # of this rank among them
    places: tuple[Spans, ...]  # of each rank's rows, among the rows of all
    key_places: tuple[Spans, ...]  # the same of its keys


class SequencePlan:
    """The rows of a sequence that each rank holds, made by `plan`. One plan serves every layer with this mask.

    Attributes:
        mask: the mask of the whole sequence.
        length: rows of the whole sequence.
        layout: "ring", "gathered", "ulysses" or "grid".
        grid: (h, s), so many ranks deal heads, and so many deal rows: (1, ranks) and (ranks, 1) are ring and ulysses.
        rank, ranks: this process, and the number of them.
        rows: for each rank the spans (start, stop) of rows that it holds, ascending.
        key_length, key_rows: the same of keys; others than the rows in a plan of `cross`.
        block: rows of a block; what travels is whole blocks.
        imbalance: visible pairs of the busiest row of the grid, as a share above the mean; 0 under "ulysses", where
            heads decide.
        digest: of all that the mask shows; the same for masks that show the same.
        deal: digest of the layout and of who holds which rows and keys.
        keys_received: for each rank, the number of keys that come from other rows of the grid, in whole blocks.

    Example:
        >>> import torch, torch.distributed as dist, saccade
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> plan = saccade.distributed.plan(saccade.Window(15, 0), 128, layout="ring")
        >>> print(plan.explain())
        layout ring: named by the caller
        128 rows in blocks of 1 over 1 ranks, imbalance 0.0%
        rank 0: rows 0:128 (128); 100.0% of the pairs; receives 0 keys
        >>> dist.destroy_process_group()
    """

    def __init__(self, mask: Mask | None, table: BlockTable, group: Any, layout: str | Grid, reason: str) -> None:
        self.mask, self.length, self.block = mask, table.length, table.size
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.peers = tuple(range(self.ranks))  # the number in the group of each rank of this plan
        self.grid = (self.ranks, 1) if layout == "ulysses" else (1, self.ranks)
        if isinstance(layout, tuple):
            self.grid = layout
        self.layout, self._reason = "grid" if isinstance(layout, tuple) else layout, reason
        rows = DealtRows(table.length, table.size, in_grid(table, self.grid), self.ranks)
        self._take(table, rows, rows)

    def _take(self, table: BlockTable, rows: DealtRows, keys: DealtRows) -> None:
        """Derive what depends on the blocks of the mask, for rows and keys as they are dealt."""
        self._table, self.digest, self._rows, self._keys = table, table.digest, rows, keys
        self.rows, self.key_rows, self.key_length = rows.held, keys.held, keys.length
        self.deal = hashlib.sha256(repr((self.layout, self.grid, self.rows, self.key_rows)).encode()).hexdigest()[:12]
        width, parts = self.grid
        owner, holder = (dealt.joined(width).owner for dealt in (rows, keys))
        self.imbalance = imbalance(owner, table.pairs, parts)
        self.keys_received = tuple(np.repeat(received(owner, table, parts, holder), width).tolist())
        self._narrower: dict[Mask, SequencePlan] = {}
        self._slices: dict[tuple[Span, Span], Mask] = {}
        self.from_rank = lru_cache(None)(self._from_rank)
        self.tiles = lru_cache(None)(self._tiles)
        self.column = lru_cache(None)(self._column)

    def cross(self, keys: SequencePlan, mask: Mask | Tensor | None = None) -> SequencePlan:
        """The plan of cross-attention: from this plan's rows to the keys of another sequence. Every rank calls it.

        The layout is this plan's.

        Args:
            keys: the plan of the other sequence, whose shards the keys and values are.
            mask: which of its keys each row sees, as in `saccade.attention`.

        Raises:
            RankFailed: a rank has ended, hangs, or raised an error.
            TypeError, ValueError: `keys` has another group or grid of ranks; the mask does not fit; arguments that are
                not the same on all ranks. Every rank raises it.

        Example:
            >>> import torch, torch.distributed as dist, saccade
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun: ("gloo")
            >>> encoder, decoder = saccade.distributed.plan(None, 50), saccade.distributed.plan(saccade.Causal(), 20)
            >>> query, memory = decoder.shard(torch.randn(1, 2, 20, 8)), encoder.shard(torch.randn(1, 2, 50, 8))
            >>> saccade.distributed.attention(query, memory, memory, plan=decoder.cross(encoder)).shape
            torch.Size([1, 2, 20, 8])
            >>> dist.destroy_process_group()
        """
        crossed, problem = None, None
        try:
            crossed = self._crossed(keys, as_mask(mask))
        except (TypeError, ValueError) as error:
            problem = error
        facts: dict[str, Any] = {"error": None if problem is None else str(problem), "_mask": _shortened(mask)}
        if crossed is not None:
            facts |= {"rows": self.rows, "keys": keys.rows, "mask": crossed.digest}
        agree(self.group, facts, "plan.cross")
        if problem is not None:
            raise problem
        assert crossed is not None
        return crossed

    def _crossed(self, keys: Any, mask: Mask | None) -> SequencePlan:
        if not isinstance(keys, SequencePlan):
            raise TypeError(
                f"plan.cross: keys must be the plan of the keys' sequence, got {type(keys).__name__}; a mask is `mask`"
            )
        theirs, ours = (dist.get_process_group_ranks(plan.group or dist.group.WORLD) for plan in (keys, self))
        if theirs != ours:
            raise ValueError(f"plan.cross: keys is dealt to the ranks {theirs}, expected those of this plan, {ours}")
        if keys.grid != self.grid:
            raise ValueError(
                f"plan.cross: keys is dealt in a grid (h, s) of {keys.grid}, expected {self.grid}: give both plans one "
                "layout"
            )
        plan, rows, dealt = copy.copy(self), self._rows, keys._rows
        plan.mask, plan._reason = mask, "that of the rows' plan"
        plan._take(survey(mask, rows.length, rows.block, (dealt.length, dealt.block)), rows, dealt)
        return plan

    # --- tensors ----------------------------------------------------------------------------------------------------

    def shard(self, tensor: Tensor, dim: int = 2) -> Tensor:
        """This rank's rows of a tensor that every rank has whole, in order.

        Its backward pass gives the gradient of these rows, and 0 elsewhere.

        Raises:
            ValueError: `dim` does not have the plan's length.
        """
        self._check_size(tensor, dim, self.length, "shard", "the length")
        return cut(tensor, dim, self.rows[self.rank])

    def unshard(self, shard: Tensor, dim: int = 2) -> Tensor:
        """The whole tensor from the shards of all ranks, on every rank. Every rank calls it.

        The backward pass adds up what all ranks send for a row: the gradient of the sum of the ranks' losses.

        Raises:
            ValueError: `dim` does not have as many rows as this rank holds.
        """
        self._check_size(shard, dim, self.held(self.rank), "unshard", f"the number of rows of rank {self.rank}")
        return _Unshard.apply(shard, self, dim % shard.dim())

    def _check_size(self, tensor: Tensor, dim: int, size: int, method: str, what: str) -> None:
        if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != size:
            raise ValueError(f"plan.{method}: dim {dim} of {tuple(tensor.shape)} must have {what}, {size}")

    # --- the grid ---------------------------------------------------------------------------------------------------

    def _column(self, heads: Heads) -> SequencePlan:
        """The plan of some heads for the ranks of this one's column, each with the rows of its row of the grid."""
        width, rows = self.grid
        column = copy.copy(self)
        column.rank, column.ranks, column.grid, column.layout = self.rank // width, rows, (1, rows), "ring"
        column.peers = self.peers[self.rank % width :: width]
        column.mask = of_heads(self.mask, heads)
        column._take(self._table, self._rows.joined(width), self._keys.joined(width))
        return column

    def _head_group(self, width: int) -> HeadGroup:
        """The ranks of this one's row, in a grid whose rows have so many."""
        first = self.rank // width * width
        row, ranks = first // width, range(first, first + width)
        places = [
            tuple(within(dealt.held[rank], dealt.joined(width).held[row]) for rank in ranks)
            for dealt in (self._rows, self._keys)
        ]
        return HeadGroup(self.group, self.peers[first : first + width], self.rank - first, *places)

    # --- spans ------------------------------------------------------------------------------------------------------

    def held(self, rank: int) -> int:
        """Number of rows that a rank holds."""
        return size(self.rows[rank])

    def _from_rank(self, rank: int, source: int) -> Spans:
        """The keys of rank `source` that rows of `rank` see, in whole blocks."""
        return self._keys.spans(needed(self._rows.owner, self._table, rank) & (self._keys.owner == source))

    def _tiles(self, keys: Spans) -> tuple[tuple[Span, Span], ...]:
        """Rectangles (rows of this rank, keys of these spans) outside of which its rows see none of these keys."""
        found = []
        for rows in self.rows[self.rank]:
            for span in keys:
                seen = self._table.seen[self._rows.blocks(rows), self._keys.blocks(span)]
                down, across = np.flatnonzero(seen.any(1)), np.flatnonzero(seen.any(0))
                if len(down):
                    found.append((self._rows.hull(rows, down), self._keys.hull(span, across)))
        return tuple(found)

    def _sees_only(self, rows: Span, keys: Span) -> bool:
        """Whether rows of this rank see no keys but these, in whole blocks."""
        seen, inside = np.any(self._table.seen[self._rows.blocks(rows)], 0), self._keys.blocks(keys)
        return not (seen[: inside.start].any() or seen[inside.stop :].any())

    def _mask_of(self, mask: Mask | None, rows: Span, keys: Span) -> Mask | None:
        """The mask of a rectangle; of the plan's own mask always the same object, which remembers its work lists."""
        if mask is None:
            return None
        lengths = (self.length, self.key_length)
        if mask is not self.mask:
            return mask.slice(rows, keys, lengths=lengths)
        if (rows, keys) not in self._slices:
            self._slices[rows, keys] = mask.slice(rows, keys, lengths=lengths)
        return self._slices[rows, keys]

    def _narrowed(self, mask: Mask | None) -> SequencePlan:
        """The plan with the same rows for those of its pairs that another mask, too, shows."""
        if mask is None or parts_of(mask) <= parts_of(self.mask):
            return self
        if mask not in self._narrower:
            if len(self._narrower) == _NARROWER:  # documents of a batch are gone with it
                del self._narrower[next(iter(self._narrower))]
            plan = self._narrower[mask] = copy.copy(self)
            plan.mask = mask if self.mask is None else self.mask & mask
            plan._take(survey(plan.mask, self.length, self.block), self._rows, self._keys)
        return self._narrower[mask]

    # --- what it says of itself ---------------------------------------------------------------------------------------

    def traffic(self, key: Tensor, value: Tensor) -> tuple[int, ...]:
        """Bytes of keys and values that each rank receives in a forward pass, for shards or tensors like these.

        Where heads are dealt, queries and outputs travel, too: it depends on the heads, and this raises ValueError.
        """
        if self.grid[0] > 1:
            raise ValueError(f"plan.traffic: under {self.layout!r} what travels depends on the call, not on the mask")
        row = sum(x.shape[0] * x.shape[1] * x.shape[3] * x.element_size() for x in (key, value))
        return tuple(row * keys for keys in self.keys_received)

    def explain(self, key: Tensor | None = None, value: Tensor | None = None) -> str:
        """Layout and reason, imbalance, and for each rank its rows and what it receives: keys, or bytes for `key` and
        `value` like these."""
        unit, counts = "keys", self.keys_received
        if (key is None) != (value is None):
            raise ValueError("plan.explain: key and value belong together, got one of them")
        if key is not None and value is not None:
            unit, counts = "bytes", self.traffic(key, value)
        width = self.grid[0]
        pairs = np.bincount(self._rows.owner // width, self._table.pairs, self.grid[1])
        name = str(self.grid) if self.layout == "grid" else self.layout
        blocks = f"{self.length} rows in blocks of {self.block}"
        if self._keys is not self._rows:
            blocks += f" and {self.key_length} keys in blocks of {self._keys.block}"
        lines = [f"layout {name}: {self._reason}", f"{blocks} over {self.ranks} ranks, imbalance {self.imbalance:.1%}"]
        for rank, spans in enumerate(self.rows):
            where = ", ".join(f"{start}:{stop}" for start, stop in spans) or "none"
            does = f"{pairs[rank // width] / max(pairs.sum(), 1):.1%} of the pairs; receives {counts[rank]} {unit}"
            if self.layout == "ulysses":
                does = "computes some heads of all rows"
            elif width > 1:
                first = rank // width * width
                does = f"computes some heads of the rows of ranks {first} to {first + width - 1}: {does} of other rows"
            lines.append(f"rank {rank}: rows {where} ({self.held(rank)}); {does}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"SequencePlan({self.mask!r}, {self.length}, layout={self.layout!r}, rank {self.rank} of {self.ranks})"


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, plan: SequencePlan, dim: int) -> Tensor:
        ctx.plan, ctx.dim, own = plan, dim, shard.contiguous()
        others_have = (*shard.shape[:dim], *shard.shape[dim + 1 :])
        plans = f"{plan.digest[:12]}, rows {plan.deal}"
        facts = {"dim": dim, "shape without it": others_have, "dtype": str(shard.dtype), "plan": plans}
        agree_quickly(plan.group, facts, shard.device, "unshard")
        others = [rank for rank in range(plan.ranks) if rank != plan.rank]
        into = [(rank, _like(shard, dim, plan.held(rank))) for rank in others]
        received = exchanged(plan.group, [(rank, own) for rank in others], into, "unshard")
        whole = _like(shard, dim, plan.length)
        for rank, part in ((plan.rank, own), *zip(others, received, strict=True)):
            put(whole, dim, plan.rows[rank], part)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_whole: Tensor) -> tuple[Tensor, None, None]:
        plan, dim = ctx.plan, ctx.dim
        others = [rank for rank in range(plan.ranks) if rank != plan.rank]
        total = cut(d_whole, dim, plan.rows[plan.rank]).clone()
        sends: list[Message] = [(rank, cut(d_whole, dim, plan.rows[rank]).contiguous()) for rank in others]
        into = [(rank, _like(d_whole, dim, total.shape[dim])) for rank in others]
        for part in exchanged(plan.group, sends, into, "unshard, backward"):
            total += part
        return total, None, None


def check_plan(plan: Any, cross: bool = False) -> None:
    """TypeError unless it is a plan; ValueError for one of cross-attention unless `cross`."""
    if not isinstance(plan, SequencePlan):
        raise TypeError(f"plan must be what saccade.distributed.plan(...) returns, got {type(plan).__name__}")
    if plan._keys is not plan._rows and not cross:
        raise ValueError("plan is one of cross-attention, expected what saccade.distributed.plan(...) returns")


def _like(tensor: Tensor, dim: int, size: int) -> Tensor:
    return tensor.new_empty((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]))


def parts_of(mask: Mask | None) -> frozenset[Mask]:
    """Masks of which all must show a pair."""
    return frozenset() if mask is None else frozenset(mask.parts if isinstance(mask, And) else [mask])


def _shortened(mask: Any) -> str:
    text = repr(mask)
    return text if len(text) <= 120 else f"{text[:117]}..."
