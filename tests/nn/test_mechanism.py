"""A mechanism in the place of softmax attention: what it is given, how it decodes, and what is refused.

Shape legend: B batch, L length, E width.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import saccade
from looped import looped
from nn.toys import ExactConfig, MeanConfig, NoPairsConfig, NothingConfig, SharedConfig, TwiceConfig, WeighedConfig
from saccade import Causal, Global, Padding, Window
from saccade.nn import (
    AttentionConfig,
    BlockConfig,
    Decoder,
    Encoder,
    EncoderBlock,
    GrowingLayer,
    KVCache,
    MultiHeadAttention,
    RecurrentLayer,
    StaticLayer,
    StreamingLayer,
    Transformer,
    WindowLayer,
)
from saccade.positions import AlibiConfig, RotaryConfig, T5Config
from saccade.variants import LinearConfig

B, L, WIDTH, HEADS = 3, 11, 24, 6
LENGTHS = [7, 11, 4]
LEFT = Padding(torch.arange(L) >= L - torch.tensor(LENGTHS)[:, None])
RIGHT = Padding(LENGTHS)
ROTARY = RotaryConfig()
PLAIN = dict(exact=ExactConfig(), pairless=NoPairsConfig())
CAUSAL = dict(PLAIN, mean=MeanConfig(), twice=TwiceConfig(), shared=SharedConfig(), weighed=WeighedConfig())


def of(values):
    return pytest.mark.parametrize("mechanism", values.values(), ids=values)


def tokens(length=L, batch=B):
    return torch.randn(batch, length, WIDTH)


def twins(mechanism, *, make=MultiHeadAttention, **options):
    """A module without a mechanism and one with it, of equal weights."""
    plain = make(AttentionConfig(WIDTH, HEADS, **options))
    ours = make(AttentionConfig(WIDTH, HEADS, **options, mechanism=mechanism))
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def same_bits(plain, ours, inputs, call=lambda module, *inputs: module(*inputs)):
    """Output and every gradient, bit for bit."""
    results = []
    for module in (plain, ours):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = call(module, *leaves)
        weighed = out * torch.linspace(-1, 1, out.numel()).view(out.shape)
        results.append((out, *torch.autograd.grad(weighed.sum(), [*leaves, *module.parameters()])))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


# --- what is exact stays exact ----------------------------------------------------------------------------------------


@of(PLAIN)
@looped("mask", [None, Causal()])
@looped(
    "options",
    [{}, dict(kv_heads=2), dict(positions=ROTARY), dict(fused=False, bias=True), dict(qk_norm="rms", gate=True)],
)
def test_softmax_as_a_mechanism_is_softmax_attention(mechanism, mask, options):
    same_bits(*twins(mechanism, **options), [tokens()], lambda module, x: module(x, mask))


@of(PLAIN)
@looped("padding", [LEFT, RIGHT])
@looped("mask", [None, Causal()])
def test_padding_on_either_side(mechanism, padding, mask):
    plain, ours = twins(mechanism, positions=ROTARY, kv_heads=2)
    said = GrowingLayer().offset(L, padding)  # positions of tokens, which a mechanism is given unasked

    def call(module, x):
        return module(x, mask, padding=padding, offset=None if module is ours else said)

    same_bits(plain, ours, [tokens()], call)


def test_options_of_the_operator_reach_a_mechanism_that_takes_them():
    options = dict(scale=0.3, softcap=2.0, sink=True, dropout=0.5, window=Window(3, 0))
    plain, ours = twins(ExactConfig(), **options)
    with torch.no_grad():
        plain.sink.normal_()
        ours.sink.copy_(plain.sink)

    def seeded(module, x):
        torch.manual_seed(5)
        return module(x, Causal(), bias=torch.linspace(0, 3, L * L).view(1, 1, L, L))

    same_bits(plain, ours, [tokens()], seeded)


@pytest.mark.parametrize("positions", [AlibiConfig(), T5Config()], ids=["alibi", "t5"])
def test_positions_that_are_a_bias_reach_a_mechanism_that_takes_it(positions):
    same_bits(*twins(ExactConfig(), positions=positions), [tokens()], lambda module, x: module(x, Causal()))


@of(PLAIN)
@looped("fused", [None, False])
def test_cross_attention(mechanism, fused):
    pair = twins(mechanism, fused=fused)
    real = Padding([5, 8, 0])
    same_bits(*pair, [tokens(), tokens(8)], lambda module, x, context: module(x, real, context=context))


@of(PLAIN)
def test_encoder_decoder_with_a_context_cache(mechanism):
    plain, ours = (
        Transformer(BlockConfig(AttentionConfig(WIDTH, HEADS, positions=ROTARY, mechanism=one)), 2)
        for one in (None, mechanism)
    )
    ours.load_state_dict(plain.state_dict())
    source, target, real = tokens(8), tokens(), Padding([5, 8, 2])
    read = dict(source_padding=real, target_padding=RIGHT)
    assert torch.equal(ours(source, target, **read), plain(source, target, **read))
    decoded = []
    with torch.no_grad():
        memory = ours.encode(source, padding=real)
        for model in (plain, ours):
            cache = model.cache()
            parts = [
                model.decode(part, memory, source_padding=real, cache=cache) for part in target.split([4, 1, 6], 1)
            ]
            decoded.append(torch.cat(parts, 1))
    assert torch.equal(*decoded)
    torch.testing.assert_close(decoded[1], ours(source, target, source_padding=real))


def nested(x, lengths=LENGTHS):
    return torch.nested.as_nested_tensor(
        [row[:length] for row, length in zip(x, lengths, strict=True)], layout=torch.jagged
    )


@of(CAUSAL)
@looped("kind", ["attention", "encoder", "decoder", "block"])
def test_a_nested_batch_is_each_item_alone(mechanism, kind):
    attention = AttentionConfig(WIDTH, HEADS, positions=ROTARY, mechanism=mechanism)
    module = {
        "attention": lambda: MultiHeadAttention(attention),
        "block": lambda: EncoderBlock(BlockConfig(attention)),
        "encoder": lambda: Encoder(BlockConfig(attention), 2),
        "decoder": lambda: Decoder(BlockConfig(attention), 2),
    }[kind]()
    x = tokens().requires_grad_()
    out = module(nested(x), Causal()).unbind()
    alone = [module(row[None, :length], Causal())[0] for row, length in zip(x, LENGTHS, strict=True)]
    for one, other in zip(out, alone, strict=True):
        torch.testing.assert_close(one, other)
    cotangents = [torch.randn_like(row) for row in alone]
    ours = torch.autograd.grad(out, x, cotangents, retain_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(alone, x, cotangents))


def test_a_nested_batch_without_items():
    module = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, mechanism=MeanConfig()))
    empty = torch.nested.nested_tensor_from_jagged(torch.zeros(0, WIDTH), torch.tensor([0]))
    assert module(empty).values().shape == (0, WIDTH)


# --- what mechanisms are given ----------------------------------------------------------------------------------------


@looped("fused", [None, False])
@looped("kv_heads", [None, 2])
def test_two_maps_lie_side_by_side_and_values_are_twice_as_wide(fused, kv_heads):
    module = MultiHeadAttention(
        AttentionConfig(WIDTH, HEADS, kv_heads, fused=fused, mechanism=TwiceConfig(), bias=True)
    )
    x, given = tokens(), []
    module.mechanism.register_forward_pre_hook(lambda _, inputs: given.extend(inputs))
    out = module(x)
    kv = kv_heads or HEADS
    assert [tuple(part.shape) for part in given[:3]] == [(B, 2 * HEADS, L, 2), (B, 2 * kv, L, 2), (B, kv, L, 4)]
    (query, key, value), scale = [nn.functional.linear(x, *part) for part in module.matrices()], 2**-0.5
    heads = []
    for head in range(HEADS):
        g = head * kv // HEADS
        maps = []
        for m in range(2):
            q, k = query[..., 4 * head + 2 * m :][..., :2], key[..., 4 * g + 2 * m :][..., :2]
            maps.append((scale * q @ k.transpose(1, 2)).softmax(-1))
        heads.append((maps[0] - 0.5 * maps[1]) @ value[..., 4 * g : 4 * g + 4])
    torch.testing.assert_close(out, module.output(torch.cat(heads, -1)))


@looped("fused", [None, False])
@looped("crossed", [False, True])
def test_keys_that_are_the_queries_have_no_projection_of_their_own(fused, crossed):
    config = AttentionConfig(WIDTH, HEADS, fused=fused, bias=True, mechanism=SharedConfig())
    module = MultiHeadAttention(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    assert sum(p.numel() for p in module.parameters()) == 3 * (WIDTH * WIDTH + WIDTH)
    x, context = tokens(), tokens(7)
    (wq, bq), _, (wv, bv) = module.matrices()
    read = context if crossed else x
    parts = (nn.functional.linear(*given) for given in ((x, wq, bq), (read, wq, bq), (read, wv, bv)))
    expected = saccade.attention(*(part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts))
    expected = module.output(expected.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, context=context) if crossed else module(x), expected)


@pytest.mark.parametrize("padding", [None, LEFT, RIGHT], ids=["whole", "left", "right"])
def test_a_mechanism_that_reads_tokens_gets_those_the_queries_were_made_from(padding):
    module = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, gate=True, mechanism=WeighedConfig()))
    x = tokens()
    plain = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, gate=True))
    plain.load_state_dict({n: p for n, p in module.state_dict().items() if "mechanism" not in n})
    # A number for each row goes past the output projection.
    expected = plain(x, padding=padding) * (x @ module.mechanism.weight)[..., None]
    torch.testing.assert_close(module(x, padding=padding), expected)


@looped("padding", [LEFT, RIGHT])
@of(CAUSAL)
def test_what_stands_in_padding_is_not_read(mechanism, padding):
    module = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, gate=True, mechanism=mechanism))
    real = torch.from_numpy(padding.replaced(queries=padding.keys).dense(L, L).diagonal(dim1=-2, dim2=-1).numpy())[:, 0]
    x, results = tokens(), []
    for poison in (0.0, float("nan")):
        leaf = x.masked_fill(~real[..., None], poison).requires_grad_()
        out = module(leaf, Causal(), padding=padding)
        out[real].square().sum().backward()
        results.append((out, leaf.grad, *(p.grad for p in module.parameters())))
        module.zero_grad()
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)


def test_weights_are_drawn_anew_with_those_of_the_mechanism():
    module = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, mechanism=WeighedConfig()))
    before = module.mechanism.weight.detach().clone()
    module.reset_parameters()
    assert not torch.equal(before, module.mechanism.weight)


def test_each_layer_of_a_stack_knows_its_depth():
    config = BlockConfig(AttentionConfig(WIDTH, HEADS, mechanism=WeighedConfig()))
    assert [block.config.attention.mechanism.layer for block in Decoder(config, 3).blocks] == [0, 1, 2]


# --- decoding ---------------------------------------------------------------------------------------------------------


@of(CAUSAL)
@looped("sizes", [[1] * L, [4, 1, 6], [11], [0, 3, 8]])
def test_decoding_equals_the_parallel_form(mechanism, sizes):
    decoder = Decoder(BlockConfig(AttentionConfig(WIDTH, HEADS, positions=ROTARY, mechanism=mechanism)), 2)
    x, cache = tokens(), decoder.cache()
    kind = RecurrentLayer if isinstance(mechanism, MeanConfig) else GrowingLayer
    assert all(type(layer) is kind for layer in cache.layers)
    with torch.no_grad():
        parts = torch.cat([decoder(part, cache=cache) for part in x.split(sizes, 1)], 1)
    torch.testing.assert_close(parts, decoder(x))
    assert cache.length == L


@of(CAUSAL)
@looped("side", ["left", "right"])
@looped("grad", [False, True])
def test_items_of_unequal_length_decode_as_each_alone(mechanism, side, grad):
    """A prompt padded on either side, a chunk padded on either side, then single tokens."""
    decoder = Decoder(BlockConfig(AttentionConfig(WIDTH, HEADS, positions=ROTARY, mechanism=mechanism)), 2)
    prompt, chunk, steps = [4, 7, 1], [3, 0, 5], 2
    total = [p + c + steps for p, c in zip(prompt, chunk, strict=True)]
    x = [torch.randn(length, WIDTH) for length in total]
    cache, outs = decoder.cache(), [[] for _ in x]

    def call(first, lengths):
        rows = [row[start : start + length] for row, start, length in zip(x, first, lengths, strict=True)]
        padded, padding = saccade.batching.pad(rows, side=side, value=float("nan"))
        out = decoder(padded, cache=cache, padding=padding)
        for got, part in zip(outs, saccade.batching.unpad(out, padding), strict=True):
            got.append(part)

    with torch.set_grad_enabled(grad):
        call([0, 0, 0], prompt)
        call(prompt, chunk)
        for step in range(steps):
            call([length - steps + step for length in total], [1, 1, 1])
    assert cache.length.tolist() == total
    for got, row in zip(outs, x, strict=True):
        torch.testing.assert_close(torch.cat(got), decoder(row[None])[0])


@of(CAUSAL)
def test_beams_are_reordered(mechanism):
    decoder = Decoder(BlockConfig(AttentionConfig(WIDTH, HEADS, mechanism=mechanism)), 2)
    x, items, cache = tokens(), torch.tensor([2, 0, 2, 1]), decoder.cache()
    with torch.no_grad():
        decoder(x[:, :6], cache=cache, padding=Padding([6, 5, 2]))
        cache.reorder(items)
        assert cache.length.tolist() == [2, 6, 2, 5]
        if isinstance(mechanism, MeanConfig):
            with pytest.raises(ValueError, match="rollback: a state can take back the tokens of the last call"):
                cache.rollback(torch.tensor([2, 6, 2, 5]))
        out = decoder(x[items, 6:7], cache=cache)
    for row, item in enumerate(items.tolist()):
        past = x[item : item + 1, : [6, 5, 2][item]]
        torch.testing.assert_close(out[row], decoder(torch.cat((past, x[item : item + 1, 6:7]), 1))[0, -1:])


@of(CAUSAL)
def test_a_call_is_taken_back_and_a_cache_begins_anew(mechanism):
    decoder = Decoder(BlockConfig(AttentionConfig(WIDTH, HEADS, mechanism=mechanism)), 2)
    x, cache = tokens(), decoder.cache()
    with torch.no_grad():
        decoder(x[:, :6], cache=cache)
        decoder(x[:, 2:5], cache=cache)
        cache.rollback(3)
        assert cache.length == 6
        torch.testing.assert_close(decoder(x[:, 6:], cache=cache), decoder(x)[:, 6:])
        cache.reset()
        assert cache.length == 0 and cache[0].nbytes == 0
        torch.testing.assert_close(decoder(x[:2], cache=cache), decoder(x[:2]))


def test_a_state_weighs_what_its_tensors_weigh():
    module = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, mechanism=MeanConfig()))
    cache = module.cache()
    module(tokens(), Causal(), cache=cache)
    assert cache.nbytes == 4 * (B * WIDTH + B)  # float32: the sums of all heads, and a count


def test_without_a_mask_new_rows_see_each_other_in_items_of_unequal_length():
    plain, ours = twins(NoPairsConfig())
    x, caches = tokens(), [GrowingLayer(), GrowingLayer()]
    with torch.no_grad():
        for part, padding in ((x[:, :4], Padding([4, 2, 0])), (x[:, 4:], Padding([5, 7, 3]))):
            outs = [
                module(part, cache=cache, padding=padding) for module, cache in zip((plain, ours), caches, strict=True)
            ]
            for one, other in zip(*(saccade.batching.unpad(out, padding) for out in outs), strict=True):
                torch.testing.assert_close(one, other)


def test_configurations_differ_by_their_mechanisms():
    values = LinearConfig(), LinearConfig("relu"), None
    linear, relu, plain = (AttentionConfig(WIDTH, HEADS, mechanism=value) for value in values)
    assert len({linear, relu, plain}) == 3 and linear == AttentionConfig(WIDTH, HEADS, mechanism=LinearConfig())


def test_a_state_takes_back_its_last_call_only():
    decoder = Decoder(BlockConfig(AttentionConfig(WIDTH, HEADS, mechanism=MeanConfig())), 2)
    x, cache = tokens(), decoder.cache()
    with torch.no_grad():
        decoder(x[:, :6], cache=cache)
        decoder(x[:, 6:9], cache=cache)
        with pytest.raises(
            ValueError, match="rollback: a state can take back the tokens of the last call, all of them"
        ):
            cache.rollback(2)
        with pytest.raises(ValueError, match="rollback: must be an int or one for each of 3 items"):
            cache.rollback(torch.tensor([1, 2]))
        cache.rollback(0)
        cache.rollback(3)
        with pytest.raises(ValueError, match="rollback: a state can take back"):
            cache.rollback(6)
        torch.testing.assert_close(decoder(x[:, 6:], cache=cache), decoder(x)[:, 6:])


@of(dict(mean=MeanConfig(), pairless=NoPairsConfig()))
def test_a_call_that_fails_half_way_leaves_no_trace(mechanism):
    decoder = Decoder(BlockConfig(AttentionConfig(WIDTH, HEADS, mechanism=mechanism)), 3)
    x, cache = tokens(), decoder.cache()

    def fail(*_):
        raise RuntimeError("told to fail")

    with torch.no_grad():
        decoder(x[:, :4], cache=cache, padding=Padding([4, 2, 3]))
        before = cache.length
        handle = decoder.blocks[1].attention.output.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="told to fail"):
            decoder(x[:, 4:7], cache=cache, padding=Padding([3, 3, 0]))
        handle.remove()
        assert torch.equal(cache.length, before)
        out = decoder(x[:, 4:], cache=cache)
    torch.testing.assert_close(out[0], decoder(x[:1])[0, 4:])


def test_positions_that_are_given_count_for_a_state_too():
    module = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, positions=ROTARY, mechanism=LinearConfig()))
    x, cache, places = tokens(), module.cache(), torch.arange(L) ** 2 % 7 + torch.tensor([[0], [5], [1000]])
    with torch.no_grad():
        parts = [module(x[:, part], Causal(), cache=cache, offset=places[:, part]) for part in (slice(4), slice(4, L))]
        torch.testing.assert_close(torch.cat(parts, 1), module(x, Causal(), offset=places))
        assert not torch.allclose(torch.cat(parts, 1), module(x, Causal()))


def test_a_state_that_does_not_fit_is_refused():
    module = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, mechanism=MeanConfig()))
    cache = module.cache()
    with torch.no_grad():
        module(tokens(), Causal(), cache=cache)
        with pytest.raises(ValueError, match="cache: it holds the state of a batch of 3, but tokens for 2 came"):
            module(tokens(1, batch=2), Causal(), cache=cache)
        with pytest.raises(ValueError, match="x: has 3 rows, but padding is of 2"):
            module(tokens(1), Causal(), cache=cache, padding=Padding([1, 0]))
        with pytest.raises(ValueError, match=r"mask: a state is read causally, expected Causal\(\), got None"):
            module(tokens(1), cache=cache)
        with pytest.raises(ValueError, match="cache: it is another module's"):
            copy.deepcopy(module)(tokens(1), Causal(), cache=cache)
        with pytest.raises(ValueError, match="bias: not supported with a recurrent state"):
            module(tokens(1), Causal(), cache=cache, bias=torch.zeros(1, 1))
        with pytest.raises(ValueError, match="bias: not supported with a recurrent state"):
            module(tokens(1), Causal(), cache=cache, positions=AlibiConfig().build(HEADS, WIDTH // HEADS))
        with pytest.raises(ValueError, match="observe: not supported with a recurrent state"):
            module(tokens(1), Causal(), cache=cache, observe=print)
        assert cache.length == L
    with pytest.raises(TypeError, match="mechanism: expected a recurrent one, got Linear"):
        RecurrentLayer(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="cache: a RecurrentLayer holds a state"):
        cache.append(torch.zeros(1), torch.zeros(1), None)


@of(dict(mean=MeanConfig(), linear=LinearConfig()))
def test_a_state_of_inference_mode_goes_on_outside_of_it(mechanism):
    decoder = Decoder(BlockConfig(AttentionConfig(WIDTH, HEADS, mechanism=mechanism)), 2)
    x, cache = tokens(), decoder.cache()
    with torch.inference_mode():
        decoder(x[:, :5], cache=cache)
        cache.reorder(torch.tensor([0, 1, 2]))
    rest = x[:, 5:].clone().requires_grad_()
    out = decoder(rest, cache=cache)
    out.sum().backward()
    torch.testing.assert_close(out, decoder(x)[:, 5:])
    whole = x.clone().requires_grad_()
    decoder(whole)[:, 5:].sum().backward()
    torch.testing.assert_close(rest.grad, whole.grad[:, 5:])


def test_gradients_reach_earlier_steps_through_a_state():
    decoder = Decoder(BlockConfig(AttentionConfig(WIDTH, HEADS, mechanism=MeanConfig())), 2)
    x, cache = tokens().requires_grad_(), decoder.cache()
    out = torch.cat([decoder(part, cache=cache) for part in x.split([3, 7, 1], 1)], 1)
    cotangent = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, x, cotangent), torch.autograd.grad(decoder(x), x, cotangent))


@pytest.mark.slow
def test_a_step_with_a_state_is_compiled():
    module = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, mechanism=MeanConfig()))
    compiled, x, cache = torch.compile(module, backend="eager"), tokens(), module.cache()
    with torch.no_grad():
        parts = torch.cat([compiled(part, Causal(), cache=cache) for part in x.split([9, 1, 1], 1)], 1)
        torch.testing.assert_close(parts, module(x, Causal()))


@of(dict(pairless=NoPairsConfig(), weighed=WeighedConfig()))
@looped("positions", [None, ROTARY])
def test_only_caches_in_order_serve_a_mechanism_that_knows_no_placed_masks(mechanism, positions):
    module = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, positions=positions, mechanism=mechanism))
    with torch.no_grad():
        for cache in (StaticLayer(20), WindowLayer(20), StreamingLayer(20)):
            with pytest.raises(
                ValueError,
                match=rf"decodes with the cache that its module makes \(cache\(\)\), got a {type(cache).__name__}",
            ):
                module(tokens(), Causal(), cache=cache)
            assert cache.length == 0
        with pytest.raises(
            ValueError, match=r"mask: with a cache the mechanism '.*' takes Causal\(\) or None, got Window"
        ):
            module(tokens(), Window(3, 0), cache=GrowingLayer())


@dataclasses.dataclass(frozen=True)
class BiasedConfig(ExactConfig):
    traits = dataclasses.replace(NoPairsConfig.traits, takes=("bias",))


def test_a_bias_names_rows_and_keys_so_nothing_may_be_moved_under_it():
    module = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, mechanism=BiasedConfig()))
    x, bias, cache = tokens(), torch.linspace(0, 3, L * L).view(1, 1, L, L), GrowingLayer()
    with torch.no_grad():
        torch.testing.assert_close(module(x, Causal(), cache=GrowingLayer(), bias=bias), module(x, Causal(), bias=bias))
        with pytest.raises(ValueError, match="bias: not with 'exact' and a cache of items of unequal length"):
            module(x, Causal(), cache=cache, bias=bias, padding=RIGHT)


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "context": (
        dict(context_width=13),
        r"context: the mechanism 'nothing' supports only self-attention.*since it is made",
    ),
    "values": (dict(values_width=13), r"context: the mechanism 'nothing' supports only self-attention"),
    "kv_heads": (dict(kv_heads=2), r"kv_heads: not with the mechanism 'nothing', since heads are alone; got 2"),
    "alibi": (dict(positions=AlibiConfig()), r"positions: not with the mechanism 'nothing', since it has no logits"),
    "t5": (dict(positions=T5Config()), r"positions: not with the mechanism 'nothing', since it has no logits"),
    "window": (dict(window=Window(3, 0)), r"window: not with the mechanism 'nothing', since no pairs are formed"),
    "sink": (dict(sink=True), r"sink: not with the mechanism 'nothing', since it has no denominator"),
    "scale": (dict(scale=0.0), r"scale: not with the mechanism 'nothing', since it has no logits for that; got 0.0"),
    "softcap": (dict(softcap=2.0), r"softcap: not with the mechanism 'nothing', since it has no logits for that"),
    "dropout": (dict(dropout=0.1), r"dropout: not with the mechanism 'nothing', since it has no weights"),
}


@looped("options, words", REFUSED.values())
def test_what_a_mechanism_would_leave_out_in_silence_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        AttentionConfig(WIDTH, HEADS, **options, mechanism=NothingConfig())
    AttentionConfig(WIDTH, HEADS, **options, mechanism=None)


def test_what_stands_around_a_mechanism_is_not_refused():
    options = dict(qk_norm="rms", eps=1e-3, gate=True, bias=True, output_bias=False, positions=ROTARY, head_width=2)
    module = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, **options, mechanism=NothingConfig()))
    assert module(tokens()).shape == (B, L, WIDTH)


def test_every_field_is_either_outside_of_a_mechanism_or_checked():
    """A new field of AttentionConfig has to be thought of here."""
    outside = {
        "width",
        "heads",
        "head_width",
        "value_head_width",
        "out_width",
        "fused",
        "bias",
        "output_bias",
        "qk_norm",
        "eps",
    }
    checked = {
        "kv_heads",
        "context_width",
        "values_width",
        "positions",
        "sink",
        "window",
        "scale",
        "softcap",
        "dropout",
    }
    assert outside | checked | {"gate", "mechanism"} == set(AttentionConfig.__dataclass_fields__)


def test_sizes_that_do_not_fit_a_mechanism():
    with pytest.raises(ValueError, match="heads: the mechanism 'twice' splits each head in 2, but 21 / 7 = 3"):
        AttentionConfig(21, 7, mechanism=TwiceConfig())
    with pytest.raises(ValueError, match="positions: .* the head width must be even, got 3"):
        AttentionConfig(36, 6, positions=ROTARY, mechanism=TwiceConfig())
    with pytest.raises(
        ValueError, match="kv_heads: not with the mechanism 'shared', since keys are the queries; got 2"
    ):
        AttentionConfig(WIDTH, HEADS, 2, mechanism=SharedConfig())
    with pytest.raises(ValueError, match="context_width: not with the mechanism 'shared', since keys are the queries"):
        AttentionConfig(WIDTH, HEADS, context_width=13, mechanism=SharedConfig())
    with pytest.raises(TypeError, match="mechanism: expected a configuration of saccade.variants or None, got str"):
        AttentionConfig(WIDTH, HEADS, mechanism="linear")


def test_what_is_given_to_a_call_is_refused_by_name():
    module = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, mechanism=NothingConfig()))
    with pytest.raises(ValueError, match="context: the mechanism 'nothing' supports only self-attention"):
        module(tokens(), context=tokens(5))
    with pytest.raises(ValueError, match="bias: the mechanism 'nothing' has no logits to add it to"):
        module(tokens(), bias=torch.zeros(1, 1, L, L))
    for cache in (module.cache, lambda: module(tokens(), cache=GrowingLayer())):
        with pytest.raises(
            ValueError, match="cache: the mechanism 'nothing' cannot decode from keys and values, since k"
        ):
            cache()
    pairless = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, mechanism=NoPairsConfig()))
    for mask in (Window(2, 0), Causal() & Global([0]), torch.ones(L, L, dtype=torch.bool)):
        with pytest.raises(
            ValueError, match=r"mask: no-pairs takes Causal\(\), Padding\(...\) and both of them, since"
        ):
            pairless(tokens(), mask)


def test_stacks_refuse_what_their_mechanism_cannot_be():
    config = BlockConfig(AttentionConfig(WIDTH, HEADS, mechanism=NothingConfig()))
    with pytest.raises(ValueError, match="mechanism: 'nothing' cannot be causal, since all tokens are mixed"):
        Decoder(config, 2)
    assert Decoder(config, 2, causal=False)(tokens()).shape == Encoder(config, 2)(tokens()).shape
    with pytest.raises(ValueError, match="cross: the mechanism 'nothing' supports only self-attention"):
        BlockConfig(AttentionConfig(WIDTH, HEADS), cross=AttentionConfig(WIDTH, HEADS, mechanism=NothingConfig()))
    plain = BlockConfig(AttentionConfig(WIDTH, HEADS))
    with pytest.raises(ValueError, match="cross: the mechanism 'nothing' supports only self-attention"):
        Transformer(config, 1)
    with pytest.raises(ValueError, match="mechanism: 'nothing' cannot be causal"):
        Transformer(dataclasses.replace(config, cross=AttentionConfig(WIDTH, HEADS)), 1)
    out = Transformer(config, 1, decoder=plain)(tokens(5), tokens())
    assert out.shape == (B, L, WIDTH)


def test_observers_are_told_of_the_mechanism():
    decoder = Decoder(BlockConfig(AttentionConfig(WIDTH, HEADS, mechanism=MeanConfig())), 2)
    told = []
    decoder(tokens(), observe=lambda layer, seen: told.append((layer, seen.mechanism)))
    assert told == [(0, decoder.blocks[0].attention.mechanism), (1, decoder.blocks[1].attention.mechanism)]


def test_a_cache_of_keys_serves_a_recurrent_mechanism_too():
    decoder = Decoder(BlockConfig(AttentionConfig(WIDTH, HEADS, mechanism=MeanConfig())), 2)
    x, cache = tokens(), KVCache.growing(2)
    with torch.no_grad():
        parts = torch.cat([decoder(part, cache=cache) for part in x.split([4, 1, 6], 1)], 1)
    torch.testing.assert_close(parts, decoder(x))
