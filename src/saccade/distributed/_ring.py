"""Ring and gathered attention: every rank keeps its rows, and the keys and values that they see come to it.

    ring      step s: compute with the keys of rank - s, while those of rank - s - 1 are on their way
    gathered  one step with all keys, own and others', in the order of the sequence

What a rank computes for others' keys in the backward pass goes back to these and is added there, in the order of steps.

Shape legend: B batch, Hq / Hkv query and key-value heads, n rows of this rank, m keys of a part, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..operator._call import accumulator_of, share_of_keys, sink_lse
from . import _tiles
from ._exchange import Pending
from ._plan import SequencePlan, Spans
from ._tiles import EMPTY, Pair, TileSettings


@dataclass
class KeyPart:
    """Keys and values that are at hand: key (B, Hkv, m, D) and value (B, Hkv, m, Dv) of the positions `spans`."""

    source: int | None  # the rank they are from; None: several
    spans: Spans
    key: Tensor
    value: Tensor


class RingAttention(torch.autograd.Function):
    """(query, key, value, parameter, sink) of this rank -> out (B, Hq, n, Dv), lse (B, Hq, n)."""

    @staticmethod
    def forward(ctx: Any, settings: TileSettings, *given: Any) -> Pair:
        query, key, value, parameter, sink = given
        parts, kept = _parts(settings.plan, key, value), []
        rows = RowSums(settings, query, value.shape[3])
        for part in parts:
            rows.add(part, parameter)
            kept = [part.key, part.value] if part.source is None else []
        out, lse = rows.joined()
        whole = sink_lse(lse, sink)
        if sink is not None:
            out = torch.where((lse == EMPTY)[..., None], 0.0, out * share_of_keys(lse, whole).to(out.dtype)[..., None])
        out = out.to(query.dtype)
        ctx.settings = settings
        ctx.save_for_backward(*given, out, torch.where(lse == EMPTY, EMPTY, whole), *kept)
        ctx.set_materialize_grads(False)
        return out, whole.to(accumulator_of(query))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, parameter, sink, out, lse, *kept = ctx.saved_tensors
        settings, wanted = ctx.settings, ctx.needs_input_grad[1:]
        d_out = torch.zeros_like(out) if d_out is None else d_out
        grads = GradientSums(settings, wanted, query, parameter, out, lse, d_out, d_lse)
        plan, returned = settings.plan, []
        d_keys = [torch.zeros_like(x, dtype=grads.dtype) for x in (key, value)]
        parts = iter([_gathered(plan, *kept)]) if kept else _parts(plan, key, value)
        for part in parts:
            mine = grads.add(part)
            if not wanted[1] and not wanted[2]:
                continue
            if returned:
                _come_back(plan, returned[-1], d_keys)
            returned += _go_back(plan, part, mine, d_keys, key.dtype)
        if returned:
            _come_back(plan, returned[-1], d_keys)
        for returning in returned:
            returning.pending.finish()
        d_key, d_value = (x.to(key.dtype) if want else None for x, want in zip(d_keys, wanted[1:3], strict=True))
        d_sink = _sink_gradient(sink, lse, out, d_out, d_lse) if sink is not None and wanted[4] else None
        return None, grads.query if wanted[0] else None, d_key, d_value, grads.of_bias(), d_sink


# --- keys and values on their way ---------------------------------------------------------------------------------


def _parts(plan: SequencePlan, key: Tensor, value: Tensor) -> Iterator[KeyPart]:
    """The parts that this rank's rows need, one after another; the next one is on its way before one is given."""
    if plan.layout == "gathered":
        others = [rank for rank in range(plan.ranks) if rank != plan.rank]
        pending = _fetch(plan, key, value, others, others, "attention, gathered")
        yield _joined(plan, key, value, others, pending.received())
        pending.finish()
        return
    part, sent = KeyPart(plan.rank, plan.rows[plan.rank], key, value), []
    for step in range(1, plan.ranks):
        to, source = (plan.rank + step) % plan.ranks, (plan.rank - step) % plan.ranks
        pending = _fetch(plan, key, value, [to], [source], f"attention, ring step {step}")
        sent.append(pending)
        yield part
        part = KeyPart(source, plan.from_rank(plan.rank, source), *pending.received())
    yield part
    for pending in sent:
        pending.finish()


def _fetch(
    plan: SequencePlan, key: Tensor, value: Tensor, to: list[int], sources: list[int], operation: str
) -> Pending:
    """Send what the ranks `to` need of this rank's keys and values, and receive what this one needs of `sources`."""
    own = plan.rows[plan.rank]
    sends, receives = [], []
    for rank in to:
        places = plan.within(plan.from_rank(rank, plan.rank), own)
        sends += [(rank, plan.cut(x, 2, places).contiguous()) for x in (key, value)]
    for rank in sources:
        count = _size(plan.from_rank(plan.rank, rank))
        receives += [(rank, x.new_empty(*x.shape[:2], count, x.shape[3])) for x in (key, value)]
    return Pending(plan.group, sends, receives, operation)


