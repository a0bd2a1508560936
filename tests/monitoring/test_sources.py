"""What a watch sees of each kind of attention: the numbers of dense float64 weights, and outputs left as they are."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

import saccade
from attention_numbers import check, dense
from saccade.nn import AttentionConfig, BlockConfig, Decoder, MultiHeadAttention
from saccade.positions import RotaryConfig

B, L, H, D = 3, 11, 2, 5
E = H * D


def heads_of(x, heads=H):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def projected(layer, x, heads=H):
    """q, k, v (B, H, L, D) as nn.MultiheadAttention projects them."""
    parts = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    return tuple(heads_of(part, heads) for part in parts)


def causal(length=L):
    return torch.ones(length, length, dtype=torch.bool).tril()


class Calls(nn.Module):
    """A module whose forward is a function of q, k, v (B, H, L, D)."""

    def __init__(self, function, kv_heads=H):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(E, heads * D) for heads in (H, kv_heads, kv_heads))
        self.function, self.kv_heads, self.num_heads = function, kv_heads, H

    def parts(self, x):
        return heads_of(self.query(x)), heads_of(self.key(x), self.kv_heads), heads_of(self.value(x), self.kv_heads)

    def forward(self, x):
        return self.function(*self.parts(x)).transpose(1, 2).flatten(2)


def watched(model, *inputs, **options):
    """A watch on one forward; the output is the unwatched one's, to the bit."""
    plain = model(*inputs)
    with saccade.watch(model, **options) as seen:
        again = model(*inputs)
    assert torch.equal(plain, again)
    assert not seen.unobserved
    return seen


SDPA = {
    "plain": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), None, None),
    "by name": (lambda q, k, v: imported_by_name(q, k, v, is_causal=True), causal(), None),
    "scale": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.7), None, 0.7),
    "boolean": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, causal().flip(0, 1)),
        causal().flip(0, 1),
        None,
    ),
    "fewer queries": (lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :4], k, v), "fewer", None),
}


@pytest.mark.parametrize("name", SDPA)
def test_scaled_dot_product_attention(name):
    function, seen_keys, scale = SDPA[name]
    model, x = Calls(function), torch.randn(B, L, E)
    seen = watched(model, x)
    query, key, _ = model.parts(x)
    if seen_keys == "fewer":
        query, seen_keys = query[:, :, :4], None
    assert [(call.name, call.source) for call in seen.calls] == [("", "F.scaled_dot_product_attention")]
    check(seen, "", dense(query, key, seen_keys, scale=scale))


def test_an_additive_mask_and_grouped_heads():
    bias = torch.randn(1, 4, L, L)
    heads = 4

    def function(q, k, v):
        return F.scaled_dot_product_attention(q.repeat_interleave(2, 1), k, v, bias, enable_gqa=True)

    model, x = Calls(function), torch.randn(B, L, E)
    seen = watched(model, x)
    query, key, _ = model.parts(x)
    check(seen, "", dense(query.repeat_interleave(2, 1), key, bias=bias))
    assert list(seen.aggregates[""]) == list(range(heads))


def test_three_axes_are_heads_of_one_item():
    model = Calls(lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0])[None])
    x = torch.randn(1, L, E)
    query, key, _ = model.parts(x)
    check(watched(model, x), "", dense(query, key))


def test_padded_rows_of_self_attention_do_not_count():
    real = torch.tensor([7, 11, 2])[:, None] > torch.arange(L)
    model, x = Calls(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, real[:, None, None])), torch.randn(B, L, E)
    query, key, _ = model.parts(x)
    check(watched(model, x), "", dense(query, key, real[:, None, None]), counted=real[:, None])


