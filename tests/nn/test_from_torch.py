"""PyTorch's modules and ours, back and forth: equal outputs, equal gradients, masks translated."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from looped import looped
from saccade import Causal, FromTensor, Padding
from saccade.nn import (
    AttentionConfig,
    BlockConfig,
    Context,
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
from saccade.nn._from_torch import WITH_WEIGHTS, pairs, tensors

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
    compared = 0
    held = (holding(theirs, of_theirs[len(inputs) :]), holding(ours, of_ours[len(inputs) :]))
    for one, other in pairs(*held):
        if isinstance(one.module, WITH_WEIGHTS):
            gradients = tensors(one.module)
            torch.testing.assert_close(tensors(other.module), gradients, msg=lambda m, path=one.path: f"{path}: {m}")
            compared += sum(gradient.numel() for gradient in gradients.values())
    assert compared == sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())


def holding(module, gradients):
    """A copy of a module that has gradients where the module has weights: fused ones are cut as weights are."""
    twin = copy.deepcopy(module)
    for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
        parameter.data = gradient
    return twin


@looped("bias", [False, True])
@looped("batch_first", [False, True])
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


@looped("widths", [{}, {"kdim": 13}, {"kdim": 13, "vdim": 5}, {"vdim": 5}])
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


def test_a_decoder_that_is_not_causal_sees_everything():
    theirs = build(nn.TransformerDecoder, nn.TransformerDecoderLayer(**LAYER), 2)
    ours, target, memory = from_torch(theirs), tokens(LT), tokens(LS)
    causal = nn.Transformer.generate_square_subsequent_mask(LT, dtype=torch.float64)
    torch.testing.assert_close(ours(target, context=memory), theirs(target, memory, tgt_mask=causal))
    ours.causal = False
    torch.testing.assert_close(ours(target, context=memory), theirs(target, memory))


# Three probabilities that differ, where PyTorch's constructor takes one.
WEIGHTS, RESIDUAL, INSIDE = 0.11, 0.23, 0.37


def distinct_dropouts(layer):
    """In PyTorch `dropout` is inside the feed-forward layer; `dropout1`, `2`, `3` are around the residual stream."""
    for name, part in layer.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = WEIGHTS
        elif isinstance(part, nn.Dropout):
            part.p = INSIDE if name == "dropout" else RESIDUAL
    return layer


LAYER_KINDS = [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer]


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_each_dropout_has_its_place(kind):
    block = from_torch(distinct_dropouts(build(kind, **LAYER)))
    assert (block.config.attention.dropout, block.config.dropout, block.config.feed_forward_dropout) == (
        WEIGHTS,
        RESIDUAL,
        INSIDE,
    )
    assert (block.dropout.p, block.feed_forward.dropout.p) == (RESIDUAL, INSIDE)
    if kind is nn.TransformerDecoderLayer:
        assert block.config.cross.dropout == block.cross.config.dropout == WEIGHTS


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_each_dropout_has_its_place_in_pytorch(kind):
    of = {"bias": True, "output_bias": True, "dropout": WEIGHTS}
    decoder = kind is nn.TransformerDecoderLayer
    config = BlockConfig(
        AttentionConfig(WIDTH, HEADS, **of),
        cross=AttentionConfig(WIDTH, HEADS, **of) if decoder else None,
        hidden=HIDDEN,
        activation="relu",
        norm="layer",
        bias=True,
        dropout=RESIDUAL,
        feed_forward_dropout=INSIDE,
    )
    block = DecoderBlock(config) if decoder else EncoderBlock(config)
    layer = to_torch(block)
    assert type(layer) is kind
    found = {name: part.p for name, part in layer.named_modules() if isinstance(part, nn.Dropout)}
    wanted = {"dropout": INSIDE, "dropout1": RESIDUAL, "dropout2": RESIDUAL, "dropout3": RESIDUAL}
    assert found == (wanted if decoder else {name: p for name, p in wanted.items() if name != "dropout3"})
    attentions = [part.dropout for part in layer.modules() if isinstance(part, nn.MultiheadAttention)]
    assert attentions == [WEIGHTS] * (2 if decoder else 1)


@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")]
)
def test_dtype_and_device_are_taken_over(dtype, device):
    layer = build(nn.TransformerEncoderLayer, **LAYER)
    theirs = build(nn.TransformerEncoder, layer, 2, enable_nested_tensor=False).to(device=device, dtype=dtype)
    for converted in (from_torch(theirs), to_torch(from_torch(theirs))):
        assert {(p.dtype, p.device.type) for p in converted.parameters()} == {(dtype, device)}


def modes(module, kinds):
    return {name: part.training for name, part in module.named_modules() if isinstance(part, kinds)}


ENCODER_PARTS = ("attention", "dropout", "feed_forward.dropout")
KINDS_WITH_MODES = (nn.MultiheadAttention, nn.Dropout, nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)


def transformer(**options):
    given = {"dropout": 0.1, "batch_first": True, **options}
    return build(nn.Transformer, WIDTH, HEADS, 2, 3, HIDDEN, **given)


def of_encoder(module):
    module.encoder.eval()


def of_one_layer(module):
    module.decoder.layers[1].eval()


def of_one_attention(module):
    module.decoder.layers[2].multihead_attn.eval()


def of_feed_forward(module):
    module.encoder.layers[0].dropout.eval()


def of_residual(module):
    layer = module.encoder.layers[1]
    layer.dropout1.eval()
    layer.dropout2.eval()


def of_all_but_one(module):
    module.eval().decoder.layers[0].self_attn.train()


def within(start, *names):
    return {f"{start}.{name}" for name in names}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda module: None, set()),
        (
            of_encoder,
            {"encoder"}.union(*(within(f"encoder.blocks.{n}", *ENCODER_PARTS) for n in range(2))),
        ),
        (of_one_layer, within("decoder.blocks.1", "cross", *ENCODER_PARTS)),
        (of_one_attention, {"decoder.blocks.2.cross"}),
        (of_feed_forward, {"encoder.blocks.0.feed_forward.dropout"}),
        (of_residual, {"encoder.blocks.1.dropout"}),
    ],
    ids=["nothing", "encoder", "layer", "attention", "feed_forward", "residual"],
)
def test_training_mode_is_taken_over_part_by_part(change, expected):
    theirs = transformer()
    change(theirs)
    ours = from_torch(theirs)
    found = modes(ours, (MultiHeadAttention, nn.Dropout, Encoder, Decoder, Transformer))
    assert {name for name, training in found.items() if not training} == expected
    back = to_torch(ours)
    assert modes(back, KINDS_WITH_MODES) == modes(theirs, KINDS_WITH_MODES)


def test_a_part_in_training_inside_a_module_in_evaluation():
    theirs = transformer()
    of_all_but_one(theirs)
    found = modes(from_torch(theirs), nn.Module)
    assert [name for name, training in found.items() if training and name.endswith("attention")] == [
        "decoder.blocks.0.attention"
    ]
    assert not found[""] and not found["decoder"]


ATTENTION_WEIGHTS = ("projection.weight", "projection.bias", "output.weight", "output.bias")


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        (["self_attn"], {f"attention.{name}" for name in ATTENTION_WEIGHTS}),
        (["self_attn.in_proj_bias", "norm2.weight"], {"attention.projection.bias", "feed_forward_norm.weight"}),
        (
            ["self_attn.out_proj.weight", "linear1"],
            {"attention.output.weight", "feed_forward.up.weight", "feed_forward.up.bias"},
        ),
    ],
    ids=lambda names: ", ".join(sorted(names)),
)
def test_what_is_frozen_stays_so_and_nothing_else(frozen, expected):
    theirs = build(nn.TransformerEncoder, nn.TransformerEncoderLayer(**LAYER), 2)
    for name, parameter in theirs.layers[1].named_parameters():
        parameter.requires_grad_(not any(name.startswith(start) for start in frozen))
    ours = from_torch(theirs)
    assert {name for name, p in ours.named_parameters() if not p.requires_grad} == {
        f"blocks.1.{name}" for name in expected
    }
    back = {name: p.requires_grad for name, p in to_torch(ours).named_parameters()}
    assert back == {name: p.requires_grad for name, p in theirs.named_parameters()}


def test_a_fused_weight_is_trained_where_one_of_its_parts_is():
    ours = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, bias=True, fused=False))
    ours.key.requires_grad_(False)
    ours.query.bias.requires_grad_(False)
    ours.value.bias.requires_grad_(False)
    theirs = to_torch(ours)
    assert {name for name, p in theirs.named_parameters() if not p.requires_grad} == {"in_proj_bias"}


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
    yield "encoder layer", lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.1, "gelu", 0.03, batch_first=True)
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


@pytest.mark.parametrize("place", ["attn_mask", "key_padding_mask"])
def test_a_learned_float_mask_stays_a_bias_also_while_it_is_zero(place):
    theirs = build(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True)
    ours, x = from_torch(theirs), tokens(LT)
    learned = torch.zeros((LT, LT) if place == "attn_mask" else (B, LT), dtype=torch.float64, requires_grad=True)
    mask, bias = masks_from_torch(**{place: learned})
    assert mask is None
    same(theirs, ours, ours(x, bias=bias), theirs(x, x, x, **{place: learned})[0], [x, learned])
    assert masks_from_torch(**{place: learned.detach()}).bias is None


@looped(
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
