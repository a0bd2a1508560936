"""Sums over the parts that come to a rank: its rows' attention, and the gradients of its rows and of a part's keys.

Shape legend: B batch, Hq / Hkv query and key-value heads, n rows of this rank, m keys of a part, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..operator._call import accumulator_of
from ..operator._masks._intervals import Span
from . import _tiles
from ._spans import Spans, within
from ._tiles import EMPTY, Pair, TileSettings


@dataclass
class KeyPart:
    """Keys and values that are at hand: key (B, Hkv, m, D) and value (B, Hkv, m, Dv) of the positions `spans`."""

    source: int | None  # the rank they are from; None: several
    spans: Spans
    key: Tensor
    value: Tensor


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
            span = _around(self.spans, rows)
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


class SpanSums:
    """A sum over rectangles of tensors (B, H, positions, width): one for each span, which the first one that covers it
    begins."""

    def __init__(self, spans: Spans, like: Tensor, dtype: torch.dtype) -> None:
        self.spans, self.like, self.dtype = spans, like, dtype
        self.sums: dict[Span, Tensor] = {}

    def add(self, where: Span, tensor: Tensor | None) -> None:
        if tensor is None:
            return
        span = _around(self.spans, where)
        if span == where and span not in self.sums:
            self.sums[span] = tensor.to(self.dtype)
            return
        if span not in self.sums:
            self.sums[span] = self._zeros(span)
        self.sums[span][:, :, where[0] - span[0] : where[1] - span[0]] += tensor

    def joined(self) -> Tensor:
        found = [self.sums[span] if span in self.sums else self._zeros(span) for span in self.spans or ((0, 0),)]
        return found[0] if len(found) == 1 else torch.cat(found, 2)

    def _zeros(self, span: Span) -> Tensor:
        shape = self.like.shape
        return self.like.new_zeros(*shape[:2], span[1] - span[0], shape[3], dtype=self.dtype)


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
        self.query, self.parameter, self.d_lse, self.rows = query, parameter, d_lse, (out, d_out)
        high = lse.to(self.dtype)
        self.lse = torch.stack((high, torch.where(lse.isfinite(), (lse - high).to(self.dtype), 0.0)))
        self.d_query = SpanSums(settings.plan.rows[settings.plan.rank], query, self.dtype)
        self.d_scores = None
        if parameter is not None and wanted[3]:
            self.d_scores = torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, self.dtype))

    def of_query(self) -> Tensor | None:
        return self.d_query.joined().to(self.query.dtype) if self.wanted[0] else None

    def of_bias(self) -> Tensor | None:
        return None if self.d_scores is None or self.parameter is None else self.d_scores.to(self.parameter.dtype)

    def add(self, part: KeyPart) -> list[Tensor]:
        plan = self.settings.plan
        d_key, d_value = (SpanSums(part.spans, x, self.dtype) for x in (part.key, part.value))
        for rows, keys, tensors in _rectangles(self.settings, self.query, part):
            ((start, stop),) = within((rows,), plan.rows[plan.rank])
            scores = None if self.parameter is None else self.settings.scores_of(self.parameter, rows, keys)
            call = self.settings.call(rows, keys, *tensors, scores)
            out, d_out = (x[:, :, start:stop] for x in self.rows)
            d_lse = None if self.d_lse is None else self.d_lse[:, :, start:stop]
            lse, whole = self.lse[..., start:stop], plan._sees_only(rows, keys)
            found = _tiles.backward(call, self.wanted, out, lse, d_out, d_lse, whole)
            self.d_query.add(rows, found[0])
            d_key.add(keys, found[1])
            d_value.add(keys, found[2])
            if self.d_scores is not None and found[3] is not None:
                self.settings.scores_of(self.d_scores, rows, keys).add_(found[3])
        return [d_key.joined(), d_value.joined()]


def _around(spans: Spans, inner: Span) -> Span:
    """The span that holds another one."""
    return next(span for span in spans if span[0] <= inner[0] < span[1])


def _rectangles(
    settings: TileSettings, query: Tensor, part: KeyPart
) -> Iterator[tuple[tuple[int, int], tuple[int, int], tuple[Tensor, Tensor, Tensor]]]:
    """Rows and keys in the whole sequence, and their query, key and value."""
    plan = settings.plan
    for rows, keys in plan.tiles(part.spans):
        ((start, stop),) = within((rows,), plan.rows[plan.rank])
        ((first, last),) = within((keys,), part.spans)
        key, value = (x.narrow(2, first, last - first) for x in (part.key, part.value))
        yield rows, keys, (query.narrow(2, start, stop - start), key, value)