@pytest.mark.parametrize("number", [-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
def test_padded_rows_whatever_number_hides_the_keys(number):
    real = torch.tensor([7, 11, 2])[:, None] > torch.arange(L)
    hidden = torch.zeros(B, 1, 1, L).masked_fill(~real[:, None, None], number)
    functions = (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, hidden),
        by_hand(lambda s: s / math.sqrt(D) + hidden),
        by_hand(lambda s: (s / math.sqrt(D)).masked_fill(~real[:, None, None], number)),
    )
    x = torch.randn(B, L, E)
    for function in functions:
        model = Calls(function)
        query, key, _ = model.parts(x)
        check(watched(model, x), "", dense(query, key, real[:, None, None]), counted=real[:, None])


MULTI = [
    {},
    {"key_padding_mask": torch.tensor([7, 11, 2])[:, None] <= torch.arange(L)},
    {"attn_mask": ~causal()},
    {"attn_mask": ~causal(), "is_causal": True},
    {"attn_mask": torch.randn(L, L)},
    {"attn_mask": torch.randn(B * H, L, L), "key_padding_mask": torch.tensor([7, 11, 2])[:, None] <= torch.arange(L)},
]


class Multi(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attn = nn.MultiheadAttention(E, H, batch_first=options.pop("batch_first"))
        self.options = options

    def forward(self, x):
        return self.attn(x, x, x, **self.options)[0]


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("case", range(len(MULTI)))
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(case, need_weights, batch_first):
    options = MULTI[case]
    model = Multi(**options, need_weights=need_weights, batch_first=batch_first)
    x = torch.randn(B, L, E)
    seen = watched(model, x if batch_first else x.transpose(0, 1))
    query, key, _ = projected(model.attn, x)
    hidden = options.get("key_padding_mask", torch.zeros(B, L, dtype=torch.bool))
    see = ~hidden[:, None, None].expand(B, 1, L, L)
    given = options.get("attn_mask", torch.zeros(L, L))
    bias = None
    if given.dtype == torch.bool:
        see = see & ~given
    else:
        bias = given if given.dim() == 2 else given.view(B, H, L, L)
    check(seen, "attn", dense(query, key, see, bias=bias), counted=~hidden[:, None])


def test_multihead_attention_over_another_sequence_counts_all_rows():
    layer = nn.MultiheadAttention(E, H, batch_first=True)
    x, context = torch.randn(B, L, E), torch.randn(B, L, E)
    hidden = torch.tensor([7, 11, 2])[:, None] <= torch.arange(L)
    with saccade.watch(layer) as seen:
        layer(x, context, context, key_padding_mask=hidden)
    (query, _, _), (_, key, _) = projected(layer, x), projected(layer, context)
    check(seen, "", dense(query, key, ~hidden[:, None, None]))


def test_an_encoder_in_eval_whose_fast_path_nobody_else_can_see():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 17, batch_first=True), 2, enable_nested_tensor=False)
    model.eval()
    x, real = torch.randn(B, L, E), torch.tensor([7, 11, 2])[:, None] > torch.arange(L)
    with torch.inference_mode():
        plain = model(x, src_key_padding_mask=~real)
        with saccade.watch(model) as seen:
            again = model(x, src_key_padding_mask=~real)
            assert torch.backends.mha.get_fastpath_enabled()  # nothing process-wide is switched
    # Fast path and slow path add in another order.
    assert (plain - again)[real].abs().max() < 1e-5
    assert [(call.name, call.layer) for call in seen.calls] == [("layers.0.self_attn", 0), ("layers.1.self_attn", 1)]
    query, key, _ = projected(model.layers[0].self_attn, x)
    check(seen, "layers.0.self_attn", dense(query, key, real[:, None, None]), counted=real[:, None])


def test_saccades_modules_with_rotary_positions_and_grouped_heads():
    attention = AttentionConfig(24, 4, kv_heads=2, positions=RotaryConfig())
    model, x = Decoder(BlockConfig(attention), 2), torch.randn(B, L, 24)
    calls = []
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    with saccade.watch(model, keep=True) as seen:
        model(x)
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "observe": calls.append}), with_kwargs=True
        )
    model(x)
    assert len(seen.calls) == len(calls) == 2
    for call, truth in zip(seen.calls, calls, strict=True):
        assert call.source == "saccade.attention"
        weights = dense(truth.query, truth.key, causal())
        check(seen, call.name, weights)
        torch.testing.assert_close(seen.weights(call.name).double(), weights, atol=1e-6, rtol=1e-5)