def _joined(plan: SequencePlan, key: Tensor, value: Tensor, others: list[int], received: list[Tensor]) -> KeyPart:
    """All that this rank's rows see, in the order of the sequence."""
    own = plan.within(plan.from_rank(plan.rank, plan.rank), plan.rows[plan.rank])
    by_rank = {rank: (received[2 * n], received[2 * n + 1]) for n, rank in enumerate(others)}
    by_rank[plan.rank] = (plan.cut(key, 2, own), plan.cut(value, 2, own))
    pieces, done = [], dict.fromkeys(by_rank, 0)
    for (start, stop), rank in _in_order(plan):
        at = done[rank]
        pieces.append([x.narrow(2, at, stop - start) for x in by_rank[rank]])
        done[rank] = at + stop - start
    if not pieces:
        return _gathered(plan, key.narrow(2, 0, 0), value.narrow(2, 0, 0))
    return _gathered(plan, *(x[0] if len(x) == 1 else torch.cat(x, 2) for x in zip(*pieces, strict=True)))


def _in_order(plan: SequencePlan) -> list[tuple[tuple[int, int], int]]:
    """The spans of keys that this rank needs, and who holds each."""
    return sorted((span, rank) for rank in range(plan.ranks) for span in plan.from_rank(plan.rank, rank))


def _gathered(plan: SequencePlan, key: Tensor, value: Tensor) -> KeyPart:
    spans: list[tuple[int, int]] = []
    for (start, stop), _ in _in_order(plan):
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, stop))
    return KeyPart(None, tuple(spans), key, value)


