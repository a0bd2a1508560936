"""What cannot be converted between PyTorch's modules and ours is refused, and named by its path."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from looped import looped
from saccade import Window
from saccade.nn import (
    AttentionConfig,
    BlockConfig,
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    FeedForward,
    MultiHeadAttention,
    Transformer,
    from_torch,
    to_torch,
)
from saccade.positions import RotaryConfig

WIDTH, HEADS, HIDDEN = 22, 2, 17
LAYER = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": HIDDEN, "dropout": 0.25, "batch_first": True}


class OwnAttention(nn.MultiheadAttention):
    pass


class OwnEncoderLayer(nn.TransformerEncoderLayer):
    pass


class OwnDecoderLayer(nn.TransformerDecoderLayer):
    pass


class OwnLinear(nn.Linear):
    pass


class OwnGELU(nn.GELU):
    pass


def encoder(layer=nn.TransformerEncoderLayer, layers=2, norm=None, **options):
    return nn.TransformerEncoder(layer(**{**LAYER, **options}), layers, norm, enable_nested_tensor=False)


def decoder(layer=nn.TransformerDecoderLayer, layers=2, norm=None, **options):
    return nn.TransformerDecoder(layer(**{**LAYER, **options}), layers, norm)


def transformer(**options):
    return nn.Transformer(WIDTH, HEADS, 2, 3, HIDDEN, batch_first=True, **options)


def put(module, path, part):
    """The module with another part, attribute or parameter at a path."""
    where, _, name = path.rpartition(".")
    setattr(module.get_submodule(where), name, part)
    return module


def tied(module, path, first):
    return put(module, path, module.get_submodule(first))


def tied_weight(module, path, first):
    return put(module, path, module.get_parameter(first))


def hooked(module, path, register):
    getattr(module.get_submodule(path), register)(lambda *given: None)
    return module


def gradient_hooked(module, path):
    module.get_parameter(path).register_hook(lambda gradient: 2 * gradient)
    return module


def accumulated(module, path):
    module.get_parameter(path).register_post_accumulate_grad_hook(lambda parameter: None)
    return module


def weight_normed(module, path):
    nn.utils.parametrizations.weight_norm(module.get_submodule(path))
    return module


def double(module, path):
    module.get_submodule(path).double()
    return module


PARTS = [
    (lambda: nn.Linear(2, 3), "expected one of nn.MultiheadAttention, .* got Linear .convert the parts of a larger"),
    (lambda: OwnAttention(4, 2), "expected one of .* got OwnAttention"),
    (lambda: encoder(OwnEncoderLayer), "layers.0 is OwnEncoderLayer, expected TransformerEncoderLayer"),
    (lambda: decoder(OwnDecoderLayer), "layers.0 is OwnDecoderLayer, expected TransformerDecoderLayer"),
    (lambda: put(encoder(), "layers.1", OwnEncoderLayer(**LAYER)), "layers.1 is OwnEncoderLayer"),
    (lambda: put(encoder(), "layers.1", nn.TransformerDecoderLayer(**LAYER)), "layers.1 is TransformerDecoderLayer"),
    (
        lambda: put(encoder(), "layers.1.self_attn", OwnAttention(WIDTH, HEADS, batch_first=True)),
        "layers.1.self_attn is OwnAttention, expected MultiheadAttention",
    ),
    (
        lambda: put(decoder(), "layers.0.multihead_attn", OwnAttention(WIDTH, HEADS, batch_first=True)),
        "layers.0.multihead_attn is OwnAttention",
    ),
    (
        lambda: put(encoder(bias=False), "layers.1.norm1", nn.RMSNorm(WIDTH)),
        "layers.1.norm1 is RMSNorm, expected LayerNorm",
    ),
    (lambda: put(encoder(), "layers.0.linear2", OwnLinear(HIDDEN, WIDTH)), "layers.0.linear2 is OwnLinear"),
    (
        lambda: put(nn.MultiheadAttention(4, 2), "out_proj", OwnLinear(4, 4)),
        "out_proj is OwnLinear, expected Linear",
    ),
    (
        lambda: weight_normed(encoder(), "layers.1.linear1"),
        "layers.1.linear1 is ParametrizedLinear, expected Linear",
    ),
    (lambda: put(encoder(), "layers.0.dropout1", nn.AlphaDropout(0.25)), "layers.0.dropout1 is AlphaDropout"),
    (lambda: put(decoder(), "layers.1.dropout3", nn.Identity()), "layers.1.dropout3 is Identity, expected Dropout"),
    (lambda: put(encoder(), "layers.1.norm2", None), "layers.1.norm2 is None, expected LayerNorm"),
    (lambda: put(decoder(), "layers.0.self_attn", None), "layers.0.self_attn is None, expected MultiheadAttention"),
    (lambda: put(encoder(), "layers", None), "layers is None, expected ModuleList"),
    (lambda: encoder(norm=nn.Identity()), "norm is Identity, expected LayerNorm"),
    (lambda: put(transformer(), "encoder", nn.Identity()), "encoder is Identity, expected TransformerEncoder"),
    (lambda: put(transformer(), "decoder", None), "decoder is None, expected TransformerDecoder"),
    (
        lambda: put(transformer(), "decoder.layers.2.norm3", nn.Identity()),
        "decoder.layers.2.norm3 is Identity, expected LayerNorm",
    ),
]


@looped(("make", "message"), PARTS)
def test_another_class_than_pytorchs_is_named(make, message):
    with pytest.raises(TypeError, match=f"^module: {message}"):
        from_torch(make())


LOST = [
    (lambda: hooked(encoder(), "layers.1.linear1", "register_forward_hook"), "layers.1.linear1 has a forward hook,"),
    (
        lambda: hooked(encoder(), "layers.0", "register_forward_pre_hook"),
        "layers.0 has a forward pre-hook, which would be lost; remove it first",
    ),
    (lambda: hooked(encoder(), "", "register_forward_hook"), "it has a forward hook"),
    (
        lambda: hooked(decoder(), "layers.1.self_attn.out_proj", "register_full_backward_hook"),
        "layers.1.self_attn.out_proj has a backward hook",
    ),
    (
        lambda: hooked(decoder(), "layers.0.norm3", "register_full_backward_pre_hook"),
        "layers.0.norm3 has a backward pre-hook",
    ),
    (
        lambda: hooked(encoder(activation=nn.GELU()), "layers.0.activation", "register_forward_hook"),
        "layers.0.activation has a forward hook",
    ),
    (
        lambda: gradient_hooked(encoder(), "layers.1.norm2.bias"),
        "layers.1.norm2.bias has a backward hook",
    ),
    (
        lambda: accumulated(encoder(), "layers.0.linear2.weight"),
        "layers.0.linear2.weight has a hook on its gradient",
    ),
    (
        lambda: put(encoder(), "layers.1.forward", lambda x, **given: x),
        "layers.1 has its own forward, expected the forward of its class",
    ),
    (lambda: tied(encoder(), "layers.1", "layers.0"), "layers.1 and layers.0 are one object"),
    (
        lambda: tied(decoder(), "layers.0.multihead_attn", "layers.0.self_attn"),
        "layers.0.multihead_attn and layers.0.self_attn are one object",
    ),
    (
        lambda: tied(transformer(), "decoder.norm", "encoder.norm"),
        "decoder.norm and encoder.norm are one object",
    ),
    (
        lambda: tied_weight(encoder(), "layers.1.linear1.weight", "layers.0.linear1.weight"),
        "layers.1.linear1.weight and layers.0.linear1.weight are one object",
    ),
    (
        lambda: double(encoder(), "layers.1.norm1"),
        "layers.1.norm1.weight has dtype torch.float64, and layers.0.self_attn.in_proj_weight has torch.float32; "
        "expected one for the whole module",
    ),
    (
        lambda: put(encoder(), "layers.0.linear2", nn.Linear(HIDDEN, WIDTH, device="meta")),
        "layers.0.linear2.weight has device meta, and layers.0.self_attn.in_proj_weight has cpu",
    ),
    (
        lambda: put(encoder(), "layers.1.self_attn.batch_first", False),
        "layers.1.self_attn has batch_first False, and layers.0.self_attn has True",
    ),
    (
        lambda: put(encoder(), "layers.0.adapter", nn.Linear(WIDTH, WIDTH)),
        "layers.0.adapter has no counterpart",
    ),
    (lambda: put(encoder(), "layers.0.scale", nn.Parameter(torch.ones(()))), "layers.0.scale has no counterpart"),
    (
        lambda: put(nn.MultiheadAttention(4, 2), "extra", nn.Parameter(torch.ones(4))),
        "extra has no counterpart",
    ),
]


@looped(("make", "message"), LOST)
def test_what_a_copy_would_lose_is_named(make, message):
    with pytest.raises(ValueError, match=f"^module: {message}"):
        from_torch(make())


MISSING = [
    (lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True), "it has add_bias_kv=True"),
    (lambda: nn.MultiheadAttention(4, 2, add_zero_attn=True), "it has add_zero_attn=True"),
    (
        lambda: put(encoder(), "layers.1.self_attn.add_zero_attn", True),
        "layers.1.self_attn has add_zero_attn=True",
    ),
    (
        lambda: nn.TransformerEncoderLayer(**LAYER, activation=torch.tanh),
        "activation .*tanh.* ours has relu, gelu, gelu_tanh and silu",
    ),
    (lambda: encoder(activation=OwnGELU()), r"layers.0.activation OwnGELU\(.*\) has no counterpart"),
    (
        lambda: put(encoder(), "layers.1", nn.TransformerEncoderLayer(**{**LAYER, "dim_feedforward": 5})),
        "layers.1 differs from the first, hidden is 5, expected 17; convert them one by one",
    ),
    (
        lambda: put(decoder(), "layers.1.multihead_attn.dropout", 0.5),
        "layers.1 differs from the first, cross.dropout is 0.5, expected 0.25",
    ),
    (
        lambda: put(encoder(), "layers.1.norm2.eps", 0.1),
        r"layers.1 has norm epsilons that differ, \[1e-05, 0.1\]; ours has one",
    ),
    (
        lambda: put(nn.TransformerDecoderLayer(**LAYER), "norm3.eps", 0.1),
        r"it has norm epsilons that differ, \[1e-05, 1e-05, 0.1\]",
    ),
    (
        lambda: put(nn.TransformerDecoderLayer(**LAYER), "dropout3.p", 0.5),
        r"it has dropouts that differ, \[0.25, 0.25, 0.5\]",
    ),
    (
        lambda: put(encoder(), "layers.0.dropout2", nn.Dropout(0.25).eval()),
        r"layers.0 has dropouts' training modes that differ, \[True, False\]",
    ),
    (lambda: encoder(layers=0), "layers is empty, expected at least one layer"),
    (lambda: decoder(layers=0, norm=nn.LayerNorm(WIDTH)), "layers is empty"),
    (lambda: nn.Transformer(WIDTH, HEADS, 0, 2, HIDDEN), "encoder.layers is empty"),
    (lambda: encoder(norm=nn.LayerNorm(WIDTH, bias=False)), "norm has no counterpart: .* a bias if the layers do"),
    (
        lambda: put(encoder(), "layers.1.norm1", nn.LayerNorm((11, WIDTH))),
        r"layers.1.norm1 holds weight \(11, 22\), bias \(11, 22\); expected weight \(22,\), bias \(22,\)",
    ),
    (
        lambda: put(encoder(), "layers.0.norm1", nn.LayerNorm(1)),
        r"layers.0.norm1 holds weight \(1,\), bias \(1,\); expected weight \(22,\)",
    ),
    (
        lambda: put(encoder(), "layers.0.norm2", nn.LayerNorm(WIDTH, bias=False)),
        r"layers.0.norm2 holds weight \(22,\); expected weight \(22,\), bias \(22,\)",
    ),
    (
        lambda: put(encoder(), "layers.0.norm2", nn.LayerNorm(WIDTH, elementwise_affine=False)),
        "layers.0.norm2 holds no weights; expected weight",
    ),
    (
        lambda: put(encoder(), "layers.0.linear2", nn.Linear(HIDDEN, WIDTH, bias=False)),
        r"layers.0.linear2 holds weight \(22, 17\); expected weight \(22, 17\), bias \(22,\)",
    ),
]


@looped(("make", "message"), MISSING)
def test_what_ours_does_not_have_is_named(make, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch tells which fast path it will not take
        module = make()
    with pytest.raises(ValueError, match=f"^module: {message}"):
        from_torch(module)


def test_parts_that_are_the_same_in_other_words_are_taken():
    module = put(encoder(activation=nn.ReLU()), "layers.0.self_attn.out_proj", nn.Linear(WIDTH, WIDTH))
    module.layers[0].dropout2.p = module.layers[0].dropout1.p = 0
    module.layers[1].dropout2.p = module.layers[1].dropout1.p = 0
    module.layers[0].dropout2.eval()  # drops nothing in either mode
    assert from_torch(module).config.dropout == 0


# And back.


ATTENTION = AttentionConfig(WIDTH, HEADS, bias=True)
BLOCK = BlockConfig(ATTENTION, hidden=HIDDEN, activation="relu", norm="layer", bias=True)
CROSS = replace(BLOCK, cross=ATTENTION)


@looped(
    ("changed", "message"),
    [
        ({"kv_heads": 1}, "kv_heads: 1 here, and PyTorch's module has 2 only"),
        ({"head_width": 13}, "head_width: 13 here, .* 11.0 only"),
        ({"value_head_width": 5}, "value_head_width: 5 here"),
        ({"output_bias": False}, "output_bias: False here, .* True only"),
        ({"positions": RotaryConfig(turned=4)}, r"positions: RotaryConfig\(.*\) here, .* None only"),
        ({"qk_norm": "rms"}, "qk_norm: 'rms' here"),
        ({"gate": True}, "gate: True here"),
        ({"sink": True}, "sink: True here"),
        ({"window": Window(3, 5)}, r"window: Window\(.*\) here"),
        ({"scale": 0.3}, "scale: 0.3 here"),
        ({"softcap": 7.0}, "softcap: 7.0 here"),
    ],
)
def test_attention_that_pytorch_does_not_have_is_named(changed, message):
    odd = replace(ATTENTION, **changed)
    calls = [
        lambda: MultiHeadAttention(odd),
        lambda: EncoderBlock(replace(BLOCK, attention=odd)),
        lambda: Encoder(replace(BLOCK, attention=odd), 2),
    ]
    if "positions" not in changed:
        calls.append(lambda: DecoderBlock(replace(BLOCK, cross=odd)))
    for make in calls:
        module = make()
        with pytest.raises(ValueError, match=f"^{message}"):
            to_torch(module)


@looped(
    ("make", "message"),
    [
        (lambda: Encoder(replace(BLOCK, norm="rms"), 2), "norm: 'rms' here"),
        (lambda: EncoderBlock(replace(BLOCK, activation="swiglu")), "activation: 'swiglu' here"),
        (lambda: EncoderBlock(replace(BLOCK, placement="parallel")), "placement: 'parallel' here"),
        (
            lambda: EncoderBlock(replace(BLOCK, bias=False)),
            "attention_bias: True here, and PyTorch's module has False only",
        ),
        (
            lambda: EncoderBlock(replace(BLOCK, hidden=0)),
            "hidden: 0 here, and PyTorch's layers always have a feed-forward layer",
        ),
        (lambda: Decoder(BLOCK, 2), "cross: None here, and PyTorch's decoder always reads a context"),
        (lambda: DecoderBlock(BLOCK), "cross: None here, and PyTorch's decoder layer always reads a context"),
    ],
)
def test_blocks_that_pytorch_does_not_have_are_named(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        to_torch(make())


def rope():
    return RotaryConfig(turned=4).build(HEADS, WIDTH // HEADS)


CHANGED = [
    (
        lambda: put(Encoder(BLOCK, 3), "blocks.0.attention", MultiHeadAttention(replace(ATTENTION, softcap=0.1))),
        ValueError,
        "blocks.0.attention: softcap is 0.1, expected None",
    ),
    (
        lambda: put(Decoder(CROSS, 3), "blocks.2.cross.config", replace(ATTENTION, scale=0.1, fused=False)),
        ValueError,
        "blocks.2.cross: scale is 0.1, expected None",
    ),
    (
        lambda: put(EncoderBlock(BLOCK), "attention", MultiHeadAttention(replace(ATTENTION, window=Window(1, 1)))),
        ValueError,
        r"attention: window is Window\(.*\), expected None",
    ),
    (
        lambda: put(Encoder(BLOCK, 3), "blocks.1", EncoderBlock(replace(BLOCK, placement="post"))),
        ValueError,
        "blocks.1: placement is 'post', expected 'pre'",
    ),
    (
        lambda: put(Transformer(BLOCK, 2), "decoder.blocks.1.dropout.p", 0.5),
        ValueError,
        r"decoder.blocks.1.dropout is Dropout\(p=0.5, .*\), expected Dropout\(p=0.0, .*\), as configured",
    ),
    (
        lambda: put(Encoder(BLOCK, 2), "blocks.1.feed_forward.activation", "silu"),
        ValueError,
        r"blocks.1.feed_forward is FeedForward\('silu'\), expected FeedForward\('relu'\)",
    ),
    (
        lambda: put(Encoder(BLOCK, 2), "blocks.1.feed_forward_norm.eps", 0.1),
        ValueError,
        r"blocks.1.feed_forward_norm is LayerNorm\(.*eps=0.1.*\), expected",
    ),
    (
        lambda: put(Encoder(BLOCK, 2), "blocks.1.feed_forward", FeedForward(WIDTH, HIDDEN, "swiglu", bias=True)),
        ValueError,
        "blocks.1.feed_forward.gate_up has no counterpart",
    ),
    (
        lambda: put(Encoder(BLOCK, 2), "blocks.0.attention_norm", nn.RMSNorm(WIDTH)),
        TypeError,
        "blocks.0.attention_norm is RMSNorm, expected LayerNorm",
    ),
    (
        lambda: put(Encoder(BLOCK, 2), "blocks.0.attention.positions", rope()),
        ValueError,
        "blocks.0.attention.positions has no counterpart",
    ),
    (lambda: put(Encoder(BLOCK, 2), "positions", rope()), ValueError, "positions has no counterpart"),
    (
        lambda: put(MultiHeadAttention(ATTENTION), "output", OwnLinear(WIDTH, WIDTH)),
        TypeError,
        "output is OwnLinear, expected Linear",
    ),
    (
        lambda: put(MultiHeadAttention(ATTENTION), "sink", nn.Parameter(torch.zeros(HEADS))),
        ValueError,
        "sink has no counterpart",
    ),
    (
        lambda: put(Encoder(BLOCK, 2), "blocks.0", DecoderBlock(BLOCK)),
        TypeError,
        "blocks.0 is DecoderBlock, expected EncoderBlock",
    ),
    (lambda: put(Encoder(BLOCK, 2), "blocks", nn.ModuleList()), ValueError, "blocks is empty"),
    (lambda: put(Encoder(BLOCK, 2), "norm", nn.RMSNorm(WIDTH)), TypeError, "norm is RMSNorm, expected LayerNorm"),
    (
        lambda: put(Encoder(BLOCK, 2), "norm", nn.LayerNorm(WIDTH, bias=False)),
        ValueError,
        r"norm holds weight \(22,\); expected weight \(22,\), bias \(22,\)",
    ),
    (lambda: put(Transformer(BLOCK, 2), "encoder", Decoder(CROSS, 2)), TypeError, "encoder is Decoder, expected Enc"),
    (lambda: put(Transformer(BLOCK, 2), "decoder", Encoder(BLOCK, 2)), TypeError, "decoder is Encoder, expected Dec"),
    (lambda: put(Transformer(BLOCK, 2), "embed", nn.Linear(2, 3)), ValueError, "embed has no counterpart"),
    (lambda: nn.Linear(2, 3), TypeError, "expected one of MultiHeadAttention, .* got Linear"),
    (lambda: tied(Encoder(BLOCK, 2), "blocks.1", "blocks.0"), ValueError, "blocks.1 and blocks.0 are one object"),
    (
        lambda: hooked(Encoder(BLOCK, 2), "blocks.1.attention", "register_forward_hook"),
        ValueError,
        "blocks.1.attention has a forward hook",
    ),
    (
        lambda: double(Encoder(BLOCK, 2), "blocks.1.feed_forward"),
        ValueError,
        "blocks.1.feed_forward.up.weight has dtype torch.float64, and blocks.0.attention_norm.weight has torch.float32",
    ),
]


@looped(("make", "error", "message"), CHANGED)
def test_parts_that_are_not_what_the_configuration_says_are_named(make, error, message):
    with pytest.raises(error, match=f"^module: {message}"):
        to_torch(make())


def test_what_is_said_is_plain():
    """The whole of one message, as a user reads it."""
    module = put(encoder(bias=False), "layers.1.norm1", nn.RMSNorm(WIDTH))
    with pytest.raises(TypeError, match=re.escape("module: layers.1.norm1 is RMSNorm, expected LayerNorm") + "$"):
        from_torch(module)
