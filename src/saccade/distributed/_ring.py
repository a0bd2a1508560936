"""Ring and gathered attention: every rank keeps its rows, and the keys and values that they see come to it.

    ring      step s: compute with the keys of rank - s, while those of rank - s - 1 are on their way
    gathered  one step with all keys, own and others', in the order of the sequence

What a rank computes for others' keys in the backward pass goes back to these and is added there, in the order of steps.

Shape legend: B batch, Hq / Hkv query and key-value heads, n rows of this rank, m keys of a part, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..operator._call import CheckedCall, accumulator_of, share_of_keys, sink_lse
from ..operator._masks import Window
from ._exchange import Pending
from ._plan import SequencePlan
from ._spans import Spans, cut, size, within
from ._sums import GradientSums, KeyPart, RowSums
from ._tiles import EMPTY, Pair, TileSettings

EVERYTHING = Window(None, None)  # a slice of it says where it is, which biases and dropout need


def run(plan: SequencePlan, call: CheckedCall, own_rows: bool = False) -> Pair:
    """out and lse of this rank's rows, which the tensors of the call have; all else is of the whole sequence.

    Args:
        own_rows: whether a tensor as bias has only the rows of this rank.
    """
    mask, bias, parameter = call.mask, None, None
    if call.bias is not None:
        bias, parameter = call.bias._form(), call.bias.parameter
    if mask is None and (bias is not None or call.dropout is not None):
        mask = EVERYTHING
    settings = TileSettings(plan, mask, bias, call.scale, call.softcap, call.dropout, own_rows)
    out, lse = RingAttention.apply(settings, call.query, call.key, call.value, parameter, call.sink)
    return out, lse


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
            del part  # no more than the next two are held
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
        of_keys = KeyGradients(settings.plan, key, value)
        for part in iter([_gathered(settings.plan, *kept)]) if kept else _parts(settings.plan, key, value):
            found = grads.add(part)
            if wanted[1] or wanted[2]:
                of_keys.add(part, found)
            del part, found
        d_key, d_value = of_keys.joined() if wanted[1] or wanted[2] else (None, None)
        d_sink = _sink_gradient(sink, lse, out, d_out, d_lse) if sink is not None and wanted[4] else None
        return None, grads.of_query(), d_key, d_value, grads.of_bias(), d_sink


# --- keys and values on their way ---------------------------------------------------------------------------------


def _parts(plan: SequencePlan, key: Tensor, value: Tensor) -> Iterator[KeyPart]:
    """The parts that this rank's rows need, one after another; the next one is on its way before one is given."""
    if plan.layout == "gathered":
        others = [rank for rank in range(plan.ranks) if rank != plan.rank]
        pending = _fetch(plan, key, value, others, others, "attention, gathered")
        yield _joined(plan, key, value, others, pending.received())
        pending.finish()
        return
    part = KeyPart(plan.rank, plan.key_rows[plan.rank], key, value)
    sent: list[Pending] = []
    for step in range(1, plan.ranks):
        to, source = (plan.rank + step) % plan.ranks, (plan.rank - step) % plan.ranks
        if len(sent) > 1:
            sent.pop(0).finish()
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
    own = plan.key_rows[plan.rank]
    sends, receives = [], []
    for rank in to:
        places = within(plan.from_rank(rank, plan.rank), own)
        sends += [(plan.peers[rank], cut(x, 2, places).contiguous()) for x in (key, value)]
    for rank in sources:
        count = size(plan.from_rank(plan.rank, rank))
        receives += [(plan.peers[rank], x.new_empty(*x.shape[:2], count, x.shape[3])) for x in (key, value)]
    return Pending(plan.group, sends, receives, operation)


def _joined(plan: SequencePlan, key: Tensor, value: Tensor, others: list[int], received: list[Tensor]) -> KeyPart:
    """All that this rank's rows see, in the order of the sequence."""
    own = within(plan.from_rank(plan.rank, plan.rank), plan.key_rows[plan.rank])
    by_rank = {rank: (received[2 * n], received[2 * n + 1]) for n, rank in enumerate(others)}
    by_rank[plan.rank] = (cut(key, 2, own), cut(value, 2, own))
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


# --- and gradients on their way back ------------------------------------------------------------------------------


class KeyGradients:
    """Gradients of this rank's keys and values, from its own rows and from those of others."""

    def __init__(self, plan: SequencePlan, key: Tensor, value: Tensor) -> None:
        self.plan, self.given = plan, (key, value)
        self.totals: list[Tensor] = []
        self.pending: list[tuple[Pending, list[int]]] = []

    def add(self, part: KeyPart, gradients: list[Tensor]) -> None:
        """Take the gradients of a part's keys and values: own ones are added, and others' begin their way to them."""
        self._receive()
        plan, own = self.plan, self.plan.key_rows[self.plan.rank]
        if part.source == plan.rank:
            self.totals = gradients
            return
        if part.source is None:
            targets = sources = [rank for rank in range(plan.ranks) if rank != plan.rank]
            spans = plan.from_rank(plan.rank, plan.rank)
            mine = [cut(x, 2, within(spans, part.spans)) for x in gradients]
            if spans == own:
                self.totals = mine
            else:
                self.totals = [x.new_zeros(*x.shape[:2], size(own), x.shape[3]) for x in mine]
                self._add(spans, mine)
        else:
            targets, sources = [part.source], [(2 * plan.rank - part.source) % plan.ranks]
        sends, receives = [], []
        for rank in targets:
            places = within(plan.from_rank(plan.rank, rank), part.spans)
            parts = [cut(x, 2, places).to(self.given[0].dtype) for x in gradients]
            sends += [(plan.peers[rank], x.contiguous()) for x in parts]
        for rank in sources:
            count = size(plan.from_rank(rank, plan.rank))
            receives += [(plan.peers[rank], x.new_empty(*x.shape[:2], count, x.shape[3])) for x in self.given]
        if len(self.pending) > 1:
            self.pending.pop(0)[0].finish()
        operation = "attention, backward: gradients of keys and values"
        self.pending.append((Pending(plan.group, sends, receives, operation), sources))

    def joined(self) -> list[Tensor]:
        """The gradients of key and value."""
        self._receive()
        for pending, _ in self.pending:
            pending.finish()
        return [total.to(x.dtype) for total, x in zip(self.totals, self.given, strict=True)]

    def _receive(self) -> None:
        """Add what comes back of the step before."""
        if self.pending:
            pending, sources = self.pending[-1]
            received = pending.received()
            for n, rank in enumerate(sources):
                self._add(self.plan.from_rank(rank, self.plan.rank), received[2 * n : 2 * n + 2])

    def _add(self, spans: Spans, parts: list[Tensor]) -> None:
        for total, part in zip(self.totals, parts, strict=True):
            done = 0
            for start, stop in within(spans, self.plan.key_rows[self.plan.rank]):
                total[:, :, start:stop] += part[:, :, done : done + stop - start]
                done += stop - start


def _sink_gradient(sink: Tensor, lse: Tensor, out: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Tensor:
    """-sum_i exp(sink - lse_i) (d_out_i . out_i - d_lse_i), with lse -inf on rows that see no key: their lse is the
    sink."""
    empty = lse == EMPTY
    d_out = torch.where(empty[..., None], 0.0, d_out).double()
    inner = (d_out * out).sum(-1) - (0.0 if d_lse is None else d_lse.double())
    share = torch.exp(torch.where(empty, 0.0, sink.detach().double()[None, :, None] - lse))
    return -(share * inner).sum((0, 2)).to(sink.dtype)
