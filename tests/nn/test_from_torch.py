"""PyTorch's modules and ours, back and forth: equal outputs, equal gradients, masks translated."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from saccade import Causal, FromTensor, Padding, Window
from saccade.nn import (
    AttentionConfig,
    BlockConfig,
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    MultiHeadAttention,
    Transformer,
    from_torch,
    masks_from_torch,
    to_torch,
)
from saccade.positions import RotaryConfig

B, LS, LT, WIDTH, HEADS, HIDDEN = 3, 11, 7, 22, 2, 17
LAYER = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": HIDDEN, "dropout": 0.0, "batch_first": True}


@pytest.fixture(autouse=True)
def slow_path():
    """PyTorch's fast path for inference puts zeros into padded places and calls no attention that has a gradient."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def build(kind, *arguments, **options):
    """A float64 module with no weight at its initial value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch tells which fast path it will not take
        module = kind(*arguments, **options).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def tokens(length, width=WIDTH):
    return torch.randn(B, length, width, dtype=torch.float64, requires_grad=True)


def ignored(lengths, longest):
    return torch.arange(longest) >= torch.tensor(lengths)[:, None]


def same(theirs, ours, out, expected, inputs, kept=None):
    """Equal outputs at real tokens, and equal gradients of inputs and of every weight."""
    kept = torch.ones(expected.shape[:2], dtype=torch.bool) if kept is None else kept
    torch.testing.assert_close(out[kept], expected[kept])
    cotangent = torch.randn_like(expected[kept])
    of_theirs = torch.autograd.grad(expected[kept], [*inputs, *theirs.parameters()], cotangent)
    of_ours = torch.autograd.grad(out[kept], [*inputs, *ours.parameters()], cotangent)
    torch.testing.assert_close(of_ours[: len(inputs)], of_theirs[: len(inputs)])
    # Weights may be cut differently, but they are the same numbers.
    total = [sum(g.sum() for g in grads[len(inputs) :]) for grads in (of_ours, of_theirs)]
    square = [sum(g.square().sum() for g in grads[len(inputs) :]) for grads in (of_ours, of_theirs)]
    torch.testing.assert_close(total[0], total[1])
    torch.testing.assert_close(square[0], square[1])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_multihead_self_attention(bias, batch_first):
    theirs = build(nn.MultiheadAttention, WIDTH, HEADS, bias=bias, batch_first=batch_first)
    ours, x = from_torch(theirs), tokens(LT)
    assert type(ours) is MultiHeadAttention
    given = x if batch_first else x.transpose(0, 1)
    causal = torch.ones(LT, LT, dtype=torch.bool).triu(1)
    padding = ignored([3, 7, 5], LT)
    expected, _ = theirs(given, given, given, attn_mask=causal, key_padding_mask=padding)
    mask, scores = masks_from_torch(causal, padding)
    assert scores is None
    same(theirs, ours, ours(x, mask), expected if batch_first else expected.transpose(0, 1), [x])


@pytest.mark.parametrize("widths", [{}, {"kdim": 13}, {"kdim": 13, "vdim": 5}, {"vdim": 5}], ids=str)
def test_multihead_cross_attention(widths):
    theirs = build(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True, **widths)
    ours = from_torch(theirs)
    x, key, value = tokens(LT), tokens(LS, theirs.kdim), tokens(LS, theirs.vdim)
    same(theirs, ours, ours(x, context=key, values=value), theirs(x, key, value)[0], [x, key, value])


def test_a_float_mask_of_each_head():
    theirs = build(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True)
    ours, x = from_torch(theirs), tokens(LT)
    scores = torch.randn(B * HEADS, LT, LT, dtype=torch.float64)
    by_key = torch.randn(B, LT, dtype=torch.float64)
    mask, bias = masks_from_torch(scores, by_key, heads=HEADS)
    assert mask is None
    same(theirs, ours, ours(x, bias=bias), theirs(x, x, x, attn_mask=scores, key_padding_mask=by_key)[0], [x])


LAYERS = [
    {},
    {"norm_first": True},
    {"activation": F.gelu, "layer_norm_eps": 0.1},
    {"activation": nn.GELU("tanh"), "norm_first": True, "bias": False},
    {"activation": "gelu"},
    {"activation": nn.SiLU()},
]


@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_encoder_layer_and_encoder(options):
    padding, x = ignored([11, 4, 7], LS), tokens(LS)
    layer = build(nn.TransformerEncoderLayer, **LAYER, **options)
    block = from_torch(layer)
    assert type(block) is EncoderBlock
    same(layer, block, block(x, Padding(~padding)), layer(x, src_key_padding_mask=padding), [x], ~padding)
    for norm in (None, nn.LayerNorm(WIDTH, eps=0.03, bias=options.get("bias", True))):
        theirs = build(nn.TransformerEncoder, layer, 3, norm)
        ours = from_torch(theirs)
        assert type(ours) is Encoder
        expected = theirs(x, src_key_padding_mask=padding)
        same(theirs, ours, ours(x, padding=Padding(~padding)), expected, [x], ~padding)


@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_decoder_layer_and_decoder(options):
    hidden, target, memory = ignored([11, 4, 7], LS), tokens(LT), tokens(LS)
    causal = nn.Transformer.generate_square_subsequent_mask(LT, dtype=torch.float64)
    layer = build(nn.TransformerDecoderLayer, **LAYER, **options)
    given = {"tgt_mask": causal, "memory_key_padding_mask": hidden}
    for theirs, kind in ((layer, DecoderBlock), (build(nn.TransformerDecoder, layer, 3), Decoder)):
        ours = from_torch(theirs)
        assert type(ours) is kind
        context = {"context": memory} if kind is Decoder else {"context": (memory, Padding(~hidden), None)}
        if kind is Decoder:
            out = ours(target, context_mask=Padding(~hidden), **context)
        else:
            from saccade.nn import Context

            out = ours(target, Causal(), context=Context(*context["context"]))
        same(theirs, ours, out, theirs(target, memory, **given), [target, memory])


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_transformer(norm_first, batch_first):
    theirs = build(nn.Transformer, WIDTH, HEADS, 3, 2, HIDDEN, 0.0, batch_first=batch_first, norm_first=norm_first)
    ours = from_torch(theirs)
    assert type(ours) is Transformer
    source, target = tokens(LS), tokens(LT)
    no_source, no_target = ignored([11, 4, 7], LS), ignored([5, 7, 3], LT)
    given = (source, target) if batch_first else (source.transpose(0, 1), target.transpose(0, 1))
    expected = theirs(
        *given,
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(LT, dtype=torch.float64),
        src_key_padding_mask=torch.zeros(B, LS, dtype=torch.float64).masked_fill(no_source, float("-inf")),
        memory_key_padding_mask=torch.zeros(B, LS, dtype=torch.float64).masked_fill(no_source, float("-inf")),
        tgt_key_padding_mask=torch.zeros(B, LT, dtype=torch.float64).masked_fill(no_target, float("-inf")),
    )
    out = ours(source, target, source_padding=Padding(~no_source), target_padding=Padding(~no_target))
    expected = expected if batch_first else expected.transpose(0, 1)
    same(theirs, ours, out, expected, [source, target], ~no_target)


def test_no_causal_mask_is_a_window_without_ends():
    theirs = build(nn.TransformerDecoder, nn.TransformerDecoderLayer(**LAYER), 2)
    ours, target, memory = from_torch(theirs), tokens(LT), tokens(LS)
    torch.testing.assert_close(ours(target, Window(None, None), context=memory), theirs(target, memory))


def test_dtype_mode_dropout_and_frozen_layers_are_taken_over():
    theirs = build(nn.TransformerEncoder, nn.TransformerEncoderLayer(**{**LAYER, "dropout": 0.3}), 2).eval().float()
    theirs.layers[1].self_attn.requires_grad_(False)
    ours = from_torch(theirs)
    assert not ours.training
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert ours.config.dropout == ours.config.feed_forward_dropout == ours.config.attention.dropout == 0.3
    frozen = {name for name, p in ours.named_parameters() if not p.requires_grad}
    assert frozen == {
        f"blocks.1.attention.{n}" for n in ("projection.weight", "projection.bias", "output.weight", "output.bias")
    }


def test_weights_are_copies():
    theirs = build(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True)
    ours = from_torch(theirs)
    before = ours.projection.weight.detach().clone()
    nn.init.zeros_(theirs.in_proj_weight)
    assert torch.equal(ours.projection.weight, before)


def round_trips():
    options = {"dropout": 0.1, "batch_first": True}
    yield "attention", lambda: nn.MultiheadAttention(WIDTH, HEADS, **options)
    yield "cross", lambda: nn.MultiheadAttention(WIDTH, HEADS, kdim=13, vdim=5, bias=False, **options)
    yield "encoder layer", lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, activation="gelu", **options)
    yield "decoder layer", lambda: nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, norm_first=True, **options)
    yield "encoder", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, **options), 3)
    yield "decoder", lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, **options), 3)
    yield "transformer", lambda: nn.Transformer(WIDTH, HEADS, 2, 3, HIDDEN, bias=False, **options)


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in round_trips()])
def test_there_and_back(make):
    theirs = build(make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        back = to_torch(from_torch(theirs))
    assert type(back) is type(theirs)
    assert list(back.state_dict()) == list(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    described = str(theirs)
    assert str(back) == described


class OwnAttention(nn.MultiheadAttention):
    pass


def odd_stack():
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER), 2, enable_nested_tensor=False)
    stack.layers[1] = nn.TransformerEncoderLayer(**{**LAYER, "dim_feedforward": 5})
    return stack


def reparametrized():
    layer = nn.TransformerEncoderLayer(**LAYER)
    nn.utils.parametrizations.weight_norm(layer.linear1)
    return layer


def normed(norm):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER), 2, norm, enable_nested_tensor=False)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: from_torch(nn.Linear(2, 3)),
            TypeError,
            "module: expected one of nn.MultiheadAttention, .* got Linear",
        ),
        (lambda: from_torch(OwnAttention(4, 2)), TypeError, "got OwnAttention .convert the parts of a larger model"),
        (
            lambda: from_torch(reparametrized()),
            ValueError,
            "module: ParametrizedLinear holds .*remove param",
        ),
        (lambda: from_torch(nn.MultiheadAttention(4, 2, add_bias_kv=True)), ValueError, "add_bias_kv=True"),
        (lambda: from_torch(nn.MultiheadAttention(4, 2, add_zero_attn=True)), ValueError, "add_zero_attn=True"),
        (
            lambda: from_torch(nn.TransformerEncoderLayer(**LAYER, activation=torch.tanh)),
            ValueError,
            "module: activation .*tanh.* ours has relu, gelu, gelu_tanh and silu",
        ),
        (lambda: from_torch(odd_stack()), ValueError, "module: its layers differ; convert them one by one"),
        (lambda: from_torch(normed(nn.Identity())), ValueError, r"module: its last norm Identity\(\)"),
        (lambda: to_torch(nn.Linear(2, 3)), TypeError, "module: expected one of MultiHeadAttention, .* got Linear"),
        (lambda: to_torch(MultiHeadAttention(AttentionConfig(8, 4, kv_heads=2))), ValueError, "kv_heads: 2 here, .* 4"),
        (
            lambda: to_torch(MultiHeadAttention(AttentionConfig(8, 4, positions=RotaryConfig()))),
            ValueError,
            r"positions: RotaryConfig\(.*\) here, and PyTorch's module has None only",
        ),
        (lambda: to_torch(Encoder(BlockConfig(AttentionConfig(8, 4)), 2)), ValueError, "norm: 'rms' here"),
        (
            lambda: to_torch(EncoderBlock(BlockConfig(AttentionConfig(8, 4), norm="layer"))),
            ValueError,
            "activation: 'swiglu' here",
        ),
        (
            lambda: to_torch(Decoder(BlockConfig(AttentionConfig(8, 4), norm="layer", activation="relu"), 2)),
            ValueError,
            "cross: None here, and PyTorch's decoder always reads a context",
        ),
    ],
)
def test_what_has_no_counterpart_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_masks_in_our_terms():
    causal = torch.ones(LT, LT, dtype=torch.bool).triu(1)
    later = torch.zeros(LT, LT).masked_fill(causal, float("-inf"))
    for given in (causal, later, later.double()):
        assert masks_from_torch(given) == (Causal(), None)
    some = torch.rand(LT, LS) < 0.5
    assert masks_from_torch(some) == (FromTensor(~some), None)
    three = torch.rand(B * HEADS, LT, LS) < 0.5
    assert masks_from_torch(three, heads=HEADS).mask == FromTensor(~three.view(B, HEADS, LT, LS))
    padding = ignored([3, 11, 7], LS)
    assert masks_from_torch(some, padding).mask == FromTensor(~some) & Padding(~padding)
    assert masks_from_torch() == (None, None)
    scores = torch.randn(LT, LS)
    assert masks_from_torch(scores, padding)[1] is scores


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: masks_from_torch(torch.zeros(2, 3, 4, 5)),
            ValueError,
            r"attn_mask: expected shape \(L, S\) or \(B H, L, S\)",
        ),
        (
            lambda: masks_from_torch(None, torch.zeros(5)),
            ValueError,
            r"key_padding_mask: expected shape \(B, S\), got \(5,\)",
        ),
        (lambda: masks_from_torch(torch.zeros(2, 3).long()), TypeError, "attn_mask: expected bool .* got torch.int64"),
        (lambda: masks_from_torch(torch.zeros(6, 3, 4), heads=4), ValueError, "heads: .* divide 6; got 4"),
        (lambda: masks_from_torch(torch.zeros(6, 3, 4)), ValueError, "heads: .* got None"),
    ],
)
def test_masks_that_cannot_be_read(call, error, message):
    with pytest.raises(error, match=message):
        call()
