"""Caches in 8 bits: the same bookkeeping as with floats, of rounded rows.

Shape legend: B batch, Hq/Hkv query/kv heads, T tokens so far, D key width, Dv value width.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import saccade
from looped import looped
from nn.cache.decoding import BIASES, KINDS, MASKS, Decoding
from nn.cache.test_bounds import BAD, KEY, VALUE, filled
from nn.cache.test_sequences import FIXTURES, moves, play
from saccade import ALiBi, Causal, Padding
from saccade.nn import (
    AttentionConfig,
    BlockConfig,
    Decoder,
    GrowingLayer,
    KVCache,
    StaticLayer,
    StreamingLayer,
    WindowLayer,
)
from saccade.nn.cache import BlockSumsLayer, CachedInputs
from saccade.positions import Rotary, RotaryConfig
from saccade.variants import BlockTopKConfig, LinearConfig, SigmoidConfig


def by_hand(x: Tensor) -> Tensor:
    """Rows of float64 as 8 bits stand for them."""
    rows = x.float().numpy()
    scale = np.abs(rows).max(-1, keepdims=True) / np.float32(127)
    return torch.from_numpy(np.rint(rows / scale).astype(np.float64) * scale.astype(np.float64))


class Rounded(Decoding):
    """The parallel forward reads rounded keys and values, and a cache of floats gets the rounded numbers, too."""

    def __init__(self, kind, *given, **more):
        super().__init__(KINDS[kind](), *given, **more)
        self.twin = KINDS[kind]()
        self.cache.round_to("int8")

    def kept(self, x: Tensor) -> Tensor:
        return by_hand(x)

    def append(self, key, value, padding):
        seen = super().append(key, value, padding).in_floats(torch.float64)
        same = self.twin.append(by_hand(key), by_hand(value), self.case.mask, self.bias(), padding)
        for ours, theirs in zip(seen[:2], same[:2], strict=True):  # padding in a long chunk is NaN in both
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert self.cache.length == self.twin.length if isinstance(self.twin.length, int) else True
        return seen

    def rollback(self, count):
        super().rollback(count)
        self.twin.rollback(count if isinstance(count, int) else torch.tensor(count))

    def reorder(self, items):
        super().reorder(items)
        self.twin.reorder(torch.tensor(items))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=7, suppress_health_check=FIXTURES)
@given(sequence=moves(5))
def test_any_sequence(kind, sequence):
    play(Rounded(kind, "documents", "alibi"), sequence)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, suppress_health_check=FIXTURES)
@given(sequence=moves(12), mask=st.sampled_from(list(MASKS)), bias=st.sampled_from(list(BIASES)))
def test_any_longer_sequence(kind, sequence, mask, bias):
    play(Rounded(kind, mask, bias), sequence)


@looped("bad", [name for name in BAD if name != "another dtype"])
@looped("make", [GrowingLayer, lambda: StaticLayer(9), lambda: WindowLayer(4, 1, 2)])
def test_bad_input_is_named_and_costs_nothing(make, bad):
    cache, (attempt, message) = make(), BAD[bad]
    cache.round_to("int8")
    before = filled(cache)._key.clone()
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=message.replace("float32", "int8").replace("float64", "int8")),
    ):
        attempt(cache)
    assert cache.length == 5 and torch.equal(cache._key, before)


@looped(
    ("attempt", "message"),
    [
        (lambda: KVCache.growing(1, dtype="int4"), "dtype: expected 'int8', or None for that of the keys, got 'int4'"),
        (lambda: KVCache([filled(GrowingLayer())], dtype="int8"), "dtype: this GrowingLayer has tokens already"),
        (lambda: decoder(mechanism=LinearConfig()).cache("int8"), "dtype: a RecurrentLayer holds a state"),
        (
            lambda: KVCache.growing(1, dtype="int8")[0].append(KEY.clone().requires_grad_(), VALUE, None),
            "cache: keys and values in 8 bits keep no gradients; decode under torch.no_grad",
        ),
        (lambda: decoder()(torch.randn(1, 1, 24), cache=decoder().cache("int8")), "8 bits keep no gradients"),
    ],
)
def test_refusals(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()


def test_a_cache_that_is_refused_leaves_its_layers_as_they_were():
    first = GrowingLayer()
    with pytest.raises(ValueError, match="has tokens already"):
        KVCache([first, filled(GrowingLayer())], dtype="int8")
    assert torch.equal(filled(first)._key[:, :, :5], KEY)


def decoder(layers=2, **options) -> Decoder:
    given = {"positions": RotaryConfig(), **options}
    return Decoder(BlockConfig(AttentionConfig(24, heads=4, kv_heads=2, **given)), layers=layers).eval()


MAKERS = {
    "growing": (lambda dtype: KVCache.growing(2, dtype=dtype), 32),
    "static": (lambda dtype: KVCache.static(2, 29, dtype=dtype), 30),
    "window": (lambda dtype: KVCache.window(2, 7, sinks=2, slack=1, dtype=dtype), 10),
    "streaming": (lambda dtype: KVCache.streaming(2, 7, sinks=2, dtype=dtype), 9),
    "given": (lambda dtype: KVCache([GrowingLayer(), GrowingLayer()], dtype=dtype), 32),
    "decoder's": (lambda dtype: decoder().cache(dtype), 32),
}


@looped("kind", MAKERS)
@looped("dtype", [torch.float32, torch.bfloat16])
def test_decoders_stay_close_in_less_memory(kind, dtype):
    """As if keys and values were off by at most half a step, relative to the largest 1/254: what two layers of norm 1
    make of it is of that order."""
    make, slots = MAKERS[kind]
    model, x = decoder().to(dtype), torch.randn(3, 19, 24).to(dtype)
    outs = {}
    for name in (None, "int8"):
        cache = make(name)
        with torch.no_grad():
            parts = [model(x[:, :11], cache=cache)] + [model(x[:, i : i + 1], cache=cache) for i in range(11, 19)]
        outs[name] = torch.cat(parts, 1).float()
        row = 2 * 6 * x.itemsize if name is None else 2 * (6 + 4)  # key and value of width 6
        assert cache.nbytes == 2 * 3 * 2 * slots * row and cache.length == 19
    far = (outs["int8"] - outs[None]).abs().max() / outs[None].abs().max()
    assert 0 < far < (0.02 if dtype == torch.float32 else 0.05)


@looped("bias", [None, ALiBi(torch.ones(4).double())])
def test_streams_turn_the_rounded_keys(bias):
    """As a stream of floats that gets the rounded numbers, bit for bit."""
    ours, twin, rotary = StreamingLayer(3, sinks=2, slack=1), StreamingLayer(3, sinks=2, slack=1), Rotary(6)
    ours.round_to("int8")
    for counts in ([5, 5], [1, 1], [4, 1], [1, 0], [2, 3], [9, 7], [1, 1]):
        query, key, value = (torch.randn(2, heads, max(counts), 6).double() for heads in (4, 2, 2))
        found = []
        for cache, kept in ((ours, lambda x: x), (twin, by_hand)):
            given = kept(key), kept(value), Causal(), bias, Padding(counts)
            with torch.no_grad():
                turned, seen = cache.turned(query, *given, rotary) if bias is None else (query, cache.append(*given))
            found.append((turned, *seen.in_floats(torch.float64)))
            cache.rollback(1 if min(cache.lengths()) > 9 else 0)
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
        for cache in (ours, twin):
            cache.reorder(torch.tensor([1, 0]))
    assert ours.nbytes == 2 * 2 * 6 * (6 + 4) * 2


def test_observers_see_floats_and_the_output_belongs_to_them():
    model, seen = decoder(), []
    cache, x = model.cache("int8"), torch.randn(2, 90, 24)
    with torch.no_grad():
        model(x[:, :89], cache=cache)
        model(x[:, 89:], cache=cache, observe=lambda layer, observed: seen.append(observed))
    for one in seen:
        assert one.key.shape == (2, 2, 90, 6) and one.key.dtype == torch.float32
        group = [tensor.double().repeat_interleave(2, 1) for tensor in (one.key, one.value)]
        weights = (one.query.double() @ group[0].mT / 6**0.5).softmax(-1)
        torch.testing.assert_close(one.out.double(), weights @ group[1], rtol=1e-5, atol=1e-6)


@looped("mechanism", [SigmoidConfig(), BlockTopKConfig(block=4, k=2)])
def test_mechanisms_read_the_rounded_floats(mechanism):
    """Against a cache of floats that gets the same numbers."""
    layer, x = decoder(1, mechanism=mechanism).blocks[0].attention, torch.randn(2, 15, 24)
    cache, plain = layer.cache(), layer.cache()
    cache.round_to("int8")
    append = plain.append
    plain.append = lambda key, value, *rest: append(rounded(key), rounded(value), *rest)
    with torch.no_grad():
        for at, stop in ((0, 9), (9, 10), (10, 15)):
            outs = [layer(x[:, at:stop], Causal(), cache=one) for one in (cache, plain)]
            torch.testing.assert_close(*outs, rtol=1e-6, atol=1e-6)
    assert isinstance(cache, BlockSumsLayer) == (mechanism.name == "block-topk")


def rounded(x: Tensor) -> Tensor:
    return saccade.nn.Int8Rows.of(x).floats(x.dtype)


@pytest.mark.slow
def test_beyond_the_capacity_a_compiled_step_is_nan():
    torch._dynamo.reset()
    model = decoder()
    cache, x = KVCache.static(2, 3, dtype="int8"), torch.randn(2, 5, 24)
    with torch.no_grad():
        model(x[:, :2], cache=cache)
        step = torch.compile(lambda x: model(x, cache=cache), backend="eager", fullgraph=True)
        eager = KVCache.static(2, 3, dtype="int8")
        want = [model(x[:, :2], cache=eager), model(x[:, 2:3], cache=eager)][1]
        torch.testing.assert_close(step(x[:, 2:3]), want, rtol=1e-5, atol=1e-5)
        assert step(x[:, 3:4]).isnan().all()


def test_autocast():
    model, x = decoder(), torch.randn(2, 12, 24)
    cache, plain = model.cache("int8"), model.cache()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        outs = [torch.cat([model(x[:, i : i + 1], cache=one) for i in range(12)], 1) for one in (cache, plain)]
    assert (outs[0] - outs[1]).abs().max() < 0.05 * outs[1].abs().max()


def test_a_cache_of_nothing():
    cache = KVCache.growing(1, dtype="int8")
    assert cache.nbytes == 0 and cache.length == 0
    with torch.no_grad():
        seen = cache[0].append(KEY[:, :, :0], VALUE[:, :, :0], Causal())
        assert isinstance(seen, CachedInputs) and seen.key.shape == (2, 3, 0, 7)
    cache.reset()
    with torch.no_grad():
        cache[0].append(KEY[:1], VALUE[:1], Causal())  # another batch, still in 8 bits
    assert cache.nbytes == 16 * 3 * (7 + 4 + 4 + 4)


TEXT = """The harbour was quiet when the first boats came back. Anna counted them from the wall, as she had done every
morning since the storm. There were eleven, and one of them had no mast. Her brother stood beside her and said nothing.
He had wanted to go out with the others, but their father had kept him at home, because somebody had to look after the
nets and the old dog. When the men came up the steps they were tired and wet, and the oldest of them put a basket of
fish in front of the two children."""


@pytest.mark.slow
def test_a_language_model_keeps_its_distributions_step_by_step_and_generates():
    """Of a text drawn from the float model the perplexity P would rise by P times the divergence, on average."""
    lm = saccade.models.load()
    ids, logs = torch.tensor([lm.tokenizer.encode(TEXT).ids]), []
    with torch.no_grad():
        for cache in (lm.cache(), lm.cache("int8")):
            steps = [lm.model(ids[:, [i]], cache=cache)[0].log_softmax(-1) for i in range(ids.shape[1] - 1)]
            logs.append(torch.cat(steps))
    perplexity = logs[0].gather(1, ids[0, 1:, None]).mean().neg().exp()
    divergence = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean()
    assert 0 < perplexity * divergence < 0.01

    greedy, made = saccade.models.Sampling(temperature=0), ids[:, :90]
    out = lm.generate(made, max_new_tokens=6, sampling=greedy, cache=lm.cache("int8"))
    for _ in range(6):  # all tokens as a prompt: more rows than are streamed
        with torch.no_grad():
            logits = lm.model(made, cache=lm.cache("int8"))[:, -1]
        made = torch.cat((made, logits.argmax(-1, keepdim=True)), 1)
    assert torch.equal(out, made)
    beams = lm.generate(
        made,
        max_new_tokens=4,
        sampling=saccade.models.BeamSearch(3),
        cache=KVCache.window(len(lm.cache()), 70, 2, dtype="int8"),
    )
    assert beams.shape == (1, 100)
