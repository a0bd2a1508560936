"""Hashes, and attention of sorted tokens to the chunks around them: the machinery of `reformer`.

Shapes: B batch, H heads, N = B H, R rounds, L tokens (a multiple of m here), m chunk, D key width, Dv value width,
n buckets, c columns of random directions, one for two buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_SINGLE = 128  # buckets that one hash gives; more are hashed in two factors
_PAIRS = {"cpu": 1 << 20}  # pairs of tokens whose scores are held at once
_MANY_PAIRS = 1 << 24  # where that does not have to fit a cache
_NOWHERE = -8  # the code of no token: 0 or 1 below no other


def factors(buckets: int) -> tuple[int, ...]:
    """Even numbers whose product is `buckets`, or where those are many, the next such product of two like numbers.

    Hashing n buckets costs n D / 2 a token, in two factors about 2 sqrt(n) D / 2 (Kitaev et al. 2020, as their code
    has it).
    """
    if buckets <= _SINGLE:
        return (buckets,)
    first = 2 * math.ceil(math.sqrt(buckets) / 2)
    return first, 2 * math.ceil(buckets / first / 2)


def directions(seed: int, factor: int, columns: int, rounds: int, heads: int, width: int) -> Tensor:
    """Normal directions (H, D, R, c). The first columns are the same however many there are: a short item of a batch
    has those it has alone."""
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
        if max((pair[which] for pair in pairs), default=1) > 1:
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
    for some in tokens.split(max(1, _pairs(tokens.device) // max(along.shape[-1], 1)), dim=2):
        lengths = (some @ along).unflatten(-1, (-1, columns))
        best = lengths.abs().masked_fill_(absent, -1.0).argmax(-1, keepdim=True)
        opposite = (lengths.gather(-1, best) < 0).squeeze(-1) & (sizes > 1).view(-1, 1, 1, 1)
        found.append(best.squeeze(-1) + opposite * (sizes // 2).view(-1, 1, 1, 1))
    return torch.cat(found, dim=2).transpose(2, 3)


class Sorted(NamedTuple):
    """Tokens in the order (bucket, position), per round."""

    order: Tensor  # int64 (N, R, L): which token stands at each place
    codes: Tensor  # int32 (N, R, L), by token: i sees the bucket and chunk of j where code_i - code_j is 0 or 1


def in_order(buckets: Tensor, real: Tensor | None, chunk: int, inside: bool) -> Sorted:
    """Tokens sorted by their buckets (N, R, L), those that are not real (N, 1, L) in a bucket of their own at the end.

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
    if inside:
        place = place - torch.where(first, place, 0).cummax(-1).values
    # The next chunk of a bucket is 1 further, what follows in another bucket 2 at least.
    codes = (2 * first + (place % chunk == 0)).cumsum(-1, dtype=torch.int32)
    return Sorted(order, torch.empty_like(codes).scatter_(-1, order, codes))


def near(codes: Tensor, others: Tensor) -> Tensor:
    """Whether tokens with `codes` (..., r) see, in one round, those with `others` (..., k): bool (..., r, k)."""
    return ((codes[..., :, None] - others[..., None, :]) >> 1) == 0


def _pairs(device: torch.device) -> int:
    return _PAIRS.get(device.type, _MANY_PAIRS)


class _Layout(NamedTuple):
    """One round: what stands where, and how the tokens of a round are cut."""

    order: Tensor  # (N, L)
    codes: list[Tensor]  # codes of this round and all before it, in this order: (N, L)
    chunk: int
    back: int  # chunks before its own that a token may see
    causal: bool

    def queries(self, tokens: Tensor) -> Tensor:
        """(N, L, n) by token to (chunks, m, n) in order."""
        return _taken(tokens, self.order).reshape(-1, self.chunk, tokens.shape[-1])

    def keys(self, tokens: Tensor) -> Tensor:
        """(N, L, n) by token to (chunks, (back + 1) m, n): each chunk behind those before it."""
        return self._behind(_taken(tokens, self.order), 0.0)

    def _behind(self, held: Tensor, nothing: float) -> Tensor:
        chunks = held.unflatten(1, (-1, self.chunk))
        front = chunks.new_full((chunks.shape[0], self.back, *chunks.shape[2:]), nothing)
        chunks = torch.cat([front, chunks], dim=1)
        number = chunks.shape[1] - self.back
        return torch.cat([chunks[:, i : i + number] for i in range(self.back + 1)], dim=2).flatten(0, 1)

    def by_token(self, held: Tensor) -> Tensor:
        """(chunks, m, n) in order to (N, L, n) by token."""
        return _put(held.reshape(*self.order.shape, held.shape[-1]), self.order)

    def summed(self, held: Tensor) -> Tensor:
        """(chunks, (back + 1) m, n): what each token got wherever it stood as a key, (N, L, n) by token."""
        number = self.order.shape[1] // self.chunk
        held = held.unflatten(0, (-1, number)).unflatten(2, (self.back + 1, self.chunk))
        total = held[:, :, self.back].clone()
        for i in range(self.back):
            total[:, : max(number - self.back + i, 0)] += held[:, self.back - i :, i]
        return self.by_token(total)

    def shown(self) -> Iterator[tuple[slice, Tensor]]:
        """Slabs of chunks, and which pairs (chunks, m, (back + 1) m) count in this round.

        A pair that several rounds show counts in the first of them: the same sum as all of them with 1 / N each.
        """
        m, wide = self.chunk, (self.back + 1) * self.chunk
        row, column = (torch.arange(n, device=self.order.device) for n in (m, wide))
        apart = column[None, :] - row[:, None] - self.back * m
        open_ = apart < 0 if self.causal else apart != 0
        rows = [codes.reshape(-1, m) for codes in self.codes]
        columns = [self._behind(codes[..., None], _NOWHERE).squeeze(-1) for codes in self.codes]
        for slab in _slabs(rows[0].shape[0], max(1, _pairs(row.device) // (m * wide))):
            pairs = near(rows[0][slab], columns[0][slab]) & open_
            for before, others in zip(rows[1:], columns[1:], strict=True):
                pairs &= ~near(before[slab], others[slab])
            yield slab, pairs


def _slabs(number: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, number)) for start in range(0, number, size))