def test_decoding_with_a_cache_counts_every_token_once():
    model = Decoder(BlockConfig(AttentionConfig(12, 3)), 2).eval()
    x = torch.randn(B, L, 12)
    with torch.no_grad(), saccade.watch(model) as whole:
        model(x)
    with torch.no_grad(), saccade.watch(model) as parts:
        cache = model.cache()
        for start, stop in ((0, 6), (6, 7), (7, L)):
            model(x[:, start:stop], cache=cache)
    assert parts.steps == 3
    for name, heads in whole.aggregates.items():
        for head, statistics in heads.items():
            for one in ("entropy", "distance", "mass.first", "largest"):
                a, b = statistics[one], parts.aggregates[name][head][one]
                assert a.count == b.count == B * L
                assert a.mean == pytest.approx(b.mean, abs=1e-5)
                assert a.spread == pytest.approx(b.spread, abs=1e-4)
                assert (a.min, a.max) == pytest.approx((b.min, b.max), abs=1e-5)


def by_hand(change, product=torch.matmul):
    def function(q, k, v):
        weights = change(product(q, k.transpose(-2, -1))).softmax(-1)
        return product(weights, v)

    return function


MASK, BIAS = causal(), torch.randn(H, L, L)
HAND = {
    "nothing": (by_hand(lambda s: s), {"scale": 1.0}),
    "scaled": (by_hand(lambda s: s * 0.3), {"scale": 0.3}),
    "divided": (by_hand(lambda s: s / math.sqrt(D)), {}),
    "from the left": (by_hand(lambda s: 0.3 * s), {"scale": 0.3}),
    "filled": (by_hand(lambda s: (s / math.sqrt(D)).masked_fill(~MASK, -math.inf)), {"seen": MASK}),
    "filled with a number": (by_hand(lambda s: (s / math.sqrt(D)).masked_fill(~MASK, -1e9)), {"seen": MASK}),
    "chosen": (by_hand(lambda s: torch.where(MASK, s * 0.3, -math.inf)), {"seen": MASK, "scale": 0.3}),
    "chosen the other way": (by_hand(lambda s: torch.where(~MASK, -math.inf, s)), {"seen": MASK, "scale": 1.0}),
    "added": (by_hand(lambda s: s * 0.3 + BIAS), {"scale": 0.3, "bias": BIAS}),
    "added, then scaled": (by_hand(lambda s: (s + BIAS) * 0.3), {"scale": 0.3, "bias": BIAS * 0.3}),
    "taken off": (by_hand(lambda s: s - BIAS), {"scale": 1.0, "bias": -BIAS}),
    "two biases": (by_hand(lambda s: BIAS + s + BIAS[0]), {"scale": 1.0, "bias": BIAS + BIAS[0]}),
    "reshaped": (by_hand(lambda s: (s.view(B * H, L, L) * 0.3).view(B, H, L, L)), {"scale": 0.3}),
    "in place": (by_hand(lambda s: s.mul_(0.3).masked_fill_(~MASK, -math.inf)), {"seen": MASK, "scale": 0.3}),
}


@pytest.mark.parametrize("name", HAND)
def test_attention_written_by_hand(name):
    function, meaning = HAND[name]
    model, x = Calls(function), torch.randn(B, L, E)
    seen = watched(model, x, keep=True)
    query, key, _ = model.parts(x)
    assert [call.source for call in seen.calls] == ["attention by hand"]
    weights = dense(query, key, **meaning)
    check(seen, "", weights)
    torch.testing.assert_close(seen.weights("").double(), weights, atol=2e-6, rtol=1e-4)


def test_what_is_said_of_scores_by_hand_needs_no_dense_bias():
    model, x = Calls(HAND["filled"][0]), torch.randn(B, L, E)
    kept = watched(model, x, keep=True).kept[""]
    assert kept.bias is None
    assert kept.scale == pytest.approx(D**-0.5)
    assert torch.equal(kept.mask.dense(L, L)[0, 0], MASK)


