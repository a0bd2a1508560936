"""The decoder: its formula, its causality, and its cache."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from saccade import Causal, Window
from saccade.nn import Decoder, DecoderBlock, KVCache, SwiGLU

B, L, WIDTH, HEADS, LAYERS = 2, 11, 24, 6, 3


def make(kv_heads=None, **options) -> Decoder:
    return Decoder(WIDTH, LAYERS, HEADS, kv_heads=kv_heads, hidden=17, **options).double().eval()


def test_swiglu_is_its_formula():
    module = SwiGLU(5, 7).double()
    x = torch.randn(B, L, 5, dtype=torch.float64)
    gate, up = module.gate_up.weight.split(7)
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ module.down.weight.T
    torch.testing.assert_close(module(x), expected)


def test_default_hidden_is_as_large_as_a_plain_layer_four_times_as_wide():
    module = SwiGLU(768)
    assert module.down.in_features == 2048
    assert sum(p.numel() for p in module.parameters()) == 2 * 4 * 768**2


def test_block_is_its_formula():
    block = DecoderBlock(WIDTH, HEADS, hidden=17).double()
    torch.nn.init.normal_(block.attention_norm.weight)
    torch.nn.init.normal_(block.feed_forward_norm.weight)
    x = torch.randn(B, L, WIDTH, dtype=torch.float64)

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight

    after = x + block.attention(norm(x, block.attention_norm.weight), Causal())
    expected = after + block.feed_forward(norm(after, block.feed_forward_norm.weight))
    torch.testing.assert_close(block(x, Causal()), expected)


def test_later_inputs_have_no_gradient_at_all():
    decoder = make()
    x = torch.randn(B, L, WIDTH, dtype=torch.float64, requires_grad=True)
    out = decoder(x)
    for t in (0, 4, L - 1):
        (grad,) = torch.autograd.grad(out[:, t].sum(), x, retain_graph=True)
        assert (grad[:, t + 1 :] == 0).all()
        assert (grad[:, : t + 1].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("kv_heads", [None, 1, 2])
@pytest.mark.parametrize("chunks", [[1] * L, [L], [5, 1, 1, 4], [1, 9, 1]])
def test_cached_decoding_is_the_parallel_forward(kv_heads, chunks):
    decoder = make(kv_heads)
    x = torch.randn(B, L, WIDTH, dtype=torch.float64)
    cache = KVCache(LAYERS)
    parts = []
    for chunk in x.split(chunks, dim=1):
        parts.append(decoder(chunk, cache=cache))
        assert cache.length == sum(part.shape[1] for part in parts)
    torch.testing.assert_close(torch.cat(parts, dim=1), decoder(x))


def test_cached_decoding_under_a_window():
    decoder, mask = make(2), Causal() & Window(3, 0)
    x = torch.randn(B, L, WIDTH, dtype=torch.float64)
    cache = KVCache(LAYERS)
    parts = [decoder(chunk, mask, cache=cache) for chunk in x.split([4, 1, 6], dim=1)]
    whole = decoder(x, mask)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    assert not torch.allclose(whole, decoder(x))


def test_positions_matter():
    decoder = make()
    x = torch.randn(1, 1, WIDTH, dtype=torch.float64).expand(1, 2, WIDTH)
    first, second = torch.randn(2, 1, 1, WIDTH, dtype=torch.float64)
    here = decoder(torch.cat((first, second, x), dim=1))[:, -1]
    there = decoder(torch.cat((second, first, x), dim=1))[:, -1]
    assert not torch.allclose(here, there)


def test_observer_is_told_the_layer():
    decoder = make(2)
    layers = []
    decoder(
        torch.randn(B, L, WIDTH, dtype=torch.float64),
        observe=lambda layer, query, key, value, mask: layers.append((layer, query.shape[1], key.shape[1], mask)),
    )
    assert layers == [(layer, HEADS, 2, Causal()) for layer in range(LAYERS)]


def test_dropout_acts_in_training_only():
    decoder = make(dropout=0.3)
    x = torch.randn(B, L, WIDTH, dtype=torch.float64)
    assert torch.equal(decoder(x), decoder(x))
    decoder.train()
    assert not torch.allclose(decoder(x), decoder(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Decoder(16, 0, 4), "layers: must be at least 1, got 0"),
        (lambda: Decoder(16, 2, 3), "heads: must divide the width, got heads=3 and width=16"),
        (lambda: Decoder(12, 2, 4), "width: rotary .* even, got 3"),
        (
            lambda: Decoder(16, 2, 4)(torch.zeros(1, 3, 16), cache=KVCache(3)),
            "cache: made for 3 layers, but the decoder has 2",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
