"""Sequences decoded through a cache, and what each row must be: a softmax over the tokens so far, each item alone.

Shape legend: B batch, Hq/Hkv query/kv heads, L new rows, T tokens so far, D key width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import (
    ALiBi,
    Causal,
    Documents,
    FromTensor,
    Global,
    Padding,
    PerHead,
    Predicate,
    Prefix,
    RelativeBias,
    Score,
    Window,
    attention,
)
from saccade.nn.cache import GrowingLayer, StaticLayer, WindowLayer

B, HQ, HKV, D, DV = 3, 4, 2, 6, 5
LONGEST = 41
# Sums of at most 41 products of order 1 in float64: an error of 41 * 2^-53, and some more for exp and turning.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}

DOCUMENTS = torch.randint(0, 3, (B, LONGEST), generator=torch.Generator().manual_seed(3))
TABLE = torch.rand(B, HQ, LONGEST, LONGEST, generator=torch.Generator().manual_seed(5)) < 0.7
SCORES = torch.randn(1, HQ, LONGEST, LONGEST, generator=torch.Generator().manual_seed(7)).double()
PREFIXES = [1, 4, 7]
BUCKETS = torch.randn(8, HQ, generator=torch.Generator().manual_seed(9)).double()
PRODUCTS = torch.randn(HQ, 11, generator=torch.Generator().manual_seed(6), dtype=torch.float64)

Shows = Callable[[int, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """A mask, and its meaning: whether item b shows key j to position p, (Hq or 1, T, T) from p (T, 1) and j (1, T)."""

    mask: Any
    shows: Shows


def causal(b, p, j):
    return j <= p


MASKS = {
    "causal": Case(Causal(), causal),
    "none": Case(None, lambda b, p, j: (p >= 0) & (j >= 0)),
    "window": Case(Causal() & Window(4, 0), lambda b, p, j: (j <= p) & (p - j <= 4)),
    "documents": Case(Causal() & Documents(DOCUMENTS), lambda b, p, j: (j <= p) & (DOCUMENTS[b][p] == DOCUMENTS[b][j])),
    "prefix": Case(Prefix(PREFIXES), lambda b, p, j: (j < PREFIXES[b]) | (j <= p)),
    "global": Case(
        Causal() & (Window(3, 0) | Global([2, 5])),
        lambda b, p, j: (j <= p) & ((p - j <= 3) | (j == 2) | (j == 5) | (p == 2) | (p == 5)),
    ),
    "tensor": Case(FromTensor(TABLE) & Causal(), lambda b, p, j: TABLE[b][:, p, j] & (j <= p)),
    "not": Case(~Window(2, None) | Window(0, 0), lambda b, p, j: (p - j > 2) | (p == j)),
    "by head": Case(
        PerHead([Causal(), Window(1, 0), Causal(), Window(3, 0)]),
        lambda b, p, j: torch.stack([j <= p, (j <= p) & (p - j <= 1), j <= p, (j <= p) & (p - j <= 3)]),
    ),
    "predicate": Case(
        Predicate(lambda b, h, q, k: (k <= q) & ((q + k) % 3 != 0)), lambda b, p, j: (j <= p) & ((p + j) % 3 != 0)
    ),
    "keys hidden": Case(Causal() & Padding([30, 3, 17]), lambda b, p, j: (j <= p) & (j < [30, 3, 17][b])),
}

BIASES: dict[str, tuple[Callable[[], Any], Callable[[Tensor, Tensor], Tensor] | None]] = {
    "no bias": (lambda: None, None),
    "alibi": (
        lambda: ALiBi(ALiBi.slopes(HQ).double()),
        lambda p, j: -ALiBi.slopes(HQ).double()[:, None, None] * (p - j).abs(),
    ),
    "relative": (
        lambda: RelativeBias(BUCKETS, bidirectional=False, max_distance=20),
        lambda p, j: (
            RelativeBias(BUCKETS, bidirectional=False, max_distance=20)
            ._score(BUCKETS, (j - p).flatten())
            .view(HQ, *(j - p).shape)
        ),
    ),
    "dense": (lambda: SCORES, lambda p, j: SCORES[0][:, p, j]),
    "score": (
        lambda: Score(lambda s, b, h, q, k: s + PRODUCTS[h, (q * k) % 11]),
        lambda p, j: PRODUCTS[:, (p * j) % 11],
    ),
}

KINDS: dict[str, Callable[[], Any]] = {
    "growing": GrowingLayer,
    "static": lambda: StaticLayer(LONGEST),
    "static tensors": lambda: whole_buffers(StaticLayer(LONGEST)),
    "window": lambda: WindowLayer(5),
    "window slack": lambda: WindowLayer(5, slack=3),
    "sinks": lambda: WindowLayer(4, sinks=2),
    "sinks slack": lambda: WindowLayer(3, sinks=3, slack=2),
    "window 1": lambda: WindowLayer(1),
}


def whole_buffers(cache: StaticLayer) -> StaticLayer:
    """A static cache that goes the way it takes on a GPU."""
    cache._keeps_shapes = lambda key: True  # type: ignore[method-assign]
    return cache


def own_shows(cache: Any, p: Tensor, j: Tensor) -> Tensor:
    """What the cache itself shows."""
    if not isinstance(cache, WindowLayer):
        return torch.ones((), dtype=torch.bool)
    return ((j <= p) & (p - j < cache.window)) | (j < cache.sinks) | (p < cache.sinks)


def turned(x: Tensor, place: Tensor) -> Tensor:
    """Rotary positions by complex numbers: x (..., L, D) turned by place (L,) or (B, 1, L)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    speed = torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)
    angle = place[..., None].double() * speed
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