def test_scores_changed_in_a_way_without_a_name():
    """A soft cap and a relative term that is itself a product: exact all the same."""
    far = torch.randn(D, L)

    def function(q, k, v):
        scores = 2.0 * torch.tanh(q @ k.mT / 2.0) + q @ far
        return F.dropout(torch.softmax(scores, -1), 0.0) @ v

    model, x = Calls(function), torch.randn(B, L, E)
    seen = watched(model, x, keep=True)
    query, key, _ = (part.detach().double() for part in model.parts(x))
    weights = (2.0 * torch.tanh(query @ key.mT / 2.0) + query @ far.double()).softmax(-1)
    check(seen, "", weights)
    torch.testing.assert_close(seen.weights("").double(), weights, atol=2e-6, rtol=1e-4)


EINSUM = {
    "added in the product": lambda q, k, v: torch.bmm(
        torch.zeros(1, L, L).baddbmm(batch1=q.flatten(0, 1), batch2=k.flatten(0, 1).mT, beta=0.5).softmax(-1),
        mat2=v.flatten(0, 1),
    ).unflatten(0, (B, H)),
    "bhqk": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v),
    "values first": lambda q, k, v: torch.einsum(
        "bhjd,bhij->bhid", v, torch.einsum("bhjd,bhid->bhij", k, q).softmax(-1)
    ),
    "an ellipsis": lambda q, k, v: torch.einsum(
        "...ij,...jd->...id", torch.einsum("...id,...jd->...ij", q, k).softmax(-1), v
    ),
    "heads inside": lambda q, k, v: torch.einsum(
        "bhij,bjhd->bihd",
        torch.einsum("bihd,bjhd->bhij", q.transpose(1, 2), k.transpose(1, 2)).softmax(-1),
        v.transpose(1, 2),
    ).transpose(1, 2),
    "batch and heads in one": lambda q, k, v: torch.bmm(
        F.softmax(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT), -1), v.flatten(0, 1)
    ).unflatten(0, (B, H)),
    "apart in between": lambda q, k, v: torch.bmm(
        F.softmax(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(B, H, L, L), -1).view(B * H, L, L),
        v.flatten(0, 1),
    ).view(B, H, L, D),
}


@pytest.mark.parametrize("name", EINSUM)
def test_products_in_other_words(name):
    model, x = Calls(EINSUM[name]), torch.randn(B, L, E)
    seen = watched(model, x)
    query, key, _ = model.parts(x)
    check(seen, "", dense(query, key, scale=1.0))


