"""Multi-head attention, part by part, against PyTorch's and against its formula written out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from looped import looped
from saccade import Causal, Chunks, Columns, Dilated, Documents, Global, Padding, Prefix, Strided, Window
from saccade.nn import (
    AttentionConfig,
    ContextLayer,
    GrowingLayer,
    KVCache,
    MultiHeadAttention,
    SelfAttention,
    to_torch,
)
from saccade.positions import AlibiConfig, Rotary, RotaryConfig, T5Config
from saccade.variants import LinearConfig

B, L, LC, WIDTH, HEADS = 2, 7, 11, 15, 3


def make(width=WIDTH, heads=HEADS, **options) -> MultiHeadAttention:
    module = MultiHeadAttention(AttentionConfig(width, heads, **options)).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def tokens(length=L, width=WIDTH, batch=B) -> torch.Tensor:
    return torch.randn(batch, length, width, dtype=torch.float64, requires_grad=True)


def by_formula(module: MultiHeadAttention, x, context, values, allowed=None, rotary=None):
    """Every head by itself, in a loop: what the docstring says."""
    config = module.config
    (wq, bq), (wk, bk), (wv, bv) = module.matrices()
    d, dv = config.shape.head, config.shape.value_head
    query, key, value = F.linear(x, wq, bq), F.linear(context, wk, bk), F.linear(values, wv, bv)
    outs = []
    for head in range(config.heads):
        group = head // (config.heads // config.shape.kv_heads)
        q = module.query_norm(query[..., head * d : (head + 1) * d])
        k = module.key_norm(key[..., group * d : (group + 1) * d])
        v = value[..., group * dv : (group + 1) * dv]
        if rotary is not None:
            q, k = rotary(q[:, None])[:, 0], rotary(k[:, None])[:, 0]
        logits = q @ k.transpose(-1, -2) * (d**-0.5 if config.scale is None else config.scale)
        if config.softcap is not None:
            logits = config.softcap * torch.tanh(logits / config.softcap)
        if allowed is not None:
            logits = logits.masked_fill(~allowed, float("-inf"))
        if module.sink is not None:
            column = module.sink[head].expand(*logits.shape[:-1], 1)
            weights = torch.cat((logits, column), -1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        outs.append(weights @ v)
    out = torch.cat(outs, -1)
    if module.gate is not None:
        out = out * torch.sigmoid(x @ module.gate.weight.T)
    return F.linear(out, module.output.weight, module.output.bias)


def equal_with_gradients(out, expected, inputs):
    """Equal outputs, and equal gradients of every input under one random cotangent."""
    torch.testing.assert_close(out, expected)
    cotangent = torch.randn_like(out)
    ours = torch.autograd.grad(out, inputs, cotangent, retain_graph=True)
    theirs = torch.autograd.grad(expected, inputs, cotangent)
    torch.testing.assert_close(ours, theirs)


@looped(
    "options",
    [
        {},
        {"bias": True},
        {"fused": False, "bias": True, "output_bias": False},
        {"head_width": 7, "value_head_width": 4},
        {"qk_norm": "rms"},
        {"qk_norm": "layer", "scale": 0.7},
        {"qk_norm": "rms", "eps": 0.3, "fused": False},
        {"gate": True},
        {"sink": True, "softcap": 1.3},
        {"window": Window(2, 1)},
    ],
)
def test_self_attention_is_its_formula(options):
    module, x = make(**options), tokens()
    window = module.config.window
    allowed = None if window is None else window.dense(L, L)[0]
    equal_with_gradients(module(x), by_formula(module, x, x, x, allowed), [x, *module.parameters()])


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_query_head_reads_its_group(kv_heads):
    module, x = make(30, 6, kv_heads=kv_heads), tokens(width=30)
    allowed = Causal().dense(L, L)[0]
    equal_with_gradients(module(x, Causal()), by_formula(module, x, x, x, allowed), [x, *module.parameters()])


def test_rotary_positions_turn_normed_queries_and_keys():
    module, x = make(20, 5, kv_heads=1, qk_norm="rms", positions=RotaryConfig()), tokens(width=20)
    expected = by_formula(module, x, x, x, rotary=Rotary(4))
    equal_with_gradients(module(x), expected, [x, *module.parameters()])
    assert not torch.allclose(module(x, offset=3), module(x, offset=torch.arange(L).flip(0).expand(B, L)))
    torch.testing.assert_close(module(x, offset=3), expected)


@looped(
    "options",
    [
        {},
        {"context_width": 13},
        {"qk_norm": "rms"},
        {"qk_norm": "layer", "fused": False},
        {"context_width": 13, "values_width": 17, "head_width": 4, "value_head_width": 6, "kv_heads": 1, "bias": True},
    ],
)
def test_cross_attention_is_its_formula(options):
    module, x = make(**options), tokens()
    context = tokens(LC, module.shape.context)
    values = tokens(LC, module.shape.values) if "values_width" in options else None
    mask = Padding([5, 11])
    expected = by_formula(module, x, context, context if values is None else values, mask.dense(L, LC)[:, 0])
    inputs = [x, context, *([] if values is None else [values]), *module.parameters()]
    equal_with_gradients(module(x, mask, context=context, values=values), expected, inputs)


def test_a_context_is_projected_once_with_a_cache():
    module, x, context = make(), tokens(), tokens(LC)
    expected, cache = module(x, context=context), ContextLayer()
    first = module(x[:, :3], context=context, cache=cache)
    rest = module(x[:, 3:], context=torch.full_like(context, torch.nan), cache=cache)  # not read any more
    torch.testing.assert_close(torch.cat((first, rest), 1), expected)


def test_without_positions_and_mask_it_is_permutation_equivariant():
    module, x, order = make(), tokens(), torch.randperm(L)
    torch.testing.assert_close(module(x[:, order]), module(x)[:, order])


@pytest.mark.parametrize("scheme", [AlibiConfig(), T5Config(buckets=8, max_distance=5)], ids=repr)
def test_biases_by_distance_reach_the_logits(scheme):
    module, x = make(positions=scheme), tokens()
    bias = module.positions()
    plain = make()
    plain.load_state_dict({name: t for name, t in module.state_dict().items() if not name.startswith("positions")})
    torch.testing.assert_close(module(x), plain(x, bias=bias))
    assert not torch.allclose(module(x), plain(x))


@looped("side", ["left", "right"])
@looped("scheme", [None, RotaryConfig(), AlibiConfig()])
def test_padding_changes_nothing_at_real_tokens(side, scheme):
    module, x = make(20, 5, positions=scheme), tokens(width=20)
    real = torch.zeros(B, L, dtype=torch.bool)
    for item, length in enumerate((3, 5)):
        real[item, :length] = True
    real = real.flip(1) if side == "left" else real
    spoilt = torch.where(real[..., None], x, torch.nan)
    out = module(spoilt, Causal(), padding=Padding(real))
    for item in range(B):
        alone = module(x[item : item + 1, real[item]], Causal())
        torch.testing.assert_close(out[item : item + 1, real[item]], alone)
    (grad,) = torch.autograd.grad(out[real].sum(), x)
    assert grad.isfinite().all()
    assert (grad[~real] == 0).all()


def test_one_item_alone_may_be_padded_on_the_left():
    """A batch of one has one offset, below 0 here: positions of padding are no positions."""
    module, x = make(20, 5, positions=RotaryConfig()), tokens(width=20, batch=1)
    padded = torch.cat((torch.full((1, 3, 20), torch.nan, dtype=torch.float64), x), 1)
    out = module(padded, Causal(), padding=Padding([[False] * 3 + [True] * L]))
    torch.testing.assert_close(out[:, 3:], module(x, Causal()))


def test_cached_self_attention_is_the_parallel_one():
    module, x, cache = make(20, 5, kv_heads=1, positions=RotaryConfig()), tokens(width=20), GrowingLayer()
    parts = [module(part, Causal(), cache=cache) for part in x.split([3, 1, 1, 2], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x, Causal()))


def test_observation_is_what_goes_into_attention_and_what_comes_out():
    module, x = make(20, 5, kv_heads=1, positions=RotaryConfig(), gate=True, sink=True), tokens(width=20)
    seen = []
    out = module(x, Causal(), observe=seen.append)
    (o,) = seen
    assert (o.query.shape, o.key.shape, o.value.shape) == ((B, 5, L, 4), (B, 1, L, 4), (B, 1, L, 4))
    assert o.mask == Causal()
    assert o.sink is module.sink
    assert not o.cross
    again = o.out.transpose(1, 2).flatten(2) * module.gate(x).sigmoid()
    torch.testing.assert_close(module.output(again), out)


def test_dropout_acts_in_training_only():
    module, x = make(dropout=0.5), tokens()
    trained = module(x)
    module.eval()
    assert torch.equal(module(x), module(x))
    assert not torch.allclose(trained, module(x))


@pytest.mark.parametrize("options", [{}, {"kv_heads": 4}, {"fused": False}, {"qk_norm": "rms"}], ids=str)
def test_logits_start_with_a_variance_near_1(options):
    torch.manual_seed(0)
    module = MultiHeadAttention(AttentionConfig(512, 8, **options))
    seen = []
    module(torch.randn(4, 128, 512), observe=seen.append)
    logits = seen[0].query @ seen[0].key.repeat_interleave(8 // module.shape.kv_heads, 1).transpose(-1, -2) / 8
    # A head's variance is trace(Cq Ck) / D, with the covariances of its queries and keys: both the draw of the weights
    # (512 x 64 of them) and that of the 512 tokens move it by about 2 / sqrt(512 * 64).
    assert (logits.var((0, 2, 3)) - 1).abs().max() < 5 * 2 * (2 / (512 * 64)) ** 0.5
    assert abs(seen[0].value.var() - 1) < 0.05


def test_configurations_are_values():
    config = AttentionConfig(16, 4)
    assert config == AttentionConfig(16, 4, kv_heads=4, head_width=4, context_width=16, output_bias=False)
    assert hash(config) == hash(AttentionConfig(16, 4))
    assert dataclasses.replace(config, heads=2).shape.head == 8
    assert dataclasses.replace(config, width=32) == AttentionConfig(32, 4)
    assert config != AttentionConfig(16, 4, kv_heads=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.heads = 5


ONE = MultiHeadAttention(AttentionConfig(16, 4))
TURNED = MultiHeadAttention(AttentionConfig(16, 4, positions=RotaryConfig()))
X = torch.zeros(2, 3, 16)


@looped(
    ("call", "message"),
    [
        (lambda: AttentionConfig(16, 3), "heads: must divide the width, got heads=3 and width=16"),
        (lambda: AttentionConfig(16, 0), "heads: must be at least 1, got 0"),
        (lambda: AttentionConfig(16, 4, kv_heads=3), "kv_heads: must divide the heads, got kv_heads=3 and heads=4"),
        (lambda: AttentionConfig(16, 4, head_width=0), "head_width: must be at least 1, got 0"),
        (lambda: AttentionConfig(16, 4, qk_norm="batch"), "qk_norm: expected one of None, 'layer', 'rms'; got 'batch'"),
        (lambda: AttentionConfig(16, 4, dropout=1.0), r"dropout: must be in \[0, 1\), got 1.0"),
        (lambda: AttentionConfig(16, 4, softcap=0.0), "softcap: must be positive, got 0.0"),
        (lambda: AttentionConfig(16, 4, context_width=5, fused=True), "fused: .* width=16, context_width=5"),
        (lambda: ONE(torch.zeros(2, 16)), r"x: expected shape \(batch, length, 16\), got \(2, 16\)"),
        (lambda: ONE(torch.zeros(2, 3, 15)), r"x: expected shape .* got \(2, 3, 15\)"),
        (
            lambda: ONE(X, context=torch.zeros(2, 5, 15)),
            r"context: expected shape \(batch, length, 16\), got \(2, 5, 15\)",
        ),
        (lambda: ONE(X, context=torch.zeros(3, 5, 16)), "context: has batch 3, expected x's 2"),
        (lambda: ONE(X, values=X), "values: given without a context"),
        (lambda: TURNED(X, context=X), "positions: describes one sequence, and cross-attention has two; leave it out"),
        (
            lambda: make(context_width=13)(X[..., :15].double()),
            "context: needed, since keys are made from tokens 13 wide",
        ),
        (
            lambda: make(values_width=13)(X[..., :15].double(), context=X[..., :15].double()),
            "values: needed, since values are made from tokens 13 wide",
        ),
    ],
)
def test_bad_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@looped(
    ("call", "message"),
    [
        (lambda: AttentionConfig(16, 4, positions="rotary"), "positions: expected RotaryConfig, .* got str"),
        (lambda: AttentionConfig(16, 4, window=7), "window: expected saccade.Window or None, got int"),
        (lambda: ONE(X, cache=ContextLayer()), "cache: expected a LayerCache for self-attention, got ContextLayer"),
        (lambda: ONE(X, context=X, cache=GrowingLayer()), "cache: expected a ContextLayer for a context, got Grow"),
        (
            lambda: ONE(X, cache=KVCache.growing(1)),
            r"cache: expected a .* got KVCache \(give cache\[layer\]\)",
        ),
    ],
)
def test_bad_types(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_the_teaching_layer_is_its_formula():
    layer = SelfAttention(WIDTH, 5, bias=True).double()
    x = tokens()
    out, weights = layer(x, Causal(), return_weights=True)
    q, k, v = layer.query(x), layer.key(x), layer.value(x)
    expected = (q @ k.transpose(-1, -2) / 5**0.5).masked_fill(~Causal().dense(L, L)[0, 0], float("-inf")).softmax(-1)
    torch.testing.assert_close(weights, expected)
    equal_with_gradients(out, expected @ v, [x, *layer.parameters()])
    torch.testing.assert_close(layer(x, Causal()), out)
    with pytest.raises(ValueError, match=r"x: expected shape \(batch, length, 15\), got \(2, 7, 14\)"):
        layer(x[..., :14])


def test_the_configured_window_joins_every_mask():
    module, x = make(window=Window(2, 0)), tokens()
    for mask in (Causal(), Window(None, 1), Causal().at(0)):
        allowed = (mask.dense(L, L) & Window(2, 0).dense(L, L))[0]
        torch.testing.assert_close(module(x, mask), by_formula(module, x, x, x, allowed))


def test_observations_tell_every_number_of_the_call():
    module, seen = make(sink=True, softcap=1.3, scale=0.7, window=Window(2, 0)), []
    module(tokens(), Causal(), bias=torch.ones(L, L, dtype=torch.float64), observe=seen.append)
    (o,) = seen
    assert (o.scale, o.softcap) == (0.7, 1.3)
    assert o.sink is module.sink
    assert o.mask == Causal() & Window(2, 0)
    assert o.bias.shape == (L, L)


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_and_replaced_projections_are_heard(fused):
    module, calls = make(fused=fused), []
    names = ["projection", "output"] if fused else ["query", "key", "value", "output"]
    for name in names:
        module.get_submodule(name).register_forward_hook(lambda m, i, o, name=name: calls.append(name))
    module(tokens())
    assert calls == names
    if not fused:
        module(tokens(), context=tokens(LC))
        assert calls == names * 2


@looped("scheme", [None, RotaryConfig()])
@looped("mask", [Prefix(2), Causal() | Global([0]), Strided(2), Dilated(2), Chunks(3, 1) | Causal() & Columns(3)])
def test_masks_that_name_positions_mean_tokens_beside_padding_on_the_left(mask, scheme):
    module, x = make(20, 5, positions=scheme), tokens(width=20)
    real = torch.arange(L) >= torch.tensor([4, 0])[:, None]
    out = module(x, mask, padding=Padding(real))
    for item in range(B):
        alone = module(x[item : item + 1, real[item]], mask)
        torch.testing.assert_close(out[item : item + 1, real[item]], alone)


def test_data_about_rows_beside_padding_on_the_left_is_refused():
    module, x = make(), tokens()
    left, right = ([[False] * 3 + [True] * 4, [True] * 7], [[True] * 4 + [False] * 3, [True] * 7])
    dense = torch.ones(L, L, dtype=torch.bool).tril()
    for mask in (dense, Padding(left), Documents([0] * L)):
        with pytest.raises(ValueError, match="mask: with padding on the left, .* may count rows or tokens"):
            module(x, mask, padding=Padding(left))
        assert module(x, Padding(right) if isinstance(mask, Padding) else mask, padding=Padding(right)).isfinite().all()
    with pytest.raises(ValueError, match="bias: with padding on the left"):
        module(x, bias=torch.zeros(L, L, dtype=torch.float64), padding=Padding(left))


def test_padding_of_a_context_reaches_no_weight():
    module, x, context = make(), tokens(), tokens(LC)
    real = torch.arange(LC) < torch.tensor([5, 11])[:, None]
    spoilt = torch.where(real[..., None], context, torch.nan)
    expected = module(x, Padding([5, 11]), context=context)
    equal_with_gradients(module(x, Padding([5, 11]), context=spoilt), expected, [x, context, *module.parameters()])


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_logits_start_near_1_whatever_the_scale(scale):
    torch.manual_seed(0)
    module, seen = MultiHeadAttention(AttentionConfig(512, 8, scale=scale)), []
    module(torch.randn(4, 128, 512), observe=seen.append)
    logits = seen[0].query @ seen[0].key.transpose(-1, -2) * scale
    assert (logits.var((0, 2, 3)) - 1).abs().max() < 5 * 2 * (2 / (512 * 64)) ** 0.5


def test_reset_parameters_draws_what_was_drawn_at_first():
    config = AttentionConfig(64, 4, sink=True, qk_norm="rms", positions=T5Config(), scale=1.0)
    with torch.device("meta"):
        module = MultiHeadAttention(config)
    module.to_empty(device="cpu").reset_parameters()
    torch.manual_seed(7)
    fresh = MultiHeadAttention(config)
    for name, parameter in module.named_parameters():
        assert parameter.isfinite().all(), name
        assert parameter.std().item() == pytest.approx(fresh.get_parameter(name).std().item(), rel=0.2, abs=1e-9), name


@looped(
    ("call", "message"),
    [
        (lambda: AttentionConfig(16.0, 4), "width: must be an int, got 16.0"),
        (lambda: AttentionConfig(16, True), "heads: must be an int, got True"),
        (lambda: AttentionConfig(16, 4, kv_heads=2.0), "kv_heads: must be an int, got 2.0"),
        (lambda: AttentionConfig(16, 4, bias="no"), "bias: must be True or False, got 'no'"),
        (lambda: AttentionConfig(16, 4, scale="a"), "scale: must be a number, got 'a'"),
        (lambda: AttentionConfig(16, 4, dropout="a"), "dropout: must be a number, got 'a'"),
        (lambda: MultiHeadAttention(16), "config: expected AttentionConfig, got int"),
        (lambda: ONE(None), r"x: expected a tensor \(batch, length, 16\), got NoneType"),
        (lambda: ONE(X.long()), "x: is torch.int64, expected the module's torch.float32"),
        (lambda: ONE(X, context=X.double()), "context: is torch.float64, expected the module's torch.float32"),
    ],
)
def test_values_of_another_kind(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: AttentionConfig(15, 3, positions=RotaryConfig()),
            "positions: rotary .* the head width must be even, got 5",
        ),
        (lambda: AttentionConfig(16, 4, scale=float("nan")), "scale: must be finite, got nan"),
        (lambda: AttentionConfig(16, 4, eps=-1.0), "eps: must be positive, got -1.0"),
    ],
)
def test_more_bad_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_cached_context_of_another_module_or_length_is_refused():
    module, x, cache = make(), tokens(), ContextLayer()
    module(x, context=tokens(LC), cache=cache)
    for other, context in ((module, tokens(LC - 1)), (make(heads=5), tokens(LC))):
        with pytest.raises(ValueError, match=r"cache: it holds a context of .* one module and one context"):
            other(x, context=context, cache=cache)


@pytest.mark.parametrize("options", [{}, {"gate": True, "bias": True}, {"fused": False, "kv_heads": 1}], ids=str)
def test_an_output_of_another_width(options):
    module, x = make(out_width=13, **options), tokens()
    out = module(x, Causal())
    allowed = torch.ones(L, L, dtype=torch.bool).tril()
    assert out.shape == (B, L, 13) and module.output.out_features == 13 and "out_width=13" in repr(module)
    equal_with_gradients(out, by_formula(module, x, x, x, allowed), [x, *module.parameters()])


def test_an_output_width_that_is_said_is_the_default_that_is_not():
    assert AttentionConfig(WIDTH, HEADS, out_width=WIDTH) == AttentionConfig(WIDTH, HEADS)
    assert AttentionConfig(WIDTH, HEADS, out_width=13) != AttentionConfig(WIDTH, HEADS)
    with pytest.raises(ValueError, match="out_width: must be at least 1, got 0"):
        AttentionConfig(WIDTH, HEADS, out_width=0)
    with pytest.raises(ValueError, match="out_width: 13 here, and PyTorch's module has 15 only"):
        to_torch(make(out_width=13))


@pytest.mark.parametrize("training", [False, True])
def test_weights_beside_the_output_are_pytorchs(training):
    module = make(dropout=0.5, context_width=10).train(training)
    theirs = to_torch(module).eval()
    x, context = tokens(), tokens(LC, 10)
    expected = theirs(x, context, context, average_attn_weights=False)[1]
    torch.manual_seed(5)
    out, weights = module(x, context=context, return_weights=True)
    torch.manual_seed(5)
    assert out.equal(module(x, context=context))  # what is dropped, if anything, is not changed by it
    assert weights.shape == (B, HEADS, L, LC)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(
        torch.autograd.grad(weights.square().sum(), [x, context]),
        torch.autograd.grad(expected.square().sum(), [x, context]),
    )


def test_weights_beside_the_output_know_everything_of_the_call():
    module = make(kv_heads=1, sink=True, softcap=1.3, scale=0.7, window=Window(3, 0), positions=RotaryConfig(turned=4))
    x, calls, cache = tokens(), [], GrowingLayer()
    module(x[:, :4], Causal(), cache=cache)
    _, weights = module(x[:, 4:], Causal(), cache=cache, observe=calls.append, return_weights=True)
    value = calls[0].value.expand(B, HEADS, L, -1)
    torch.testing.assert_close(weights @ value, calls[0].out)
    assert weights.shape == (B, HEADS, L - 4, L) and weights.sum(-1).max() < 1  # less the sink's share


def test_there_are_no_weights_of_a_mechanism_or_of_a_nested_batch():
    with pytest.raises(ValueError, match="return_weights: not with the mechanism 'linear'"):
        make(mechanism=LinearConfig())(tokens(), return_weights=True)
    nested = torch.nested.nested_tensor([tokens()[0], tokens(3)[0]], layout=torch.jagged)
    with pytest.raises(ValueError, match="return_weights: not with a nested batch"):
        make()(nested, return_weights=True)