def _taken(tokens: Tensor, order: Tensor) -> Tensor:
    return tokens.gather(1, order[..., None].expand(-1, -1, tokens.shape[-1]))


def _put(held: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(held).scatter_(1, order[..., None].expand_as(held), held)


def _layouts(sorts: Sorted, chunk: int, causal: bool) -> Iterator[_Layout]:
    # Chunks inside a bucket do not end where those of the layout do: one behind may begin two of these before.
    back = 2 if causal else 1
    for which in range(sorts.order.shape[1]):
        order = sorts.order[:, which]
        rounds = [which, *range(which)]
        yield _Layout(order, [sorts.codes[:, r].gather(1, order) for r in rounds], chunk, back, causal)


class Chunked(torch.autograd.Function):
    """(query, key, value (N, L, n)) -> out (N, L, Dv), lse (N, L): over the pairs that any round shows, each once.

    Scores are formed a slab at a time, and formed again in the backward pass, in the order found in the forward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sorts: Sorted, chunk: int, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out = value.new_zeros(value.shape)
        lse = value.new_full(value.shape[:2], -math.inf)
        for layout in _layouts(sorts, chunk, causal):
            found = _forward(layout, query * scale, key, value)
            out, lse = _merged(out, lse, *found)
        ctx.save_for_backward(query, key, value, out, lse, *sorts)
        ctx.settings = chunk, causal, scale
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, order, codes = ctx.saved_tensors
        chunk, causal, scale = ctx.settings
        given = _Given(query * scale, key, value, lse.masked_fill(lse == -math.inf, 0.0), d_out)
        given = given._replace(delta=(d_out * out).sum(-1) - d_lse)
        total = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        for layout in _layouts(Sorted(order, codes), chunk, causal):
            for sum_, part in zip(total, _backward(layout, given), strict=True):
                sum_ += part
        return total[0] * scale, total[1], total[2], None, None, None, None


class _Given(NamedTuple):
    query: Tensor  # scaled
    key: Tensor
    value: Tensor
    lse: Tensor  # finite
    d_out: Tensor
    delta: Tensor = torch.empty(0)


def _forward(layout: _Layout, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse by token, of the pairs that count in this round."""
    queries, keys, values = layout.queries(query), layout.keys(key), layout.keys(value)
    out, lse = queries.new_empty(*queries.shape[:2], value.shape[-1]), queries.new_empty(*queries.shape[:2], 1)
    for slab, shown in layout.shown():
        scores = (queries[slab] @ keys[slab].mT).masked_fill_(~shown, -math.inf)
        top = scores.amax(-1, keepdim=True)
        top.masked_fill_(top == -math.inf, 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        out[slab] = (weights @ values[slab]) / total.masked_fill(total == 0, 1.0)
        lse[slab] = top + total.log()
    return layout.by_token(out), layout.by_token(lse).squeeze(-1)


def _backward(layout: _Layout, given: _Given) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value by token, from the pairs that count in this round."""
    queries, keys, values = layout.queries(given.query), layout.keys(given.key), layout.keys(given.value)
    d_out = layout.queries(given.d_out)
    lse, delta = layout.queries(given.lse[..., None]), layout.queries(given.delta[..., None])
    d_query, d_key, d_value = torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(values)
    for slab, shown in layout.shown():
        scores = (queries[slab] @ keys[slab].mT).masked_fill_(~shown, -math.inf)
        weights = scores.sub_(lse[slab]).exp_()
        d_value[slab] = weights.mT @ d_out[slab]
        d_scores = (d_out[slab] @ values[slab].mT).sub_(delta[slab]).mul_(weights)
        d_query[slab] = d_scores @ keys[slab]
        d_key[slab] = d_scores.mT @ queries[slab]
    return layout.by_token(d_query), layout.summed(d_key), layout.summed(d_value)


def _merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(lse, other_lse)
    pivot = total.masked_fill(total == -math.inf, 0.0)
    return out * (lse - pivot).exp()[..., None] + other * (other_lse - pivot).exp()[..., None], total
