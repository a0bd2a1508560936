"""The anomaly report: numbers by hand, the right place for a fault planted anywhere, and linear memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import saccade
from looped import looped
from saccade.models import DecoderLM, ModelConfig
from saccade.nn import AttentionConfig, MultiHeadAttention, Observation
from saccade.training import find_anomaly
from saccade.training.anomaly import _logits, _statistics, _weights

CONFIG = ModelConfig(31, width=20, layers=3, heads=2, kv_heads=1, hidden=16, context=23)  # heads 10 wide
QUERY, KEY, VALUE = slice(0, 20), slice(20, 30), slice(30, 40)


def make(dropout=0.0):
    torch.manual_seed(3)
    config = ModelConfig(**{**CONFIG.to_dict(), "dropout": dropout})
    return DecoderLM(config), torch.randint(0, 31, (2, 14))


def test_a_sound_model_has_no_anomaly_and_keeps_its_gradients():
    model, tokens = make(dropout=0.3)
    model.train()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    report = find_anomaly(model, tokens)
    assert report.found is None
    assert report.parameters == ()
    assert all((parameter.grad == 7.0).all() for parameter in model.parameters())
    places = [entry.place for entry in report.clean]
    assert places[0] == "output of embedding"
    for layer in range(3):
        names = [f"layer {layer}: {name}" for name in ("query", "key", "value", "logits", "weights", "out")]
        first = places.index(names[0])
        assert places[first : first + 6] == names
        assert places.index(f"residual stream after layer {layer}") > first
    assert places.index("logits of the model") < places.index("loss") < places.index("gradient of embedding.weight")
    assert str(report) == f"every one of {len(places)} tensors is finite"
    shapes = {entry.place: entry.shape for entry in report.clean}
    assert shapes["layer 1: query"] == (2, 2, 13, 10)
    assert shapes["layer 1: key"] == (2, 1, 13, 10)
    assert shapes["layer 1: weights"] == (2, 2, 13, 13)
    assert shapes["logits of the model"] == (2, 13, 31)
    counts = {entry.place: entry.count for entry in report.clean}
    assert counts["layer 2: logits"] == 2 * 2 * 13 * 14 / 2  # causal: those that are seen


@looped(
    ("rows", "factor", "place"),
    [
        (QUERY, math.nan, "layer 1: query"),
        (KEY, math.inf, "layer 1: key"),
        (VALUE, math.nan, "layer 1: value"),
        (slice(0, 30), 1e20, "layer 1: logits"),  # 1e40 is beyond float32
    ],
)
def test_faults_in_attention(rows, factor, place):
    model, tokens = make()
    with torch.no_grad():
        model.decoder.blocks[1].attention.projection.weight[rows] *= factor
    report = find_anomaly(model, tokens)
    assert report.found.place == report.place == place
    assert report.found.nan + report.found.infinite > 0
    assert all(entry.finite for entry in report.clean)
    assert ("decoder.blocks.1.attention.projection.weight" in report.parameters) == (not math.isfinite(factor))
    assert str(report).startswith(f"first not finite: {place} ")


@looped(
    ("module", "place"),
    [
        ("embedding", "output of embedding"),
        ("decoder.blocks.0.attention_norm", "output of decoder.blocks.0.attention_norm"),
        ("decoder.blocks.2.attention", "output of decoder.blocks.2.attention"),
        ("decoder.blocks.1.feed_forward.down", "output of decoder.blocks.1.feed_forward.down"),
        ("decoder.blocks.1", "residual stream after layer 1"),
        ("decoder.norm", "output of decoder.norm"),
    ],
)
def test_faults_in_modules(module, place):
    model, tokens = make()

    def spoil(module, inputs, output):
        output = output.clone()
        output[1, 4, 3] = -math.inf
        return output

    model.get_submodule(module).register_forward_hook(spoil)
    found = find_anomaly(model, tokens).found
    assert found.place == place
    assert (found.nan, found.infinite) == (0, 1)


def test_an_overflow_between_attention_and_feed_forward_is_the_residual_stream():
    model, tokens = make()
    largest = torch.finfo(torch.float32).max
    block = model.decoder.blocks[0]
    block.register_forward_pre_hook(lambda module, inputs: (torch.full_like(inputs[0], largest), *inputs[1:]))
    block.attention.register_forward_hook(lambda module, inputs, output: torch.full_like(output, largest))
    assert find_anomaly(model, tokens).place == "residual stream before decoder.blocks.0.feed_forward_norm"


def test_gradients_are_named_in_the_order_of_the_backward_pass():
    model, tokens = make()
    for name in ("embedding", "decoder.blocks.0.feed_forward.down", "decoder.blocks.2.attention.output"):
        model.get_submodule(name).weight.register_hook(lambda gradient: gradient * math.nan)
    report = find_anomaly(model, tokens)
    assert report.place == "gradient of decoder.blocks.2.attention.output.weight"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_numbers_of_a_tensor():
    values = torch.tensor([[1.0, -3.0, math.nan], [math.inf, 8.0, -math.inf]])
    whole = _statistics("here", (2, 3), [(values, None)])
    parts = _statistics("here", (2, 3), [(values[:1], None), (values[1:], None)])
    assert whole == parts
    assert (whole.minimum, whole.maximum, whole.mean) == (-3.0, 8.0, 2.0)
    assert (whole.count, whole.nan, whole.infinite) == (6, 1, 2)
    assert str(whole) == "here (2, 3): min -3, max 8, mean 2; 3 of 6 not finite (1 NaN, 2 infinite)"
    chosen = _statistics("here", (2, 3), [(values, torch.tensor([[True, True, False], [False, True, False]]))])
    assert chosen.finite
    assert chosen.count == 3


def observed(attention, x, mask):
    seen: list[Observation] = []
    with torch.no_grad():
        attention(x, mask, observe=seen.append)
    return seen[0]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_and_weights_are_those_of_the_call(softcap, bias):
    torch.manual_seed(5)
    config = AttentionConfig(20, 4, kv_heads=2, softcap=softcap, scale=0.7, sink=True)
    attention = MultiHeadAttention(config)
    nn.init.normal_(attention.sink)
    length = 301  # more than one tile
    mask = saccade.Causal() & saccade.Window(77, 0)
    seen = observed(attention, torch.randn(3, length, 20), mask)
    added = torch.randn(1, 4, length, length) if bias else None
    if bias:
        added[..., 5] = -math.inf
        seen = replace(seen, bias=added)
    expected = seen.query @ seen.key.repeat_interleave(2, 1).transpose(-1, -2) * 0.7
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    allowed = mask.dense(length, length).expand(3, 4, length, length)
    if bias:
        expected, allowed = expected + added, allowed & (added > -math.inf)
    pairs = [(part, counts.expand(part.shape)) for part, counts in _logits(seen)]
    came = torch.cat([part[counts] for part, counts in pairs])
    assert came.numel() == allowed.sum()
    torch.testing.assert_close(came.sort().values, expected[allowed].sort().values, atol=2e-5, rtol=1e-5)
    masked = torch.where(allowed, expected, -math.inf)
    with_sink = torch.cat([masked, seen.sink[None, :, None, None].expand(3, 4, length, 1)], dim=-1)
    weights = torch.cat([part for part, _ in _weights(seen)], dim=2)
    torch.testing.assert_close(weights, with_sink.softmax(-1)[..., :-1], atol=1e-6, rtol=1e-4)


def test_hidden_entries_do_not_count():
    seen = observed(MultiHeadAttention(AttentionConfig(20, 2)), torch.randn(1, 7, 20), saccade.Causal())
    seen.key[:, :, -1] = 1e25
    seen.query[:, :, -1] = 0.0  # the only row that sees the last key
    seen.query[:, :, :-1] *= 1e25
    seen.key[:, :, :-1] = 0.0
    assert _statistics("logits", (), _logits(seen)).finite


@pytest.mark.slow
def test_memory_is_linear_in_the_length():
    length = 4099
    seen = observed(MultiHeadAttention(AttentionConfig(4, 1)), torch.randn(1, length, 4), saccade.Causal())
    largest = max(part.numel() for parts in (_logits(seen), _weights(seen)) for part, _ in parts)
    assert largest <= 256 * length  # of 4099 rows
