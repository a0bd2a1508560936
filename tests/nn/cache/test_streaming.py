"""The streaming cache against a loop that builds each row's list of tokens and counts positions along it.

Shape legend: B batch, HQ/HKV query/kv heads, L new rows, D key width, DV value width.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from looped import looped
from saccade import ALiBi, Causal, Padding, RelativeBias, Window, attention
from saccade.models import DecoderLM, ModelConfig, Sampling
from saccade.models.generation import sample_tokens
from saccade.nn import AttentionConfig, KVCache, MultiHeadAttention, StreamingLayer, WindowLayer
from saccade.positions import AlibiConfig, Rotary, RotaryConfig
from slowly import alternate

B, HQ, HKV, D, DV = 3, 4, 2, 6, 5
BASE = 7.0
# Sums of at most 20 products of order 1 in float64, and some more for exp and turning.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
SIZES = [(5, 2), (3, 4), (4, 0), (1, 1), (1, 0)]  # (window, sinks)


def turned(x: Tensor, place: Tensor) -> Tensor:
    """Pairs (i, i + D/2) of x (H, n, D) as complex numbers, times exp(1j * place * BASE ** (-2 i / D))."""
    first, second = x.chunk(2, -1)
    speed = BASE ** (-2.0 * torch.arange(D // 2, dtype=torch.float64) / D)
    pairs = torch.complex(first, second) * torch.exp(1j * place[:, None].double() * speed)
    return torch.cat((pairs.real, pairs.imag), -1)


class Stream:
    """Tokens go into a cache step by step; each row that comes out is compared with its own list."""

    def __init__(self, cache, *, scores=None, bias=None, mask=None, batch=B, seed=0):
        self.cache, self.scores, self.bias, self.mask = cache, scores, bias, mask
        self.rotary = Rotary(D, BASE)
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in range(batch)]

    def draw(self):
        sizes = ((HQ, D), (HKV, D), (HKV, DV))
        return tuple(torch.randn(*size, generator=self.generator, dtype=torch.float64) for size in sizes)

    def expected(self, item: int, row: int) -> Tensor:
        """(HQ, DV) of one token."""
        window, sinks = self.cache.window, self.cache.sinks
        listed = [n for n in range(row + 1) if n < sinks]
        listed += [n for n in range(max(sinks, row - window + 1), row + 1)]
        if row < sinks:
            assert listed == list(range(row + 1))
        query = self.tokens[item][row][0][:, None]
        key, value = (torch.stack([self.tokens[item][n][side] for n in listed], 1) for side in (1, 2))
        place = torch.arange(len(listed))
        own = place[-1:]
        if self.scores is None:
            query, key = turned(query, own), turned(key, place)
        key, value = (x.repeat_interleave(HQ // HKV, 0) for x in (key, value))
        logits = query @ key.mT / D**0.5
        if self.scores is not None:
            logits = logits + self.scores(place - own)
        if self.mask is not None:
            seen = torch.tensor([self.mask[1](row, n) for n in listed])
            logits = logits.masked_fill(~seen, float("-inf"))
        return (logits.softmax(-1) @ value)[:, 0]

    def step(self, counts: list[int], rows: int | None = None, side: str = "right") -> None:
        rows = max(counts) if rows is None else rows
        left = [rows - n if side == "left" else (rows - n) // 2 if side == "middle" else 0 for n in counts]
        given = [
            torch.full((len(counts), h, rows, n), float("nan"), dtype=torch.float64)
            for h, n in ((HQ, D), (HKV, D), (HKV, DV))
        ]
        real = torch.zeros(len(counts), rows, dtype=torch.bool)
        for item, count in enumerate(counts):
            for n in range(count):
                token = self.draw()
                self.tokens[item].append(token)
                real[item, left[item] + n] = True
                for tensor, part in zip(given, token, strict=True):
                    tensor[item, :, left[item] + n] = part
        padding = None if real.all() else Padding(real)
        mask = Causal() if self.mask is None else self.mask[0]
        bias = None if self.bias is None else self.bias()
        if self.scores is None:
            query, seen = self.cache.turned(*given, mask, bias, padding, self.rotary)
        else:
            query, seen = given[0], self.cache.append(*given[1:], mask, bias, padding)
        out = attention(query, seen.key, seen.value, seen.mask, bias=seen.bias)
        for item, count in enumerate(counts):
            for n in range(count):
                row = len(self.tokens[item]) - count + n
                torch.testing.assert_close(out[item, :, left[item] + n], self.expected(item, row), **CLOSE)
        assert out.masked_select(~real[:, None, :, None]).eq(0).all()

    def rollback(self, counts: list[int]) -> None:
        self.cache.rollback(counts[0] if len(set(counts)) == 1 else torch.tensor(counts))
        for tokens, count in zip(self.tokens, counts, strict=True):
            del tokens[len(tokens) - count :]

    def reorder(self, items: list[int]) -> None:
        self.cache.reorder(torch.tensor(items))
        self.tokens = [list(self.tokens[item]) for item in items]


CHUNKS = {
    "ones": [1] * 19,
    "prompt": [11, 1, 1, 1, 1, 1],
    "across": [4, 3, 2, 3, 4, 1, 3],
    "longer": [2, 13, 1, 10, 9, 1],
    "with nothing": [3, 0, 1, 0, 8],
}
UNEVEN = {
    "right": [([7, 2, 4], "right"), ([1, 1, 1], "right"), ([3, 1, 2], "right"), ([1, 1, 1], "right")],
    "left": [([7, 2, 4], "left"), ([1, 1, 1], "left"), ([2, 4, 1], "left"), ([1, 1, 1], "left")],
    "finished": [([3, 5, 2], "left"), ([1, 0, 1], "right"), ([0, 0, 1], "right"), ([1, 1, 0], "left")],
    "long": [([2, 9, 12], "right"), ([13, 1, 8], "left"), ([6, 11, 7], "middle"), ([1, 0, 1], "right")],
    "same": [([3, 3, 3], "middle"), ([1, 1, 1], "left"), ([9, 9, 9], "left"), ([2, 2, 2], "right")],
}


@pytest.mark.parametrize(("size", "slack", "chunks"), alternate(SIZES, [0, 3], [*CHUNKS]))
def test_positions_are_places_in_the_list(size, slack, chunks):
    window, sinks = size
    stream = Stream(StreamingLayer(window, sinks, slack))
    for count in CHUNKS[chunks]:
        stream.step([count] * B)
    assert stream.cache.length == sum(CHUNKS[chunks])


@pytest.mark.slow
@looped("window, sinks", SIZES)
@looped("steps", UNEVEN)
def test_items_of_their_own_lengths(window, sinks, steps):
    stream = Stream(StreamingLayer(window, sinks))
    for counts, side in UNEVEN[steps]:
        stream.step(counts, rows=max(counts) + (2 if steps == "same" else 0), side=side)


def test_a_step_of_one_token_stands_within_the_cache():
    """Not only its distances: what reaches the rotary positions is a place in the list."""
    asked = []

    def turn(x: Tensor, offset: int | Tensor) -> Tensor:
        asked.append((offset, x.shape[2]))
        return x

    cache = StreamingLayer(3, 2)
    for count in (4, *[1] * 8):
        key = torch.randn(B, HKV, count, D)
        cache.turned(torch.randn(B, HQ, count, D), key, key, Causal(), None, None, turn)
    assert asked == [(0, 4), (0, 4), *[(4, 1), (0, 5)] * 8]
    assert (cache.reach(1), cache.reach(100), StreamingLayer(3, 2).reach(4)) == (5, 5, 4)


def test_reorder_and_rollback():
    stream = Stream(StreamingLayer(4, 2, slack=3))
    stream.step([9, 9, 9])
    stream.rollback([3, 3, 3])
    stream.step([1, 1, 1])
    stream.reorder([2, 0])
    stream.step([2, 2])
    stream.rollback([1, 0])
    stream.step([1, 3], side="left")
    stream.reorder([1, 1, 0, 1])
    for _ in range(5):
        stream.step([1] * 4)
    with pytest.raises(ValueError, match="rollback: 4 tokens, but a ring of slack 3"):
        stream.cache.rollback(4)
    stream.cache.reset()
    stream.tokens = [[]]
    stream.step([8])
    stream.step([1])


def test_an_early_rollback_leaves_what_the_ring_still_holds():
    stream = Stream(StreamingLayer(5, 1, slack=4))
    stream.step([11] * B)
    stream.rollback([4] * B)
    stream.step([1] * B)
    short = Stream(StreamingLayer(2, 1, slack=7))
    short.step([11] * B)
    short.rollback([7] * B)
    short.step([3] * B)


@pytest.mark.parametrize("name", ["alibi", "relative"])
@pytest.mark.parametrize("window, sinks", [(5, 2), (3, 4), (4, 0)])
def test_biases_take_the_same_places(name, window, sinks):
    table = torch.randn(8, HQ, generator=torch.Generator().manual_seed(9)).double()
    slopes = ALiBi.slopes(HQ).double()
    if name == "alibi":
        given, scores = lambda: ALiBi(slopes), lambda distance: slopes[:, None, None] * distance
    else:
        given = lambda: RelativeBias(table, bidirectional=False, max_distance=20)  # noqa: E731
        scores = lambda distance: given()._score(table, distance).view(HQ, 1, -1)  # noqa: E731
    for steps in (UNEVEN["long"], [([n] * B, "right") for n in CHUNKS["across"]]):
        stream = Stream(StreamingLayer(window, sinks), bias=given, scores=scores)
        for counts, side in steps:
            stream.step(counts, side=side)


def test_the_mask_of_a_call_counts_places_in_the_text():
    mask = Causal() & ~Window(2, 0) | Window(0, 0)
    stream = Stream(StreamingLayer(5, 2), mask=(mask, lambda p, j: p - j > 2 or p == j))
    for count in (3, 9, 1, 1, 2, 7):
        stream.step([count] * B)


def test_without_positions_it_is_a_window():
    generator = torch.Generator().manual_seed(3)
    ours, other = StreamingLayer(4, 2, slack=1), WindowLayer(4, 2, slack=1)
    for count in (3, 8, 1, 1, 5):
        query, key, value = (torch.randn(B, h, count, n, generator=generator) for h, n in ((HQ, D), (HKV, D), (HKV, 3)))
        outs = []
        for cache in (ours, other):
            seen = cache.append(key, value, Causal())
            outs.append(attention(query, seen.key, seen.value, seen.mask))
        assert torch.equal(*outs)


def heads_of(module: MultiHeadAttention, x: Tensor):
    """query (HQ, n, D), key and value (HQ, n, ...) of one item's tokens (n, E)."""
    (wq, _), (wk, _), (wv, _) = module.matrices()
    query, key, value = (
        (x @ w.T).unflatten(-1, (-1, width)).transpose(0, 1) for w, width in ((wq, D), (wk, D), (wv, D))
    )
    return query, *(t.repeat_interleave(query.shape[0] // key.shape[0], 0) for t in (key, value))


def test_in_a_module_the_whole_stream_is_the_loop():
    torch.manual_seed(5)
    config = AttentionConfig(HQ * D, HQ, kv_heads=HKV, positions=RotaryConfig(BASE), bias=False)
    module = MultiHeadAttention(config).double()
    x = torch.randn(2, 23, HQ * D, dtype=torch.float64)
    cache = StreamingLayer(4, 2)
    with torch.no_grad():
        parts = [module(part, Causal(), cache=cache) for part in x.split([3, 1, 1, 7, 1, 1, 1, 5, 3], 1)]
        out = torch.cat(parts, 1)
        for item in range(2):
            query, key, value = heads_of(module, x[item])
            for row in range(23):
                listed = sorted({n for n in range(row + 1) if n < 2 or n > row - 4})
                place = torch.arange(len(listed))
                logits = turned(query[:, row : row + 1], place[-1:]) @ turned(key[:, listed], place).mT / D**0.5
                read = (logits.softmax(-1) @ value[:, listed]).transpose(0, 1).flatten(1)
                torch.testing.assert_close(out[item, row], module.output(read)[0], **CLOSE)
        with pytest.raises(ValueError, match="offset: a StreamingLayer counts positions within itself"):
            module(x[:, :1], Causal(), cache=cache, offset=3)


def test_in_a_module_with_alibi():
    torch.manual_seed(6)
    module = MultiHeadAttention(AttentionConfig(HQ * D, HQ, positions=AlibiConfig(), bias=False)).double()
    x = torch.randn(1, 13, HQ * D, dtype=torch.float64)
    cache, slopes = StreamingLayer(3, 1), ALiBi.slopes(HQ).double()[:, None, None]
    with torch.no_grad():
        out = torch.cat([module(part, Causal(), cache=cache) for part in x.split([2, 5, 1, 1, 4], 1)], 1)
        query, key, value = heads_of(module, x[0])
        for row in range(13):
            listed = sorted({n for n in range(row + 1) if n < 1 or n > row - 3})
            distance = torch.arange(len(listed)) - (len(listed) - 1)
            logits = query[:, row : row + 1] @ key[:, listed].mT / D**0.5 + slopes * distance
            read = (logits.softmax(-1) @ value[:, listed]).transpose(0, 1).flatten(1)
            # Slopes are float32 numbers in the module: exact here, being powers of two.
            torch.testing.assert_close(out[0, row], module.output(read)[0], **CLOSE)


def small_lm(context: int) -> DecoderLM:
    torch.manual_seed(7)
    return DecoderLM(ModelConfig(vocabulary=31, width=24, layers=2, heads=4, kv_heads=2, hidden=17, context=context))


@pytest.mark.slow
def test_a_stream_goes_on_beyond_the_context():
    model = small_lm(context=11).eval()
    greedy = Sampling(temperature=0.0)
    whole = list(sample_tokens(model, [1, 2, 3], 40, greedy))
    assert len(whole) == 8
    streamed = list(sample_tokens(model, [1, 2, 3], 40, greedy, KVCache.streaming(2, window=7, sinks=4)))
    assert len(streamed) == 40 and streamed[:8] == whole
    # With exactly the keys of the model's own cache while nothing is dropped, and other ones after.
    long = list(sample_tokens(model, list(range(1, 26)), 5, greedy, KVCache.streaming(2, window=7, sinks=4)))
    assert len(long) == 5


def test_a_window_beyond_the_context_is_refused_when_it_is_reached():
    model = small_lm(context=11).eval()
    cache = KVCache.streaming(2, window=8, sinks=4)
    assert len(list(sample_tokens(model, [1, 2, 3], 40, Sampling(temperature=0.0), cache))) == 8
    with pytest.raises(ValueError, match="12 are more than the model's context of 11"):
        model(torch.zeros(1, 12, dtype=torch.long), cache=KVCache.streaming(2, window=8, sinks=4))


def test_memory_does_not_grow():
    cache = StreamingLayer(4, 2)
    seen = set()
    for _ in range(9):
        x = torch.randn(1, HKV, 3, D)
        cache.append(x, x, Causal())
        seen.add(cache.nbytes)
    assert seen == {2 * 6 * HKV * D * 4}


def test_refusals():
    x = torch.randn(1, HKV, 3, D)
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        StreamingLayer(0)
    with pytest.raises(ValueError, match="sinks must be at least 0, got -1"):
        StreamingLayer(4, -1)
    with pytest.raises(ValueError, match="bias: a tensor depends on absolute positions"):
        StreamingLayer(4).append(x, x, Causal(), torch.zeros(1, 1, 3, 3))
    with pytest.raises(ValueError, match="StreamingLayer: writes in place and keeps no gradients"):
        StreamingLayer(4).turned(x, x.clone().requires_grad_(), x, Causal(), None, None, Rotary(D))
    with pytest.raises(ValueError, match="mask: with a cache it must not be placed"):
        StreamingLayer(4).turned(x, x, x, Causal().at(0), None, None, Rotary(D))
    cache = StreamingLayer(4)
    cache.append(x, x, Causal())
    with pytest.raises(ValueError, match="a cache serves one batch and one module"):
        cache.turned(x.repeat(2, 1, 1, 1), *[x.repeat(2, 1, 1, 1)] * 2, Causal(), None, None, Rotary(D))
    assert cache.length == 3