class Token(NamedTuple):
    query: Tensor  # (Hq, D)
    key: Tensor  # (Hkv, D)
    value: Tensor  # (Hkv, Dv)


def draw(generator: torch.Generator) -> Token:
    sizes = ((HQ, D), (HKV, D), (HKV, DV))
    return Token(*(torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes))


class Decoding:
    """Tokens go into a cache step by step, and every row that comes out is compared."""

    def __init__(self, cache, mask="causal", bias="no bias", *, batch=B, seed=0):
        self.cache, self.case = cache, MASKS[mask]
        self.bias, self.scores = BIASES[bias]
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens: list[list[Token]] = [[] for _ in range(batch)]

    def expected(self, item: int) -> Tensor:
        """(Hq, T, Dv): the parallel forward of one item alone over all its tokens."""
        query, key, value = (torch.stack(x, 1) for x in zip(*self.tokens[item], strict=True))
        place = torch.arange(query.shape[1])
        query, key, value = turned(query, place), self.kept(turned(key, place)), self.kept(value)
        key, value = (x.repeat_interleave(HQ // HKV, 0) for x in (key, value))
        p, j = place[:, None], place[None]
        logits = query @ key.mT / D**0.5
        if self.scores is not None:
            logits = logits + self.scores(p, j)
        seen = self.case.shows(item, p, j) & own_shows(self.cache, p, j)
        weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
        return weights.nan_to_num(0.0) @ value  # rows that see nothing are 0

    def kept(self, x: Tensor) -> Tensor:
        """A key or value as the cache keeps it."""
        return x

    def step(self, counts: list[int], rows: int | None = None, side: str = "right") -> None:
        """Add `counts[b]` new tokens to item b, in `rows` rows padded on a side with NaN."""
        rows = max(counts) if rows is None else rows
        left = [rows - n if side == "left" else (rows - n) // 2 if side == "middle" else 0 for n in counts]
        new = [[draw(self.generator) for _ in range(n)] for n in counts]
        for old, more in zip(self.tokens, new, strict=True):
            old.extend(more)
        real = torch.zeros(len(counts), rows, dtype=torch.bool)
        given = [
            torch.full((len(counts), h, rows, w), float("nan")).double() for h, w in ((HQ, D), (HKV, D), (HKV, DV))
        ]
        for b, tokens in enumerate(new):
            for i, token in enumerate(tokens):
                real[b, left[b] + i] = True
                for into, x in zip(given, token, strict=True):
                    into[b, :, left[b] + i] = x
        padding = None if real.all() else Padding(torch.tensor(counts) if side == "right" else real)
        out = self.attend(*given, padding)
        for b, n in enumerate(counts):
            assert not out[b][:, ~real[b]].any(), "a padded row is not 0"
            if n:
                torch.testing.assert_close(out[b][:, real[b]], self.expected(b)[:, -n:], **CLOSE)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, padding: Padding | None) -> Tensor:
        with torch.no_grad():
            offset = self.offset(query.shape[2], padding)
            place = torch.arange(query.shape[2])
            place = place + offset if isinstance(offset, int) else (place + offset[:, None])[:, None]
            seen = self.append(turned(key, place), value, padding)
        return attention(turned(query, place), seen.key, seen.value, seen.mask, bias=seen.bias)

    def offset(self, rows: int, padding: Padding | None) -> int | Tensor:
        return self.cache.offset(rows, padding)

    def append(self, key: Tensor, value: Tensor, padding: Padding | None) -> Any:
        return self.cache.append(key, value, self.case.mask, self.bias(), padding)

    def rollback(self, count: int | list[int]) -> None:
        counts = [count] * len(self.tokens) if isinstance(count, int) else count
        self.cache.rollback(count if isinstance(count, int) else torch.tensor(count))
        self.tokens = [old[: len(old) - n] for old, n in zip(self.tokens, counts, strict=True)]

    def reorder(self, items: list[int]) -> None:
        self.cache.reorder(torch.tensor(items))
        self.tokens = [list(self.tokens[b]) for b in items]

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]
