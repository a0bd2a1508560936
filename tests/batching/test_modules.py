"""One batch four ways: padded, packed, nested and one by one give equal outputs and equal gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from looped import looped
from saccade import Causal, Dilated, PerHead, Strided, Window
from saccade.batching import fill_padding, nested_like, pack, packed_nested, pad, unpack, unpad
from saccade.nn import AttentionConfig, BlockConfig, Decoder, DecoderBlock, Encoder, EncoderBlock, MultiHeadAttention
from saccade.positions import AlibiConfig, RotaryConfig, T5Config
from slowly import slow_after

WIDTH, HEADS = 12, 2
LENGTHS = [7, 1, 0, 5, 11]
POSITIONS = {"none": None, "rotary": RotaryConfig(), "alibi": AlibiConfig(), "t5": T5Config()}


def attention_config(positions):
    return AttentionConfig(WIDTH, HEADS, kv_heads=1, positions=positions, bias=True)


def module(kind, positions):
    made = {
        "attention": lambda a: MultiHeadAttention(a),
        "encoder block": lambda a: EncoderBlock(BlockConfig(a, hidden=17)),
        "decoder block": lambda a: DecoderBlock(BlockConfig(a, hidden=17, norm="layer", placement="post")),
        "encoder": lambda a: Encoder(BlockConfig(a, hidden=17), layers=2),
        "decoder": lambda a: Decoder(BlockConfig(a, hidden=17, placement="parallel"), layers=2),
    }[kind](attention_config(positions))
    made = made.double()
    with torch.no_grad():
        for weight in made.parameters():  # a bias or a table that starts at zero would hide what it does
            weight.add_(0.1 * torch.randn_like(weight))
    return made


def one_by_one(layer, sequences, mask):
    return [layer(sequence.unsqueeze(0), mask).squeeze(0) for sequence in sequences]


def padded(side, *, filled):
    def run(layer, sequences, mask):
        x, padding = pad(sequences, side=side, multiple_of=3, value=float("nan"))
        x = fill_padding(x, padding) if filled else x
        return unpad(layer(x, mask, padding=padding), padding)

    return run


def packed(layer, sequences, mask):
    row = pack(sequences)
    mask = Causal() if mask is None and isinstance(layer, Decoder) else mask
    return unpack(layer(row.row, row.mask(mask), offset=row.positions), row)


def nested(layer, sequences, mask):
    out = layer(torch.nested.as_nested_tensor(sequences, layout=torch.jagged), mask)
    assert out.is_nested
    return list(out.unbind())


WAYS = {
    "right": padded("right", filled=True),
    "left": padded("left", filled=True),
    "packed": packed,
    "nested": nested,
}


def results(way, layer, lengths, mask):
    """Outputs, gradients of the sequences, gradients of every weight."""
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randn(n, WIDTH, generator=generator, dtype=torch.float64).requires_grad_() for n in lengths]
    upstream = [torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in lengths]
    outputs = way(layer, sequences, mask)
    loss = sum((out * up).sum() for out, up in zip(outputs, upstream, strict=True))
    inputs = [*sequences, *layer.parameters()]
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return outputs, gradients[: len(lengths)], gradients[len(lengths) :]


def check(way, layer, lengths, mask):
    close(results(WAYS[way], layer, lengths, mask), results(one_by_one, layer, lengths, mask))


def close(came, expected):
    # float64, sums over at most 30 tokens and 17 features, two layers: a few hundred roundings of numbers near 1.
    for group, expected_group in zip(came, expected, strict=True):
        for got, right in zip(group, expected_group, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-11)


@pytest.mark.slow
@looped("way", WAYS)
@looped("positions", POSITIONS)
@looped("kind", ["attention", "encoder block", "decoder block", "encoder", "decoder"])
def test_all_ways_are_equal(kind, positions, way):
    check(way, module(kind, POSITIONS[positions]), LENGTHS, None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "mask",
    slow_after(2, [Causal(), Window(2, 1), Causal() & Window(3, 0), Strided(3), PerHead([Causal(), Dilated(2)])]),
    ids=repr,
)
def test_all_ways_are_equal_under_a_mask(mask, way):
    check(way, module("encoder", RotaryConfig()), LENGTHS, mask)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_all_ways_are_equal_for_any_lengths(way, lengths):
    check(way, module("decoder", RotaryConfig()), lengths, None)


@looped("side", ["right", "left"])
@looped("kind", ["attention", "encoder", "decoder"])
def test_nan_in_padding_reaches_no_output_and_no_sequence(kind, side):
    layer = module(kind, RotaryConfig())
    came = results(padded(side, filled=False), layer, LENGTHS, None)
    close(came[:2], results(one_by_one, layer, LENGTHS, None)[:2])


@pytest.mark.parametrize("kind", ["attention", "encoder", "decoder"])
def test_nan_in_padding_reaches_no_weight(kind):
    layer = module(kind, RotaryConfig())
    came = results(padded("right", filled=False), layer, LENGTHS, None)
    close(came, results(one_by_one, layer, LENGTHS, None))


@looped("way", WAYS)
def test_a_sequence_does_not_depend_on_its_batch_mates(way):
    layer = module("encoder", RotaryConfig())
    alone, *_ = results(WAYS[way], layer, [7], None)
    outputs, *_ = results(WAYS[way], layer, [7, 3, 11], None)
    torch.testing.assert_close(outputs[0], alone[0], rtol=1e-10, atol=1e-11)


def test_a_model_may_stay_nested_from_layer_to_layer():
    """Norms, linear layers and residual sums are PyTorch's on nested tensors; attention is ours."""
    layer, head = module("attention", RotaryConfig()), torch.nn.Linear(WIDTH, 3).double()
    norm = torch.nn.LayerNorm(WIDTH).double()
    sequences = [torch.randn(n, WIDTH, dtype=torch.float64) for n in (5, 2, 7)]
    x = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
    out = head(x + layer(norm(x), Causal()))
    for got, one in zip(out.unbind(), sequences, strict=True):
        expected = head(one + layer(norm(one)[None], Causal())[0])
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)


def test_a_nested_layer_of_ones_own():
    """What packed_nested and nested_like are for."""
    layer = module("attention", None)
    nested_x = torch.nested.as_nested_tensor([torch.randn(n, WIDTH).double() for n in (5, 2)], layout=torch.jagged)
    row = packed_nested(nested_x)
    out = nested_like(layer(row.row, row.mask(Causal())), nested_x)
    assert all(torch.equal(a, b) for a, b in zip(out.unbind(), layer(nested_x, Causal()).unbind(), strict=True))
