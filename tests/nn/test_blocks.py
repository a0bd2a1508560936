"""Blocks and stacks: their formulas, their initial variances, checkpointing, and what they refuse."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from looped import looped
from saccade import Causal, FromTensor, Padding, Prefix, Window
from saccade.nn import (
    AttentionConfig,
    BlockConfig,
    Context,
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    FeedForward,
    KVCache,
    StaticLayer,
)
from saccade.nn.norm import make_norm
from saccade.positions import AlibiConfig, RotaryConfig, T5Config

B, L, LC, WIDTH, HEADS, HIDDEN, LAYERS = 2, 11, 7, 24, 6, 17, 3
ATTENTION = AttentionConfig(WIDTH, HEADS, kv_heads=2)
CROSS = AttentionConfig(WIDTH, HEADS, context_width=13)


def config(**options) -> BlockConfig:
    return BlockConfig(options.pop("attention", ATTENTION), **{"hidden": HIDDEN, **options})


def tokens(length=L, width=WIDTH) -> torch.Tensor:
    return torch.randn(B, length, width, dtype=torch.float64, requires_grad=True)


def spread(module):
    """Float64, and no parameter at its initial value (norm weights begin at 1, biases at 0)."""
    module = module.double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def equal_with_gradients(out, expected, inputs):
    torch.testing.assert_close(out, expected)
    cotangent = torch.randn_like(out)
    ours = torch.autograd.grad(out, inputs, cotangent, retain_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, inputs, cotangent))


FORMULAS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "geglu": F.gelu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
    "reglu": F.relu,
    "swiglu": F.silu,
}


@looped("bias", [False, True])
@looped("activation", FORMULAS)
def test_feed_forward_is_its_formula(activation, bias):
    module, x = spread(FeedForward(WIDTH, HIDDEN, activation, bias=bias)), tokens()
    f = FORMULAS[activation]
    if "glu" in activation:
        gate, up = module.gate_up(x).split(HIDDEN, -1)
        inner = f(gate) * up
    else:
        inner = f(module.up(x))
    expected = F.linear(inner, module.down.weight, module.down.bias)
    equal_with_gradients(module(x), expected, [x, *module.parameters()])


@pytest.mark.parametrize(("activation", "hidden", "weights"), [("swiglu", 2048, 8), ("gelu", 3072, 8)])
def test_default_hidden_is_as_large_gated_or_not(activation, hidden, weights):
    module = FeedForward(768, activation=activation)
    assert module.down.in_features == hidden
    assert sum(p.numel() for p in module.parameters()) == weights * 768**2


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_norms_are_their_formulas(name):
    module, x = spread(make_norm(name, WIDTH, bias=True, eps=0.1)), tokens()
    mean = x.mean(-1, keepdim=True) if name == "layer" else 0.0
    expected = (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + 0.1).sqrt() * module.weight
    expected = expected + (module.bias if name == "layer" else 0.0)
    equal_with_gradients(module(x), expected, [x, *module.parameters()])


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_its_formula(training):
    module, x = spread(make_norm("batch", WIDTH, eps=0.1)).train(training), tokens()
    module.running_mean.uniform_(-1, 1), module.running_var.uniform_(0.5, 2)
    flat = x.flatten(0, 1)
    before = module.running_var.clone()
    mean = flat.mean(0) if training else module.running_mean.clone()
    variance = (flat - mean).square().mean(0) if training else before
    expected = (x - mean) / (variance + 0.1).sqrt() * module.weight + module.bias
    equal_with_gradients(module(x), expected, [x, *module.parameters()])
    kept = 0.9 * before + 0.1 * flat.detach().var(0) if training else before
    assert torch.allclose(module.running_var, kept, atol=1e-12)


@looped("norm", ["layer", "rms"])
@looped("placement", ["pre", "post", "parallel"])
def test_encoder_block_is_its_formula(placement, norm):
    block, x = spread(EncoderBlock(config(placement=placement, norm=norm))), tokens()
    mask = Window(2, 3)

    def attend(x):
        return block.attention(x, mask)

    if placement == "parallel":
        n = block.attention_norm(x)
        expected = x + attend(n) + block.feed_forward(n)
    elif placement == "pre":
        y = x + attend(block.attention_norm(x))
        expected = y + block.feed_forward(block.feed_forward_norm(y))
    else:
        y = block.attention_norm(x + attend(x))
        expected = block.feed_forward_norm(y + block.feed_forward(y))
    equal_with_gradients(block(x, mask), expected, [x, *block.parameters()])


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_decoder_block_with_a_context_is_its_formula(placement):
    block = spread(DecoderBlock(config(placement=placement, cross=CROSS)))
    x, context = tokens(), tokens(LC, 13)
    visible = Padding([3, 7])

    def cross(x):
        return block.cross(x, visible, context=context)

    if placement == "pre":
        y = x + block.attention(block.attention_norm(x), Causal())
        z = y + cross(block.cross_norm(y))
        expected = z + block.feed_forward(block.feed_forward_norm(z))
    else:
        y = block.attention_norm(x + block.attention(x, Causal()))
        z = block.cross_norm(y + cross(y))
        expected = block.feed_forward_norm(z + block.feed_forward(z))
    out = block(x, Causal(), context=Context(context, visible))
    equal_with_gradients(out, expected, [x, context, *block.parameters()])


@pytest.mark.parametrize("placement", ["pre", "post", "parallel"])
def test_without_a_feed_forward_layer_attention_is_all(placement):
    block, x = spread(EncoderBlock(config(hidden=0, placement=placement))), tokens()
    mask = Window(2, 3)
    if placement == "post":
        expected = block.attention_norm(x + block.attention(x, mask))
    else:
        expected = x + block.attention(block.attention_norm(x), mask)
    equal_with_gradients(block(x, mask), expected, [x, *block.parameters()])
    assert {name.partition(".")[0] for name, _ in block.named_parameters()} == {"attention", "attention_norm"}
    assert block.writers() == [block.attention.output]


def test_a_context_is_read_without_a_feed_forward_layer():
    block, x, context = spread(DecoderBlock(config(hidden=0, cross=CROSS))), tokens(), tokens(LC, 13)
    y = x + block.attention(block.attention_norm(x), Causal())
    expected = y + block.cross(block.cross_norm(y), context=context)
    equal_with_gradients(block(x, Causal(), context=context), expected, [x, context, *block.parameters()])
    assert block.writers() == [block.attention.output, block.cross.output]


def test_attention_alone_starts_by_the_number_of_its_writers_and_begins_anew():
    stack = Encoder(BlockConfig(AttentionConfig(64, 4), hidden=0), 9)
    for _ in range(2):
        for block in stack.blocks:
            assert block.attention.output.weight.std().item() == pytest.approx((9 * 64) ** -0.5, rel=0.1)
        stack.reset_parameters()


@looped("final_norm", [None, False, True])
@looped("placement", ["pre", "post"])
def test_a_stack_is_its_blocks_and_a_norm(placement, final_norm):
    stack, x = spread(Encoder(config(placement=placement), LAYERS, final_norm=final_norm)), tokens()
    expected = x
    for block in stack.blocks:
        expected = block(expected)
    wanted = placement == "pre" if final_norm is None else final_norm
    assert isinstance(stack.norm, torch.nn.Identity) != wanted
    equal_with_gradients(stack(x), stack.norm(expected), [x, *stack.parameters()])


@pytest.mark.parametrize("scheme", [RotaryConfig(), AlibiConfig(learned=True), T5Config(8, 5)], ids=repr)
def test_layers_share_their_positions(scheme):
    attention = dataclasses.replace(ATTENTION, positions=scheme)
    stack, x = spread(Encoder(config(attention=attention), LAYERS)), tokens()
    assert not [name for name in stack.state_dict() if name.startswith("blocks") and "positions" in name]
    expected = x
    for block in stack.blocks:
        expected = block(expected, positions=stack.positions)
    out = stack(x)
    equal_with_gradients(out, stack.norm(expected), [x, *stack.parameters()])
    swapped = stack(x[:, torch.arange(L).roll(1)])[:, torch.arange(L).roll(-1)]
    assert not torch.allclose(swapped, out)


def test_later_inputs_have_no_gradient_at_all_in_a_decoder():
    decoder, x = spread(Decoder(config(), LAYERS)), tokens()
    out = decoder(x)
    for t in (0, 4, L - 1):
        (grad,) = torch.autograd.grad(out[:, t].sum(), x, retain_graph=True)
        assert (grad[:, t + 1 :] == 0).all()
        assert (grad[:, : t + 1].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("kind", [Encoder, Decoder])
@pytest.mark.parametrize("placement", ["pre", "post", "parallel"])
def test_checkpointing_changes_nothing_but_memory(kind, placement):
    attention = dataclasses.replace(ATTENTION, positions=T5Config(8, 5), dropout=0.2)
    stack, x = spread(kind(config(attention=attention, placement=placement, dropout=0.3), LAYERS)), tokens()
    results = []
    for stack.checkpointing in (False, True):
        torch.manual_seed(5)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: (kept.append(t.numel()), t)[1], lambda t: t):
            out = stack(x)
        results.append((out, torch.autograd.grad(out.square().sum(), [x, *stack.parameters()]), sum(kept)))
    torch.testing.assert_close(results[0][:2], results[1][:2], rtol=0, atol=0)
    assert results[1][2] < results[0][2] / 5


def test_layer_drop_leaves_blocks_out_in_training_only():
    stack, x = spread(Encoder(config(placement="post"), LAYERS, layer_drop=0.5)), tokens()
    torch.manual_seed(1)
    for _ in range(8):
        seen, states = [], []
        out = stack(x, observe=lambda layer, call, seen=seen: seen.append(layer), hidden_states=states)
        expected = x
        for layer in seen:
            expected = stack.blocks[layer](expected)
        torch.testing.assert_close(out, expected)
        assert len(states) == LAYERS + 1
    assert len(stack(x, return_weights=True)[1]) == LAYERS
    stack.eval()
    out = stack(x)
    stack.layer_drop = 0.0
    assert torch.equal(stack.train()(x), out)
    with pytest.raises(ValueError, match="layer_drop"):
        Encoder(config(), LAYERS, layer_drop=1.0)


def test_dropout_acts_in_training_only_and_in_each_place():
    for options in (
        {"dropout": 0.5},
        {"feed_forward_dropout": 0.5},
        {"attention": dataclasses.replace(ATTENTION, dropout=0.5)},
    ):
        block, x = spread(EncoderBlock(config(**options))), tokens()
        assert not torch.allclose(block(x), block(x))
        block.eval()
        assert torch.equal(block(x), block(x))


@pytest.mark.parametrize("placement", ["pre", "parallel"])
def test_the_residual_stream_does_not_grow_with_depth(placement):
    """Tokens of variance 1 leave 24 layers with a variance of a few: 48 writers add 1 / 48 of theirs each."""
    stack = Encoder(BlockConfig(AttentionConfig(64, 4), placement=placement, activation="relu"), 24, final_norm=False)
    x = torch.randn(8, 32, 64)
    assert stack(x).var() < 3
    for writer in stack.blocks[5].writers():
        assert writer.weight.std().item() == pytest.approx((48 * writer.in_features) ** -0.5, rel=0.1)


def test_post_norm_stacks_keep_their_writers():
    stack = Encoder(BlockConfig(AttentionConfig(64, 4), placement="post"), 24)
    assert stack.blocks[5].attention.output.weight.std().item() == pytest.approx(64**-0.5, rel=0.1)


def test_observers_are_told_the_layer_and_the_kind():
    decoder, seen = Decoder(config(cross=CROSS), LAYERS).double(), []
    decoder(tokens(), context=tokens(LC, 13), observe=lambda layer, o: seen.append((layer, o.cross, o.key.shape[2])))
    assert seen == [(layer, cross, LC if cross else L) for layer in range(LAYERS) for cross in (False, True)]


ENCODER = Encoder(config(), LAYERS)


@looped(
    ("call", "message"),
    [
        (
            lambda: config(activation="swish"),
            "'relu', 'silu', 'geglu', 'geglu_tanh', 'reglu', 'swiglu'; got 'swish'",
        ),
        (lambda: config(norm="group"), "norm: expected one of 'layer', 'rms', 'batch'; got 'group'"),
        (lambda: config(placement="sandwich"), "placement: expected one of 'pre', 'post', 'parallel'; got 'sandwich'"),
        (lambda: config(hidden=-1), "hidden: must be at least 0, got -1"),
        (
            lambda: config(hidden=0, feed_forward_dropout=0.1),
            r"feed_forward_dropout: without a feed-forward layer \(hidden=0\) there is none, got 0.1",
        ),
        (lambda: config(dropout=-0.1), r"dropout: must be in \[0, 1\), got -0.1"),
        (lambda: config(cross=AttentionConfig(16, 4)), "cross: its width 16 is not attention's 24"),
        (
            lambda: config(cross=dataclasses.replace(CROSS, positions=RotaryConfig())),
            "cross: cross-attention has two sequences",
        ),
        (lambda: config(cross=CROSS, placement="parallel"), "cross: parallel blocks .* no cross-attention"),
        (lambda: EncoderBlock(config(cross=CROSS)), "cross: an EncoderBlock has no context; use DecoderBlock"),
        (lambda: Encoder(config(), 0), "layers: must be at least 1, got 0"),
        (lambda: ENCODER(torch.zeros(1, 3, 23)), r"x: expected shape \(batch, length, 24\), got \(1, 3, 23\)"),
        (lambda: Decoder(config(), 2)(torch.zeros(1, 3, 24), context=torch.zeros(1, 3, 24)), "context: .* no cross"),
        (
            lambda: Decoder(config(cross=CROSS), 2)(torch.zeros(1, 3, 24)),
            "context: the blocks of this decoder need one",
        ),
        (
            lambda: Decoder(config(), 2)(torch.zeros(1, 3, 24), cache=KVCache.growing(3)),
            "cache: made for 3 layers, but the decoder has 2",
        ),
        (
            lambda: Decoder(config(cross=CROSS), 2)(torch.zeros(1, 3, 24), context=torch.zeros(1, 3, 14)),
            r"context: expected shape \(batch, length, 13\), got \(1, 3, 14\)",
        ),
        (
            lambda: Encoder(config(attention=dataclasses.replace(ATTENTION, positions=RotaryConfig(turned=6))), 2),
            "turned",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@looped("placement", ["pre", "post", "parallel"])
@looped("place", ["dropout", "feed_forward_dropout", "weights"])
def test_each_dropout_acts_in_each_placement(place, placement):
    options = {"attention": dataclasses.replace(ATTENTION, dropout=0.5)} if place == "weights" else {place: 0.5}
    block, x = spread(EncoderBlock(config(placement=placement, **options))), tokens()
    assert not torch.allclose(block(x), block(x))


@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_bias_and_offset_reach_every_layer(kind):
    attention = dataclasses.replace(ATTENTION, positions=RotaryConfig())
    stack, x = spread(kind(config(attention=attention), LAYERS)), tokens()
    bias = torch.randn(L, L, dtype=torch.float64)
    places = torch.arange(L).flip(0).expand(B, L)
    seen = []
    out = stack(x, bias=bias, offset=places, observe=lambda layer, o: seen.append(o.bias is bias))
    assert seen == [True] * LAYERS
    mask = Causal() if kind is Decoder else None
    expected = x
    for block in stack.blocks:
        expected = block(expected, mask, bias=bias, offset=places, positions=stack.positions)
    torch.testing.assert_close(out, stack.norm(expected))
    assert not torch.allclose(out, stack(x, bias=bias))
    block = spread(DecoderBlock(config(cross=CROSS)))
    context = tokens(LC, 13)
    assert not torch.allclose(block(x, context=context), block(x, context=context, bias=bias))


def test_nothing_is_run_twice_that_leaves_something_behind():
    attention = dataclasses.replace(ATTENTION, positions=RotaryConfig())
    decoder, x = spread(Decoder(config(attention=attention), LAYERS, checkpointing=True)), tokens()
    calls, cache = [], decoder.cache()
    decoder(x, observe=lambda layer, o: calls.append(layer)).sum().backward()
    assert calls == list(range(LAYERS))
    decoder(x, cache=cache).sum().backward()
    assert cache.length == L


@looped("mask", [Padding([L, 5]), Window(2, 2), Prefix(4), torch.ones(L, L, dtype=torch.bool)])
def test_a_decoder_is_causal_whatever_mask_it_is_given(mask):
    decoder, x = spread(Decoder(config(), LAYERS)), tokens()
    out = decoder(x, mask)
    (grad,) = torch.autograd.grad(out[:, 2].sum(), x)
    assert (grad[:, 3:] == 0).all()
    decoder.causal = False
    (grad,) = torch.autograd.grad(decoder(x, mask)[:, 2].sum(), x)
    assert (grad[:, 3].abs().amax(-1) > 0).all()


def test_the_padding_that_a_context_was_padded_with_is_its_mask():
    """`pad` gives the context's rows as queries too; they say nothing of the target's, of the same length or not."""
    decoder, x = spread(Decoder(config(cross=CROSS), 2)), tokens()
    for length in (LC, L):
        context, lengths = tokens(length, 13), torch.tensor([3, length])
        expected = decoder(x, context=context, context_mask=Padding(lengths))
        given = Padding(lengths, queries=lengths)
        torch.testing.assert_close(decoder(x, context=context, context_mask=given), expected)
        shown = torch.ones(L, length, dtype=torch.bool)
        both = given & FromTensor(shown)
        torch.testing.assert_close(decoder(x, context=context, context_mask=both), expected)
        torch.testing.assert_close(decoder(x, context=context, context_mask=given, cache=decoder.cache()), expected)


def test_a_mask_of_rows_beside_a_cache_and_a_context_is_refused():
    decoder, x, context = spread(Decoder(config(cross=CROSS), 2)), tokens(), tokens(LC, 13)
    expected = decoder(x, context=context, context_mask=Padding([3, 7]))
    cache = decoder.cache()
    parts = [
        decoder(part, context=context, context_mask=Padding([3, 7]), cache=cache) for part in x.split([4, 1, 6], 1)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    for mask in (Causal(), Window(1, 1), torch.ones(1, LC, dtype=torch.bool)):
        with pytest.raises(ValueError, match="context_mask: with a cache, only a mask of the context"):
            decoder(x[:, :1], context=context, context_mask=mask, cache=cache)
    assert cache.length == L


@looped(
    "bad",
    [
        {"context": torch.zeros(B, LC, 12, dtype=torch.float64)},
        {"context": torch.zeros(B + 1, LC, 13, dtype=torch.float64)},
        {"context_mask": Padding([3, 7, 5])},
        {"context_mask": Padding([3, LC + 1])},
        {"bias": torch.zeros(5, 1, 1, 1, dtype=torch.float64)},
    ],
)
def test_a_refused_call_leaves_a_cache_as_it_was(bad):
    decoder, x, context = spread(Decoder(config(cross=CROSS), 2)), tokens(), tokens(LC, 13)
    cache = decoder.cache()
    with torch.no_grad():
        decoder(x[:, :4], context=context, cache=cache)
        with pytest.raises(ValueError, match="context|mask|bias|batch|length|Padding"):
            decoder(x[:, 4:6], cache=cache, **{"context": context, **bad})
        assert [layer.length for layer in cache.layers] == [4, 4]
        rest = decoder(x[:, 4:], context=context, cache=cache)
    torch.testing.assert_close(rest, decoder(x, context=context)[:, 4:])


def test_reset_parameters_of_a_stack():
    described = BlockConfig(AttentionConfig(64, 4, positions=T5Config()), hidden=96)
    with torch.device("meta"):
        stack = Decoder(described, 6)
    stack.to_empty(device="cpu").reset_parameters()
    fresh = Decoder(described, 6)
    for name, parameter in stack.named_parameters():
        assert parameter.std().item() == pytest.approx(fresh.get_parameter(name).std().item(), rel=0.2, abs=1e-9), name


def test_a_changed_width_changes_its_defaults():
    small = BlockConfig(AttentionConfig(32, 4))
    assert dataclasses.replace(small, attention=AttentionConfig(64, 4)) == BlockConfig(AttentionConfig(64, 4))
    assert small == BlockConfig(AttentionConfig(32, 4, kv_heads=4), hidden=96)
    assert hash(small) == hash(BlockConfig(AttentionConfig(32, 4), hidden=96))
    without = BlockConfig(AttentionConfig(32, 4), hidden=0)
    assert without == BlockConfig(AttentionConfig(32, 4), hidden=0, activation="relu") != small


@looped(
    ("call", "message"),
    [
        (lambda: BlockConfig("attention"), "attention: expected AttentionConfig, got str"),
        (lambda: config(cross="cross"), "cross: expected AttentionConfig, got str"),
        (
            lambda: Encoder(ATTENTION, 2),
            "config: expected BlockConfig, or a sequence of one for each layer, got AttentionConfig",
        ),
        (lambda: EncoderBlock(ATTENTION), "config: expected BlockConfig, got AttentionConfig"),
        (lambda: Encoder(config(), 2.0), "layers: must be an int, got 2.0"),
        (lambda: Decoder(config(), 2, causal="no"), "causal: must be True or False, got 'no'"),
        (lambda: ENCODER([1.0]), r"x: expected a tensor \(batch, length, 24\), got list"),
    ],
)
def test_values_of_another_kind(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: BlockConfig(AttentionConfig(24, 3, context_width=13)),
            "attention: expected keys and values made from the block's tokens, 24 wide, got widths 13 and 13",
        ),
        (lambda: Decoder(config(), 2)(torch.zeros(1, 3, 24), context_mask=Causal()), "context_mask: given without a"),
    ],
)
def test_more_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_interrupt_leaves_a_cache_as_it_was():
    decoder, x = spread(Decoder(config(), LAYERS)), tokens()
    cache = decoder.cache()

    def interrupt(layer, o):
        if layer == 1:
            raise KeyboardInterrupt

    with torch.no_grad():
        decoder(x[:, :4], cache=cache)
        with pytest.raises(KeyboardInterrupt):
            decoder(x[:, 4:6], cache=cache, observe=interrupt)
        torch.testing.assert_close(decoder(x[:, 4:], cache=cache), decoder(x)[:, 4:])
        small = KVCache([StaticLayer(8), StaticLayer(4), StaticLayer(8)])
        with pytest.raises(ValueError, match="capacity of 4"):
            decoder(x[:, :5], cache=small)
        assert [layer.length for layer in small.layers] == [0, 0, 0]
    with pytest.raises(TypeError, match="cache: expected a KVCache of all layers, got StaticLayer"):
        decoder(x, cache=StaticLayer(8))


def test_layers_of_different_calls_are_not_used():
    decoder, x = spread(Decoder(config(), LAYERS)), tokens()
    cache = decoder.cache()
    with torch.no_grad():
        decoder(x, cache=cache)
        cache[1].rollback(2)
        with pytest.raises(ValueError, match=r"cache: .* different numbers of tokens, 11, 9, 11, .* reset\(\)"):
            decoder(x, cache=cache)


@pytest.mark.parametrize("placement", ["pre", "post", "parallel"])
def test_weights_beside_the_output_of_a_block(placement):
    block, x, calls = EncoderBlock(config(placement=placement)).double(), tokens(), []
    out, weights = block(x, Causal(), observe=calls.append, return_weights=True)
    assert out.equal(block(x, Causal())) and len(calls) == 1
    logits = calls[0].query @ calls[0].key.repeat_interleave(3, 1).transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
    hidden = ~torch.ones(L, L, dtype=torch.bool).tril()
    torch.testing.assert_close(weights, logits.masked_fill(hidden, float("-inf")).softmax(-1))


def test_weights_of_a_decoder_block_are_its_own_and_those_of_its_context():
    block = DecoderBlock(config(cross=CROSS)).double()
    x, context = tokens(), Context(tokens(LC, 13), Padding(torch.tensor([LC, 3])))
    out, (own, read) = block(x, Causal(), context=context, return_weights=True)
    assert out.equal(block(x, Causal(), context=context))
    assert own.shape == (B, HEADS, L, L) and read.shape == (B, HEADS, L, LC)
    assert own.triu(1).eq(0).all() and read[1, :, :, 3:].eq(0).all()
    torch.testing.assert_close(read.sum(-1), torch.ones(B, HEADS, L, dtype=torch.float64))


def test_weights_beside_the_output_of_a_stack_are_those_of_its_blocks():
    encoder, x = Encoder(config(), 2).double(), tokens()
    out, (first, second) = encoder(x, Causal(), return_weights=True)
    assert out.equal(encoder(x, Causal()))
    between, weights = encoder.blocks[0](x, Causal(), return_weights=True)
    assert first.equal(weights) and second.equal(encoder.blocks[1](between, Causal(), return_weights=True)[1])
    decoder, context = Decoder(config(cross=CROSS), 2).double(), tokens(LC, 13)
    out, weights = decoder(x, context=context, return_weights=True)
    assert out.equal(decoder(x, context=context))
    assert [(own.shape, read.shape) for own, read in weights] == [((B, HEADS, L, L), (B, HEADS, L, LC))] * 2


def test_the_residual_stream_has_one_width():
    with pytest.raises(ValueError, match="attention: its out_width is 30, and the residual stream of a block 24 wide"):
        config(attention=AttentionConfig(WIDTH, HEADS, out_width=30))
    with pytest.raises(ValueError, match="cross: its out_width is 30"):
        config(cross=AttentionConfig(WIDTH, HEADS, out_width=30))