def _size(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


# --- and gradients on their way back ------------------------------------------------------------------------------


@dataclass
class Returning:
    """Gradients of this rank's keys that come back from others: the positions of each pair of messages."""

    pending: Pending
    spans: list[Spans]


def _go_back(
    plan: SequencePlan, part: KeyPart, mine: list[Tensor], d_keys: list[Tensor], dtype: torch.dtype
) -> list[Returning]:
    """Add gradients of own keys, and send those of others' to them."""
    if part.source == plan.rank:
        for total, x in zip(d_keys, mine, strict=True):
            total += x
        return []
    if part.source is None:
        sources = targets = [rank for rank in range(plan.ranks) if rank != plan.rank]
        own = plan.from_rank(plan.rank, plan.rank)
        _add(plan, own, [plan.cut(x, 2, plan.within(own, part.spans)) for x in mine], d_keys)
    else:
        targets, step = [part.source], (plan.rank - part.source) % plan.ranks
        sources = [(plan.rank + step) % plan.ranks]
    sends, receives = [], []
    for rank in targets:
        places = plan.within(plan.from_rank(plan.rank, rank), part.spans)
        sends += [(rank, plan.cut(x, 2, places).to(dtype).contiguous()) for x in mine]
    spans = [plan.from_rank(rank, plan.rank) for rank in sources]
    for rank, theirs in zip(sources, spans, strict=True):
        receives += [(rank, x.new_empty(*x.shape[:2], _size(theirs), x.shape[3], dtype=dtype)) for x in d_keys]
    return [Returning(Pending(plan.group, sends, receives, "attention, backward: gradients of keys and values"), spans)]


def _come_back(plan: SequencePlan, returning: Returning, d_keys: list[Tensor]) -> None:
    received = returning.pending.received()
    for n, spans in enumerate(returning.spans):
        _add(plan, spans, received[2 * n : 2 * n + 2], d_keys)


def _add(plan: SequencePlan, spans: Spans, parts: list[Tensor], totals: list[Tensor]) -> None:
    for total, part in zip(totals, parts, strict=True):
        done = 0
        for start, stop in plan.within(spans, plan.rows[plan.rank]):
            total.narrow(2, start, stop - start).add_(part.narrow(2, done, stop - start))
            done += stop - start


# --- sums over parts ----------------------------------------------------------------------------------------------


class RowSums:
    """Attention of this rank's rows over the parts so far: for each span of rows a pair (out, lse), or None."""

    def __init__(self, settings: TileSettings, query: Tensor, width: int) -> None:
        self.settings, self.query, self.width = settings, query, width
        self.dtype = accumulator_of(query)
        self.spans = settings.plan.rows[settings.plan.rank]
        self.pairs: dict[tuple[int, int], Pair] = {}

    def add(self, part: KeyPart, parameter: Tensor | None) -> None:
        for rows, keys, tensors in _rectangles(self.settings, self.query, part):
            scores = None if parameter is None else self.settings.scores_of(parameter, rows, keys)
            pair = _tiles.forward(self.settings.call(rows, keys, *tensors, scores))
            span = next(span for span in self.spans if span[0] <= rows[0] < span[1])
            if span == rows and span not in self.pairs:
                self.pairs[span] = pair
            else:
                self._merge(span, rows, pair)

    def _merge(self, span: tuple[int, int], rows: tuple[int, int], more: Pair) -> None:
        """Add keys that some rows of a span see."""
        whole, whole_lse = self.pairs.get(span) or self._unseen(span[1] - span[0])
        whole = whole.to(self.dtype)
        self.pairs[span] = whole, whole_lse
        out, lse = (x[:, :, rows[0] - span[0] : rows[1] - span[0]] for x in (whole, whole_lse))
        both = torch.logaddexp(lse, more[1])
        pivot = torch.where(both == EMPTY, 0.0, both)
        weight, more_weight = (torch.exp(x - pivot).to(self.dtype)[..., None] for x in (lse, more[1]))
        # A part that a row sees nothing of is 0 there, whatever its keys hold.
        out.mul_(weight).addcmul_(more[0].to(self.dtype), more_weight)
        lse.copy_(both)

    def joined(self) -> Pair:
        """out (B, Hq, n, Dv) and lse (B, Hq, n), float64, without the sink."""
        pairs = [self.pairs.get(rows) or self._unseen(rows[1] - rows[0]) for rows in self.spans or ((0, 0),)]
        if len(pairs) == 1:
            return pairs[0]
        outs, lses = zip(*pairs, strict=True)
        return torch.cat([out.to(self.dtype) for out in outs], 2), torch.cat(lses, 2)

    def _unseen(self, count: int) -> Pair:
        out = self.query.new_zeros(*self.query.shape[:2], count, self.width)
        return out, out.new_full(out.shape[:3], EMPTY, dtype=torch.float64)


class GradientSums:
    """Gradients of query and bias over the parts so far; `add` gives those of a part's keys and values."""

    def __init__(
        self,
        settings: TileSettings,
        wanted: tuple[bool, ...],
        query: Tensor,
        parameter: Tensor | None,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
    ) -> None:
        self.settings, self.wanted, self.dtype = settings, wanted[:4], accumulator_of(query)
        self._query, self.parameter, self.d_lse, self.rows = query, parameter, d_lse, (out, d_out)
        high = lse.float() if query.dtype != torch.float64 else lse
        self.lse = torch.stack((high, torch.where(lse.isfinite(), (lse - high).to(high.dtype), 0.0)))
        self._d_query = torch.zeros_like(query, dtype=self.dtype)
        self.d_scores = None
        if parameter is not None and wanted[3]:
            self.d_scores = torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, self.dtype))

    @property
    def query(self) -> Tensor:
        return self._d_query.to(self._query.dtype)

    def of_bias(self) -> Tensor | None:
        return None if self.d_scores is None or self.parameter is None else self.d_scores.to(self.parameter.dtype)

    def add(self, part: KeyPart) -> list[Tensor]:
        plan = self.settings.plan
        d_part = [torch.zeros_like(x, dtype=self.dtype) for x in (part.key, part.value)]
        for rows, keys, tensors in _rectangles(self.settings, self._query, part):
            ((at, stop),) = plan.within((rows,), plan.rows[plan.rank])
            here = slice(at, stop)
            scores = None if self.parameter is None else self.settings.scores_of(self.parameter, rows, keys)
            call = self.settings.call(rows, keys, *tensors, scores)
            out, d_out = (x[:, :, here] for x in self.rows)
            d_lse = None if self.d_lse is None else self.d_lse[:, :, here]
            whole = plan.sees_only(rows, keys)
            found = _tiles.backward(call, self.wanted, out, self.lse[..., here], d_out, d_lse, whole)
            ((key_at, key_stop),) = plan.within((keys,), part.spans)
            if found[0] is not None:
                self._d_query[:, :, here] += found[0]
            for total, x in zip(d_part, found[1:3], strict=True):
                if x is not None:
                    total[:, :, key_at:key_stop] += x
            if self.d_scores is not None and found[3] is not None:
                self.settings.scores_of(self.d_scores, rows, keys).add_(found[3])
        return d_part


def _rectangles(
    settings: TileSettings, query: Tensor, part: KeyPart
) -> Iterator[tuple[tuple[int, int], tuple[int, int], tuple[Tensor, Tensor, Tensor]]]:
    """Rows and keys in the whole sequence, and their query, key and value."""
    plan = settings.plan
    for rows, keys in plan.tiles(part.spans):
        ((start, stop),) = plan.within((rows,), plan.rows[plan.rank])
        ((first, last),) = plan.within((keys,), part.spans)
        key, value = (x.narrow(2, first, last - first) for x in (part.key, part.value))
        yield rows, keys, (query.narrow(2, start, stop - start), key, value)


def _sink_gradient(sink: Tensor, lse: Tensor, out: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Tensor:
    """-sum_i exp(sink - lse_i) (d_out_i . out_i - d_lse_i), with lse -inf on rows that see no key: their lse is the
    sink."""
    empty = lse == EMPTY
    d_out = torch.where(empty[..., None], 0.0, d_out).double()
    inner = (d_out * out).sum(-1) - (0.0 if d_lse is None else d_lse.double())
    share = torch.exp(torch.where(empty, 0.0, sink.detach().double()[None, :, None] - lse))
    return -(share * inner).sum((0, 2)).to(sink.dtype)
