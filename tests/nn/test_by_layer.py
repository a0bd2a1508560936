"""Stacks whose layers differ: each is the block of its own configuration, with the positions it shares."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from looped import looped
from nn.toys import TOY, ExactConfig
from saccade import Causal, Padding, Window
from saccade.nn import AttentionConfig, BlockConfig, Decoder, DecoderBlock, Encoder, KVCache
from saccade.positions import AlibiConfig, RotaryConfig, T5Config
from saccade.variants import Traits

B, L, WIDTH = 2, 11, 24
ATTENTION = AttentionConfig(WIDTH, 6, kv_heads=2, positions=RotaryConfig())


def layer(hidden: int = 17, activation: str = "swiglu", **attention) -> BlockConfig:
    return BlockConfig(dataclasses.replace(ATTENTION, **attention), hidden=hidden, activation=activation)


@dataclasses.dataclass(frozen=True)
class BothWaysConfig(ExactConfig):
    name = "both-ways"
    traits = Traits(**TOY, masks=True, causal="it is a test")


MIXED = [
    layer(window=Window(2, 0)),
    layer(positions=None, heads=4, kv_heads=4),
    layer(hidden=0, positions=RotaryConfig(77.0)),
    layer(hidden=31, activation="gelu", kv_heads=6, bias=True),
    layer(positions=T5Config(8, 5, bidirectional=False)),
]


def stacked(kind=Decoder, configs=MIXED):
    stack = kind(configs).double()
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return stack, torch.randn(B, L, WIDTH, dtype=torch.float64)


def test_each_layer_is_its_own_block():
    stack, x = stacked()
    expected = x
    for number, (config, block) in enumerate(zip(MIXED, stack.blocks, strict=True)):
        alone = DecoderBlock(config).double()
        weights = {name: tensor for name, tensor in block.state_dict().items()}
        positions = stack.positions_of(number)
        own = {} if positions is None else {f"attention.positions.{n}": t for n, t in positions.state_dict().items()}
        alone.load_state_dict({**weights, **own})
        expected = alone(expected, Causal())
    torch.testing.assert_close(stack(x), stack.norm(expected))


def test_layers_that_agree_share_positions():
    stack, _ = stacked()
    assert stack.positions_of(0) is stack.positions_of(3)
    assert stack.positions_of(1) is None
    assert len({id(stack.positions_of(n)) for n in (0, 2, 4)}) == 3
    one = Decoder([layer(), layer(positions=None), layer(window=Window(1, 0))])
    assert one.positions is one.positions_of(0) is one.positions_of(2)
    biased = Decoder([layer(positions=AlibiConfig(True)), layer(positions=AlibiConfig(True), heads=4)])
    assert biased.positions_of(0) is not biased.positions_of(1)  # a slope for each head


@pytest.mark.slow
@looped("cache", [lambda: None, lambda: KVCache.static(5, L), lambda: KVCache.growing(5)])
def test_decoding_is_the_parallel_form_in_every_layer(cache):
    stack, x = stacked()
    real = torch.arange(L) >= torch.tensor([[3], [0]])
    expected = stack(x, padding=Padding(real))
    held = cache() or stack.cache()
    with torch.no_grad():
        first = stack(x[:, :6], padding=Padding(real[:, :6]), cache=held)
        steps = [first, *(stack(x[:, t : t + 1], cache=held) for t in range(6, L))]
    torch.testing.assert_close(torch.cat(steps, 1)[real], expected[real])


def test_weights_and_nested_batches_go_through_every_layer():
    stack, x = stacked(Encoder, [layer(positions=None), layer(mechanism=ExactConfig(), positions=None)])
    with pytest.raises(ValueError, match="return_weights: not with the mechanism 'exact'"):
        stack(x, return_weights=True)
    nested = torch.nested.nested_tensor([x[0, :5], x[1]], layout=torch.jagged)
    for item, out in zip((x[:1, :5], x[1:]), stack(nested).unbind(), strict=True):
        torch.testing.assert_close(out, stack(item)[0])


def test_layers_keep_their_positions_when_others_are_taken_out():
    stack, x = stacked()
    (kept := list(stack.blocks)).pop(0)
    places = [stack.positions_of(number) for number in range(1, len(MIXED))]
    stack.blocks = torch.nn.ModuleList(kept)
    assert [stack.positions_of(number) for number in range(len(kept))] == places
    assert stack(x).shape == x.shape


def test_a_sequence_of_equal_layers_is_one_configuration_many_times():
    torch.manual_seed(3)
    one = Decoder(layer(), 3)
    torch.manual_seed(3)
    many = Decoder([layer()] * 3)
    for (name, a), (other, b) in zip(one.state_dict().items(), many.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)
    assert one.configs == many.configs == (layer(),) * 3


@looped(
    ("call", "error", "message"),
    [
        (lambda: Encoder([]), ValueError, "config: expected at least one layer, got an empty sequence"),
        (
            lambda: Encoder([layer(), None]),
            TypeError,
            "config: expected BlockConfig, or a sequence of one .*, got list",
        ),
        (lambda: Encoder(layer()), TypeError, "layers: must be an int, got None"),
        (lambda: Encoder([layer()] * 3, 2), ValueError, "layers: 2, but config has 3, one for each layer"),
        (
            lambda: Decoder([layer(), BlockConfig(AttentionConfig(32, 4))]),
            ValueError,
            "config: all layers need the same width, got 24 in layer 0 and 32 in layer 1",
        ),
        (
            lambda: Decoder([layer(), dataclasses.replace(layer(), placement="post")]),
            ValueError,
            "the same placement, got 'pre' in layer 0 and 'post' in layer 1",
        ),
        (
            lambda: Decoder([layer(), dataclasses.replace(layer(), cross=AttentionConfig(24, 4, context_width=13))]),
            ValueError,
            "the same context_width, got None in layer 0 and 13 in layer 1",
        ),
        (
            lambda: Decoder([layer(), layer(mechanism=BothWaysConfig())]),
            ValueError,
            "mechanism: 'both-ways' cannot be causal, since it is a test",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