def test_what_baddbmm_adds_is_scaled():
    def function(q, k, v):
        scores = torch.baddbmm(BIAS.repeat(B, 1, 1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.5, alpha=0.3)
        return (scores.softmax(-1) @ v.flatten(0, 1)).unflatten(0, (B, H))

    model, x = Calls(function), torch.randn(B, L, E)
    query, key, _ = model.parts(x)
    check(watched(model, x), "", dense(query, key, scale=0.3, bias=0.5 * BIAS))


def test_looking_that_fails_is_counted_and_the_model_runs_on(monkeypatch):
    def broken(*args):
        raise RuntimeError("broken")

    for name in ("_by_hand.product_of", "_calls_mode.SdpaCall.meaning"):
        monkeypatch.setattr(f"saccade.monitoring.calls.{name}", broken)
    model = nn.Sequential(Calls(by_hand(lambda s: s)), Calls(F.scaled_dot_product_attention))
    x = torch.randn(B, L, E)
    expected = model(x)
    with saccade.watch(model) as seen:
        assert torch.equal(model(x), expected)
    assert not seen.calls
    assert {name.split(":")[0] for name in seen.unobserved} == {"0", "1"}
    assert seen.unobserved["1: F.scaled_dot_product_attention"].reason == "RuntimeError: broken"


@torch.no_grad()
def test_weights_that_are_gone_before_the_end_are_counted():
    class Unused(nn.Module):
        def forward(self, x):
            (x @ x.mT).softmax(-1)
            return x

    model = nn.Sequential(Unused(), nn.Linear(E, E))
    with saccade.watch(model) as seen:
        model(torch.randn(B, L, E))
    assert seen.unobserved["0: softmax"].count == 1
    assert "no product of the weights with values" in seen.unobserved["0: softmax"].reason


@torch.inference_mode()
def test_what_is_seen_in_inference_mode_can_be_used_outside():
    model, x = Calls(F.scaled_dot_product_attention), torch.randn(B, L, E)
    with saccade.watch(model, keep=True) as seen:
        model(x)
        with torch.inference_mode(False):
            again = model(x.clone())
    with torch.inference_mode(False):
        weights = seen.weights("")
        (weights * torch.ones_like(weights, requires_grad=True)).sum().backward()
    assert again.shape == (B, L, E)


@pytest.mark.parametrize("call", [F.scaled_dot_product_attention, by_hand(lambda s: s * D**-0.5), saccade.attention])
def test_under_autocast(call):
    model, x = Calls(call), torch.randn(B, L, E)
    with torch.autocast("cpu", torch.bfloat16):
        seen = watched(model, x)
        query, key, _ = model.parts(x)
    # The logits of attention by hand are rounded to bfloat16, to 8 bits.
    check(seen, "", dense(query, key), tolerance=2e-2)


def test_queries_that_share_a_key_head_by_hand():
    def one_key_head(q, k, v):
        return (q @ k.mT).softmax(-1) @ v

    def groups(q, k, v):
        q = q.repeat_interleave(3, 1).unflatten(1, (2, 3))
        return ((q @ k[:, :, None].mT).softmax(-1) @ v[:, :, None]).flatten(1, 2)

    x = torch.randn(B, L, E)
    model = Calls(one_key_head, kv_heads=1)
    query, key, _ = model.parts(x)
    check(watched(model, x), "", dense(query, key, scale=1.0))
    model = Calls(groups)
    query, key, _ = model.parts(x)
    check(watched(model, x), "", dense(query.repeat_interleave(3, 1), key, scale=1.0))


def test_a_softmax_that_nobody_can_explain_is_counted():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.cdist(x, x).softmax(-1) @ x

    class Unused(nn.Module):
        def forward(self, x):
            return (x @ x.mT).softmax(-1).amax(-1)

    model = nn.Sequential(Odd(), Unused())
    with saccade.watch(model) as seen:
        model(torch.randn(B, L, E))
        model(torch.randn(B, L, E))
    assert not seen.calls
    assert seen.unobserved["0: softmax"].count == 2
    assert "not known to be a product of queries and keys" in seen.unobserved["0: softmax"].reason
    assert [missed.count for name, missed in seen.unobserved.items() if name != "0: softmax"] == [2]
    assert "0: softmax (2)" in str(seen)


def test_kernels_called_by_themselves_are_counted():
    model = Calls(lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0])
    with saccade.watch(model) as seen:
        model(torch.randn(B, L, E))
    (name,) = seen.unobserved
    assert "_scaled_dot_product_flash_attention_for_cpu" in name


def test_calls_outside_of_the_model_are_not_its_own():
    model, x = Calls(F.scaled_dot_product_attention), torch.randn(B, L, E)
    with saccade.watch(model) as seen:
        F.scaled_dot_product_attention(*model.parts(x))
        saccade.attention(*model.parts(x))
        Calls(F.scaled_dot_product_attention)(x)
    assert not seen.calls and not seen.steps
    assert "the model ran no forward pass" in str(seen)


def test_accelerated_models_are_seen_once():
    accelerate = pytest.importorskip("saccade.acceleration").accelerate
    model, x = Calls(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)), torch.randn(B, L, E)
    query, key, _ = model.parts(x)
    for first, second in ((accelerate, None), (None, accelerate)):
        with (
            first() if first else torch.enable_grad(),
            saccade.watch(model) as seen,
            second() if second else torch.enable_grad(),
        ):
            model(x)
        assert len(seen.calls) == 1
        check(seen, "", dense(query, key, causal()))
