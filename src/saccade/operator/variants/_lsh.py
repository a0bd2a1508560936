"""Hashes, and attention of sorted tokens to the chunks around them: the machinery of `reformer`.

Shape legend: B batch, H heads, N = B H, R rounds, L tokens (a multiple of m here), m chunk, D key width, Dv value
width, n buckets, c columns of random directions, one for two buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._call import without_autocast

_SINGLE = 128  # buckets that one hash gives; more are hashed in two factors
_PAIRS, _TOKENS = 1 << 18, 1 << 15  # pairs and tokens that are worked on at once on a CPU: they stay in its caches
_MORE = 64  # times as many elsewhere


def factors(buckets: int) -> tuple[int, ...]:
    """`buckets` as one factor, or if there are many, as two even factors of similar size whose product is `buckets` or
    the next larger one.

    Hashing n buckets costs n D / 2 a token, in two factors about 2 sqrt(n) D / 2 (Kitaev et al. 2020, as their code
    has it).
    """
    if buckets <= _SINGLE:
        return (buckets,)
    first = 2 * math.ceil(math.sqrt(buckets) / 2)
    return first, 2 * math.ceil(buckets / first / 2)


def directions(seed: int, factor: int, columns: int, rounds: int, heads: int, width: int) -> Tensor:
    """Normal directions (H, D, R, c). The first columns do not depend on c, so that a short item has the same
    directions in a batch and by itself."""
    drawn = np.random.default_rng((seed, factor)).standard_normal((columns, rounds, heads, width))
    return torch.from_numpy(drawn).permute(2, 3, 1, 0)


def hashes(tokens: Tensor, counts: list[int], rounds: int, seed: int) -> Tensor:
    """The bucket of each token in each round: argmax([x R; -x R]), int64 (B, H, R, L).

    Args:
        tokens: (B, H, L, D), float32 or float64.
        counts: how many buckets each item has, even.
    """
    parts = [factors(count) for count in counts]
    pairs = [part if len(part) == 2 else (1, part[0]) for part in parts]
    found = torch.zeros(*tokens.shape[:2], rounds, tokens.shape[2], dtype=torch.int64, device=tokens.device)
    for which in (0, 1):
        sizes = torch.tensor([pair[which] for pair in pairs], device=tokens.device)
        if any(pair[which] > 1 for pair in pairs):
            one = _hashed(tokens, sizes, directions(seed, which, int(sizes.max()) // 2, rounds, *_sizes(tokens)))
            found = found * sizes.view(-1, 1, 1, 1) + one
    return found


def _sizes(tokens: Tensor) -> tuple[int, int]:
    return tokens.shape[1], tokens.shape[3]


def _hashed(tokens: Tensor, sizes: Tensor, along: Tensor) -> Tensor:
    """One factor: (B, H, R, L) below `sizes` (B,). An item of size 1 has one bucket."""
    columns = along.shape[-1]
    along = along.to(tokens.device, tokens.dtype).flatten(2)
    absent = torch.arange(columns, device=tokens.device) >= (sizes // 2).view(-1, 1, 1, 1, 1)
    found = []
    for some in tokens.split(max(1, _at_once(_PAIRS, tokens.device) // max(along.shape[-1], 1)), dim=2):
        lengths = (some @ along).unflatten(-1, (-1, columns))
        best = lengths.abs().masked_fill_(absent, -1.0).argmax(-1, keepdim=True)
        opposite = (lengths.gather(-1, best) < 0).squeeze(-1) & (sizes > 1).view(-1, 1, 1, 1)
        found.append(best.squeeze(-1) + opposite * (sizes // 2).view(-1, 1, 1, 1))
    return torch.cat(found, dim=2).transpose(2, 3)


class BucketOrder(NamedTuple):
    """Tokens in the order (bucket, position), per round."""

    order: Tensor  # int64 (N, R, L): which token stands at each place
    codes: Tensor  # int32 (N, R, L), by token: i may see j where code_i - code_j is 0 or 1
    back: int  # places before its own at which a token may see another, at most


def in_order(buckets: Tensor, real: Tensor | None, chunk: int, inside: bool) -> BucketOrder:
    """Tokens sorted by their buckets (N, R, L); padding (N, 1, L) is in an extra bucket at the end.

    Args:
        inside: whether chunks are counted inside each bucket, or over all sorted tokens.
    """
    last = int(buckets.max()) + 1 if buckets.numel() else 1
    if real is not None:
        buckets = buckets.masked_fill(~real, last)
    held, order = buckets.to(torch.int32).sort(dim=-1, stable=True)
    first = torch.ones_like(held, dtype=torch.bool)
    first[..., 1:] = held[..., 1:] != held[..., :-1]
    place = torch.arange(held.shape[-1], device=held.device)
    back = 2 * chunk - 1
    if inside:
        place = place - torch.where(first, place, 0).cummax(-1).values
        back = int((place - (place // chunk - 1).clamp_(min=0) * chunk).max()) if place.numel() else 0
    # The next chunk of a bucket is 1 further, what follows in another bucket 2 at least.
    codes = (2 * first + (place % chunk == 0)).cumsum(-1, dtype=torch.int32)
    return BucketOrder(order, torch.empty_like(codes).scatter_(-1, order, codes), back)


def near(codes: Tensor, others: Tensor) -> Tensor:
    """Whether tokens with `codes` (..., r) see, in one round, those with `others` (..., k): bool (..., r, k)."""
    return ((codes[..., :, None] - others[..., None, :]) >> 1) == 0


def _at_once(number: int, device: torch.device) -> int:
    return number if device.type == "cpu" else number * _MORE


def _slabs(number: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, number)) for start in range(0, number, size))


class _Layout:
    """One round of some items: their tokens in order, cut into C chunks of t, each of which reads itself and `back`
    chunks before it.

    Before the first chunk of an item stand `back` chunks of nothing, so that what chunks read are overlapping views
    of one tensor. Nothing is a token whose code is like no other.
    """

    def __init__(self, sorts: BucketOrder, items: slice, which: int, rows: int, back: int, causal: bool):
        order = sorts.order[items, which]
        number, length = order.shape
        self.rows, self.back, self.wide = rows, back, (back + 1) * rows
        front, first = back * rows, torch.arange(number, device=order.device)[:, None]
        self.places = (F.pad(order, (front, 0)) + first * length).flatten()
        place = torch.arange(length, device=order.device).expand_as(order)
        self.inverse = (torch.empty_like(order).scatter_(1, order, place) + first * (front + length)).flatten()
        self.codes = [self._codes(sorts.codes[items, r], number, front) for r in (which, *range(which))]
        self.open = self._visible(causal, order.device)

    def _codes(self, codes: Tensor, number: int, front: int) -> tuple[Tensor, Tensor]:
        """Codes of tokens as queries, 2 c - 1, and as keys, 2 c: 1 apart if c - c' is 0 or 1, else 3 or more."""
        held = 2.0 * codes.flatten()[self.places].view(number, -1).to(torch.float64)
        readers, read = held - 1.0, held
        readers[:, :front], read[:, :front] = -100.0, -200.0
        dtype = torch.float32 if codes.shape[1] < 1 << 21 else torch.float64  # codes are below 3 L, and stay exact
        return self._chunks(readers.to(dtype).flatten()), self._windows(read.to(dtype).flatten())

    def _visible(self, causal: bool, device: torch.device) -> Tensor:
        """Visibility by place, 0 or 1 (t, w)."""
        row, column = (torch.arange(n, device=device) for n in (self.rows, self.wide))
        apart = column - row[:, None] - self.back * self.rows
        return (apart < 0 if causal else apart != 0).to(torch.float32)

    def in_order(self, tokens: Tensor) -> Tensor:
        """(n items, L, n) by token to places in order, a row for each."""
        return tokens.flatten(0, 1).index_select(0, self.places)

    def _chunks(self, held: Tensor) -> Tensor:
        """Rows in order to (C, t, ...), without those of nothing before the very first chunk."""
        return held.unflatten(0, (-1, self.rows))[self.back :]

    def _windows(self, held: Tensor) -> Tensor:
        """The rows that each chunk reads, (C, w, ...), as a view of the rows in order."""
        inner = held[0].numel()
        chunks = held.shape[0] // self.rows - self.back
        return held.as_strided((chunks, self.wide, *held.shape[1:]), (self.rows * inner, *held.stride()))

    def queries(self, tokens: Tensor) -> Tensor:
        return self._chunks(self.in_order(tokens))

    def keys(self, tokens: Tensor) -> Tensor:
        return self._windows(self.in_order(tokens))

    def by_token(self, chunks: Tensor, like: Tensor) -> Tensor:
        """Values of chunks (C, t, n) in the order of tokens (items, L, n)."""
        return chunks.flatten(0, 1).index_select(0, self.inverse).view(*like.shape[:2], -1)

    def spread(self, total: Tensor, slab: slice, part: Tensor) -> None:
        """Add `part` (S, w, n), computed for the rows that each chunk of a slab reads, to the chunks of `total` (back +
        C, t, n)."""
        for i in range(self.back + 1):
            total[slab.start + i : slab.stop + i] += part[:, i * self.rows : (i + 1) * self.rows]

    def shown(self) -> Iterator[tuple[slice, Tensor]]:
        """Slabs of chunks, and which pairs count in this round, 0 or 1 (S, t, w).

        A pair that several rounds show counts in the first of them: the same sum as all of them with 1 / N each.
        Numbers, since comparisons that give booleans take six times as long.
        """
        (readers, read), *earlier = self.codes
        size = max(1, _at_once(_PAIRS, readers.device) // (self.rows * self.wide))
        for slab in _slabs(readers.shape[0], size):
            pairs = _apart(readers[slab], read[slab]).neg_().add_(2.0).clamp_(min=0.0).mul_(self.open)
            for before, others in earlier:
                pairs.mul_(_apart(before[slab], others[slab]).sub_(1.0).clamp_(max=1.0))
            yield slab, pairs


def _apart(readers: Tensor, read: Tensor) -> Tensor:
    return (readers[:, :, None] - read[:, None, :]).abs_()


def _layouts(sorts: BucketOrder, items: slice, chunk: int, causal: bool) -> Iterator[_Layout]:
    # Chunks inside a bucket do not end where those of the layout do, which may be as small as is quick.
    rows = chunk // 2 if causal and chunk % 2 == 0 else chunk
    back = -(-sorts.back // rows) if causal else 1
    return (_Layout(sorts, items, which, rows, back, causal) for which in range(sorts.order.shape[1]))


def _items_at_once(query: Tensor) -> Iterator[slice]:
    """Items that are worked on at once."""
    return _slabs(query.shape[0], max(1, _at_once(_TOKENS, query.device) // max(query.shape[1], 1)))


class ChunkedAttention(torch.autograd.Function):
    """(query, key, value (N, L, n)) -> out (N, L, Dv), lse (N, L): over the pairs that any round shows, each once.

    Scores are formed a slab at a time, and formed again in the backward pass, in the order found in the forward pass.
    The seed of the hashes tells whether what is kept comes from that pass: `torch.utils.checkpoint` throws tensors
    away, runs all again, and hands out those of the second run in their place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sorts: BucketOrder,
        chunk: int,
        causal: bool,
        scale: float,
        seed: int,
    ) -> tuple[Tensor, Tensor]:
        scaled = query * scale
        outs, lses = torch.empty_like(value), value.new_empty(value.shape[:2])
        for items in _items_at_once(query):
            out, lse = value.new_zeros(value[items].shape), value.new_full(lses[items].shape, -math.inf)
            for layout in _layouts(sorts, items, chunk, causal):
                out, lse = _merged(out, lse, *_forward(layout, scaled[items], key[items], value[items]))
            outs[items], lses[items] = out, lse
        seed = seed % (1 << 63)
        ctx.save_for_backward(query, key, value, outs, lses, sorts.order, sorts.codes, torch.tensor(seed))
        ctx.settings = sorts.back, chunk, causal, scale, seed
        return outs, lses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, order, codes, hashed = ctx.saved_tensors
        back, chunk, causal, scale, seed = ctx.settings
        if int(hashed) != seed:
            raise RuntimeError(
                "the recomputation of a checkpoint hashed with another seed than the forward pass: expected "
                "redraw=False, or a checkpoint with preserve_rng_state=True"
            )
        delta = ((d_out * out).sum(-1) - d_lse)[..., None]
        lse = lse.masked_fill(lse == -math.inf, 0.0)[..., None]
        scaled = query * scale
        total = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        with without_autocast(query.device):
            for items in _items_at_once(query):
                given = [tensor[items] for tensor in (scaled, key, value, lse, d_out, delta)]
                for layout in _layouts(BucketOrder(order, codes, back), items, chunk, causal):
                    for whole, part in zip(total, _backward(layout, *given), strict=True):
                        whole[items] += part
        return total[0].mul_(scale), total[1], total[2], None, None, None, None, None


def _least(dtype: torch.dtype) -> float:
    """The exponent below which a weight counts as 0. Below it exp returns denormals, which take a hundred times as
    long."""
    return -700.0 if dtype == torch.float64 else -80.0


def _forward(layout: _Layout, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse by token, of the pairs that count in this round."""
    queries, keys, values = layout.queries(query), layout.keys(key), layout.keys(value)
    out, lse = queries.new_empty(*queries.shape[:2], value.shape[-1]), queries.new_empty(*queries.shape[:2], 1)
    hidden, least = torch.finfo(query.dtype).max, _least(query.dtype)
    for slab, shown in layout.shown():
        scores = queries[slab] @ keys[slab].mT
        seen = shown.to(scores.dtype)
        top = (scores + (seen - 1.0).mul_(hidden)).amax(-1, keepdim=True)
        weights = scores.sub_(top).clamp_(least, 0.0).exp_().mul_(seen)
        total = weights.sum(-1, keepdim=True)
        out[slab] = (weights @ values[slab]).div_(total.masked_fill(total == 0, 1.0))
        lse[slab] = top + total.log()
    return layout.by_token(out, query), layout.by_token(lse, query).squeeze(-1)


def _backward(
    layout: _Layout, query: Tensor, key: Tensor, value: Tensor, lse: Tensor, d_out: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value by token, from the pairs that count in this round; lse is finite."""
    queries, keys, values = layout.queries(query), layout.keys(key), layout.keys(value)
    lse, d_out, delta = layout.queries(lse), layout.queries(d_out), layout.queries(delta)
    d_query, least = torch.empty_like(queries), _least(query.dtype)
    chunks = queries.shape[0] + layout.back
    d_key, d_value = (query.new_zeros(chunks, layout.rows, tensor.shape[-1]) for tensor in (key, value))
    for slab, shown in layout.shown():
        scores = queries[slab] @ keys[slab].mT
        weights = scores.sub_(lse[slab]).clamp_(least, 0.0).exp_().mul_(shown)
        layout.spread(d_value, slab, weights.mT @ d_out[slab])
        d_scores = (d_out[slab] @ values[slab].mT).sub_(delta[slab]).mul_(weights)
        d_query[slab] = d_scores @ keys[slab]
        layout.spread(d_key, slab, d_scores.mT @ queries[slab])
    parts = d_query, d_key[layout.back :], d_value[layout.back :]
    found = [layout.by_token(part, query) for part in parts]
    return found[0], found[1], found[2]


def _merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(lse, other_lse)
    pivot = total.masked_fill(total == -math.inf, 0.0)
    return out * (lse - pivot).exp()[..., None] + other * (other_lse - pivot).exp()[..., None], total
