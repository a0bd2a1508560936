"""Linear attention: chunks, recurrence and the masked quadratic form are one function, in values and gradients.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D key width, Dv value width, M features.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from looped import looped
from saccade import Causal, Padding, Window
from saccade.variants import (
    HeadSizes,
    LinearConfig,
    LinearState,
    _causal,
    _causal_native,
    linear_attention,
    linear_step,
)
from saccade.variants.feature_maps import NAMES, Dpfp, EluPlusOne, Relu, Softmax, Taylor

NEAR = 1e-12  # of the largest entry: sums of some hundred float64 products in another order


def inputs(batch=2, heads=6, kv_heads=3, rows=37, keys=37, width=7, value_width=5, dtype=torch.float64):
    torch.manual_seed(rows * keys + heads)
    query = torch.randn(batch, heads, rows, width, dtype=dtype)
    key = torch.randn(batch, kv_heads, keys, width, dtype=dtype)
    value = torch.randn(batch, kv_heads, keys, value_width, dtype=dtype)
    return tuple(x.requires_grad_() for x in (query, key, value))


def quadratic(query, key, value, feature_map=lambda x: F.elu(x) + 1, *, causal=True, normalise=True, seen=None):
    """Every weight, one by one, and a mask on them."""
    rows, keys = query.shape[2], key.shape[2]
    group = query.shape[1] // key.shape[1]
    weights = feature_map(query) @ feature_map(key).repeat_interleave(group, 1).mT
    allowed = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        allowed = torch.arange(keys)[None, :] <= torch.arange(rows)[:, None] + keys - rows
    allowed = allowed if seen is None else allowed & seen[:, None, None, :]
    weights = torch.where(allowed, weights, 0.0)
    if normalise:
        whole = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(whole == 0, 1.0, whole)
    return weights @ value.repeat_interleave(group, 1)


def recurrent(query, key, value, normalise=True):
    """Equations 16 to 20 of the paper, a token at a time, in one head."""
    phi = lambda x: torch.where(x > 0, x + 1, x.exp())  # noqa: E731
    s, z, rows = 0, 0, []
    for q, k, v in zip(phi(query), phi(key), value, strict=True):
        s, z = s + torch.outer(k, v), z + k
        rows.append(q @ s / (q @ z if normalise else 1))
    return torch.stack(rows)


def assert_near(found, expected, tolerance=NEAR):
    """Up to rounding of terms that are near 1 or, where the result says so, larger."""
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1)


def assert_same(function, reference, tensors, tolerance=NEAR):
    """Values, and gradients of every input for a random cotangent."""
    out, expected = function(*tensors), reference(*tensors)
    cotangent = torch.randn(out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, tensors, cotangent)
    wanted = torch.autograd.grad(expected, tensors, cotangent)
    for one, other in zip((out, *found), (expected, *wanted), strict=True):
        assert_near(one, other, tolerance)


# Below, at and above a chunk and a segment, and multiples of nothing.
@pytest.mark.slow
@looped("length", [2, 3, 63, 64, 65, 131, 512, 521, 1031])
@looped("normalise", [True, False])
def test_chunks_are_the_quadratic_form(length, normalise):
    assert_same(
        lambda *x: linear_attention(*x, Causal(), normalise=normalise),
        lambda *x: quadratic(*x, normalise=normalise),
        inputs(1, 2, 1, length, length),
    )


@pytest.mark.parametrize("normalise", [True, False])
def test_chunks_are_the_recurrence(normalise):
    assert_same(
        lambda *x: linear_attention(*x, Causal(), normalise=normalise),
        lambda q, k, v: recurrent(q[0, 0], k[0, 0], v[0, 0], normalise)[None, None],
        inputs(1, 1, 1, 149, 149),
    )


@looped("feature_map", [EluPlusOne(), Relu(), Softmax(), Dpfp(2), Taylor(), lambda x: x.exp()])
@looped("mask", [None, Causal()])
def test_any_feature_map(feature_map, mask):
    assert_same(
        lambda *x: linear_attention(*x, mask, feature_map=feature_map),
        lambda *x: quadratic(*x, feature_map, causal=mask is not None),
        inputs(rows=71, keys=71),
        1e-11,  # the maps whose features vanish leave rows of little weight, and the quotient has fewer digits
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 90),
    keys=st.integers(0, 90),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    width=st.integers(1, 9),
    value_width=st.integers(1, 9),
    causal=st.booleans(),
    real=st.lists(st.integers(0, 90), min_size=2, max_size=2),
)
def test_every_shape_and_padding(rows, keys, group, kv_heads, width, value_width, causal, real):
    tensors = inputs(2, kv_heads * group, kv_heads, rows, keys, width, value_width)
    lengths = torch.tensor([min(n, keys) for n in real])
    seen = torch.arange(keys)[None] < lengths[:, None]
    mask = Padding(lengths) & Causal() if causal else Padding(lengths)
    out = linear_attention(*tensors, mask)
    expected = quadratic(*tensors, causal=causal, seen=seen)
    assert out.shape == (2, kv_heads * group, rows, value_width)
    if out.numel():
        assert_near(out, expected)
        found = torch.autograd.grad(out.square().sum(), tensors, allow_unused=True)
        wanted = torch.autograd.grad(expected.square().sum(), tensors, allow_unused=True)
        for one, other in zip(found, wanted, strict=True):
            if other.numel():
                assert_near(one, other, 1e-11)  # the cotangent itself is rounded


@looped("poison", [float("nan"), float("inf")])
@looped("causal", [False, True])
@looped("dtype", [torch.float32, torch.float64])
def test_padding_is_exact_whatever_stands_there(poison, causal, dtype):
    tensors = inputs(2, 6, 3, 73, 73, dtype=dtype)
    lengths = torch.tensor([41, 73])
    padding = Padding(lengths, lengths)
    mask = padding & Causal() if causal else padding
    outs, gradients = [], []
    for fill in (0.0, poison):
        changed = []
        for x in tensors:
            x = x.detach().clone()
            x[0, :, 41:] = fill
            changed.append(x.requires_grad_())
        out = linear_attention(*changed, mask)
        cotangent = torch.ones_like(out)
        cotangent[0, :, 41:] = fill
        outs.append(out)
        gradients.append(torch.autograd.grad(out, changed, cotangent))
    alone = linear_attention(*(x[:1, :, :41] for x in tensors), Causal() if causal else None)
    near = dict(rtol=0, atol=1e-13 if dtype == torch.float64 else 1e-5)  # of values near 1: a hundred roundings
    torch.testing.assert_close(outs[0], outs[1], **near)
    torch.testing.assert_close(outs[1][:1, :, :41], alone, **near)
    assert (outs[1][0, :, 41:] == 0).all()
    for clean, poisoned in zip(*gradients, strict=True):
        torch.testing.assert_close(clean, poisoned, **near)
        assert (poisoned[0, :, 41:] == 0).all()


@pytest.mark.slow
@looped("later", [float("nan"), -float("inf"), 3e38, 1e30])
@looped("which", range(3))
@looped("map_name", ["elu+1", "relu"])
@looped("dtype", [torch.float32, torch.float64])
def test_what_stands_later_changes_no_bit_of_earlier_rows(dtype, map_name, which, later):
    """Nor of their gradients, where later rows stay in range: two of 3e38 do not. NaN reaches the rows that see it."""
    clean = [x.detach() for x in inputs(1, 2, 1, 137, 137, dtype=dtype)]
    dirty = [x.clone() for x in clean]
    dirty[which][:, :, 70:] = later

    def run(tensors):
        leaves = [x.requires_grad_() for x in tensors]
        out = linear_attention(*leaves, Causal(), feature_map=NAMES[map_name])
        return out, *torch.autograd.grad(out[:, :, :70].sum(), leaves)

    (out, *gradients), (expected, *expected_gradients) = run(dirty), run(clean)
    assert torch.equal(out[:, :, :70], expected[:, :, :70])
    if later != 3e38:
        assert all(torch.equal(x[:, :, :70], y[:, :, :70]) for x, y in zip(gradients, expected_gradients, strict=True))
    if math.isnan(later):
        assert out[:, :, 70:].isnan().all()  # and is not hidden where it is seen


@pytest.mark.slow
def test_gradcheck():
    query, key, value = inputs(1, 2, 1, 5, 7, 3, 2)
    assert torch.autograd.gradcheck(lambda *x: linear_attention(*x, Causal()), (query, key, value))
    assert torch.autograd.gradcheck(lambda *x: linear_attention(*x), (query, key, value))
    state = LinearState(
        torch.rand(1, 1, 3, 2, dtype=torch.float64, requires_grad=True),
        torch.rand(1, 1, 3, dtype=torch.float64, requires_grad=True) + 1,
    )

    def step(q, k, v, sums, weights):
        out, after = linear_step(q, k, v, LinearState(sums, weights))
        return out, *after

    assert torch.autograd.gradcheck(step, (query, key[:, :, :5], value[:, :, :5], *state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_second_derivative_is_refused(dtype):
    tensors = inputs(dtype=dtype)
    with pytest.raises(RuntimeError, match="causal linear attention has first derivatives only"):
        torch.autograd.grad(linear_attention(*tensors, Causal()).sum(), tensors[0], create_graph=True)


@looped("dtype", [torch.float64, torch.float32, torch.bfloat16])
@looped("steps", [[1] * 9, [1, 70, 2, 64, 5], [150]])
def test_steps_are_the_whole(dtype, steps):
    length = sum(steps)
    query, key, value = (x.detach().to(dtype) for x in inputs(2, 6, 3, length, length))
    kept = torch.rand(2, length) > 0.2
    state, outs = None, []
    for part in torch.arange(length).split(steps):
        before = None if state is None else [x.clone() for x in state]
        step = (x[:, :, part] for x in (query, key, value))
        out, after = linear_step(*step, state, Padding(kept[:, part]))
        if before is not None:
            assert all(torch.equal(one, other) for one, other in zip(before, state, strict=True))
        outs, state = [*outs, out], after
    whole = linear_attention(query, key, value, Causal() & Padding(kept))
    unit = 8 * torch.finfo(dtype).eps if dtype != torch.float64 else NEAR  # values are averages of normal numbers
    assert whole.dtype == dtype
    assert_near(torch.cat(outs, 2).double(), whole.double(), unit)
    assert state.sums.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert state.sums.shape == (2, 3, 7, 5) and state.weights.shape == (2, 3, 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_float32(dtype):
    """Against float64 on the same numbers: only the output is rounded to its dtype, and 1,499 weights are not."""
    query, key, value = (x.detach().to(dtype) for x in inputs(1, 2, 2, 1499, 1499, 7, 5))
    exact = quadratic(query.double(), key.double(), value.double())
    for mask, wanted in (
        (Causal(), exact),
        (None, quadratic(*(x.double() for x in (query, key, value)), causal=False)),
    ):
        out = linear_attention(query, key, value, mask)
        error = (out.double() - wanted).abs().max()
        # Half a unit of the dtype at the largest value, and sums of 1,499 products in float32.
        assert out.dtype == dtype
        assert error <= wanted.abs().max() * torch.finfo(dtype).eps / 2 + 3e-6


def test_under_autocast_sums_stay_float32():
    query, key, value = (x.detach().float() for x in inputs(1, 2, 2, 701, 701))
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_attention(query, key, value, Causal())
    expected = linear_attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), Causal())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)


def test_nothing_is_added_to_the_normaliser():
    """Weights of 1e-8 are weights: an epsilon of 1e-6, as elsewhere, would make the average 0."""
    query = torch.full((1, 1, 3, 2), -9.0)
    key = torch.full((1, 1, 3, 2), -9.0)
    value = torch.tensor([1.0, 2.0, 4.0])[None, None, :, None]
    out = linear_attention(query, key, value, Causal())
    torch.testing.assert_close(out.flatten(), torch.tensor([1.0, 1.5, 7 / 3]))
    torch.testing.assert_close(linear_attention(query, key, value).flatten(), torch.full((3,), 7 / 3))


@looped("length", [5, 80])
@looped("mask", [None, Causal()])
def test_rows_whose_features_vanish_are_zero(mask, length):
    tensors = inputs(1, 2, 1, length, length, dtype=torch.float32)
    with torch.no_grad():
        tensors[0][:, :, 3] = -1.0
    out = linear_attention(*tensors, mask, feature_map=Relu())
    out.sum().backward()
    assert (out[:, :, 3] == 0).all()
    assert all(torch.isfinite(x.grad).all() for x in tensors)
    assert (tensors[0].grad[:, :, 3] == 0).all()


@looped("factor", [1e-30, 1e4, 1e12])
@looped("mask", [None, Causal()])
@looped("length", [13, 131])
def test_extreme_norms_stay_finite(factor, mask, length):
    query, key, value = inputs(1, 2, 1, length, length, dtype=torch.float32)
    out = linear_attention(query * factor, key * factor, value, mask)
    out.square().sum().backward()
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(x.grad).all() for x in (query, key, value))


def test_no_bit_depends_on_batch_mates():
    query, key, value = (x.detach().float() for x in inputs(3, 6, 3, 2203, 2203))
    whole = linear_attention(query, key, value, Causal())
    one = linear_attention(query[1:2], key[1:2], value[1:2], Causal())
    if not _causal_native.takes(query, key, value):
        pytest.skip("a promise of the kernel: PyTorch's products may differ with their number")
    assert torch.equal(whole[1:2], one)


@pytest.mark.slow
@looped("length", [1, 7, 64, 131, 700])
@looped("normalise", [True, False])
def test_scales_of_keys(length, normalise):
    """exp(log_scale_j) psi_j without ever forming it; a state in units of its own, and gradients."""
    torch.manual_seed(length)
    queries, keys = torch.rand(2, 4, length, 7).double(), torch.rand(2, 2, length, 7).double()
    values = torch.randn(2, 2, length, 5).double()
    scale = 4 * torch.randn(2, 2, length).double()
    tensors = [x.requires_grad_() for x in (queries, keys, values)]
    cut = length // 3

    def read(q, k, v):
        first, state = _causal.read_causally(
            q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], normalise=normalise, log_scale=scale[..., :cut]
        )
        unit = scale[..., :cut].amax(-1) if cut else None
        second, _ = _causal.read_causally(
            q[:, :, cut:],
            k[:, :, cut:],
            v[:, :, cut:],
            state if cut else None,
            normalise=normalise,
            log_scale=scale[..., cut:],
            state_scale=unit,
        )
        return torch.cat([first, second], 2)

    def expected(q, k, v):
        out = quadratic(q, k * scale.exp()[..., None], v, lambda x: x, normalise=normalise)
        return out if normalise else out * (-scale.cummax(-1).values).exp().repeat_interleave(2, 1)[..., None]

    assert_same(read, expected, tensors, 1e-11)


def test_a_scale_that_grows_later_takes_no_digit_from_earlier_rows():
    queries, keys, values = torch.rand(1, 1, 64, 3), torch.rand(1, 1, 64, 3), torch.randn(1, 1, 64, 2)
    scale = torch.zeros(1, 1, 64)
    plain, _ = _causal.read_causally(queries, keys, values, log_scale=scale)
    scale[..., 40:] = 500.0
    grown, _ = _causal.read_causally(queries, keys, values, log_scale=scale)
    assert torch.equal(plain[:, :, :40], grown[:, :, :40])
    assert torch.isfinite(grown).all()


def test_what_does_not_fit_is_refused():
    query, key, value = inputs()
    with pytest.raises(ValueError, match=r"mask: linear attention takes Causal\(\), Padding\(.*sums the keys"):
        linear_attention(query, key, value, Window(3, 0))
    with pytest.raises(ValueError, match=r"feature_map: expected features \(\.\.\., M\) in torch.float64 of query"):
        linear_attention(query, key, value, feature_map=lambda x: x.sum(-1))
    with pytest.raises(ValueError, match=r"feature_map: .* got .* in torch.float32"):
        linear_attention(query, key, value, feature_map=lambda x: x.float())
    with pytest.raises(ValueError, match=r"query has length \(axis 2\) 3, expected key's 37: a step"):
        linear_step(query[:, :, :3], key, value)
    with pytest.raises(ValueError, match=r"mask: expected None or Padding\(...\), .*got Causal\(\)"):
        linear_step(query, key, value, None, Causal())


@pytest.mark.parametrize("length", [1, 37])
def test_a_state_that_does_not_fit_is_refused(length):
    query, key, value = (x.detach()[:, :, :length] for x in inputs())
    _, state = linear_step(query, key, value)
    sums, weights = state
    refused = [
        ((sums, weights), TypeError, "expected the LinearState of an earlier step or None, got tuple"),
        (
            LinearState(sums[:1], weights),
            ValueError,
            "expected sums of shape (2, 3, 7, 5) for these tokens, got (1, 3, ",
        ),
        (LinearState(sums, weights[..., :6]), ValueError, "expected weights of shape (2, 3, 7) for these tokens"),
        (
            LinearState(sums.float(), weights),
            ValueError,
            "expected sums in torch.float64 for these tokens, got torch.fl",
        ),
        (LinearState(sums, weights.to("meta")), ValueError, "expected weights on cpu like these tokens, got meta"),
    ]
    for wrong, kind, words in refused:
        with pytest.raises(kind, match="state: " + re.escape(words)):
            linear_step(query, key, value, wrong)


def test_configuration():
    config = LinearConfig("taylor", normalise=False)
    assert LinearConfig(**json.loads(json.dumps(asdict(config)))) == config
    module = config.build(HeadSizes(24, 6, 3, 7, 5))
    tensors = inputs()
    assert not list(module.parameters())
    expected = linear_attention(*tensors, Causal(), feature_map=Taylor(), normalise=False)
    assert torch.equal(module(*tensors, Causal()), expected)
    out, _ = module.step(*tensors)
    assert_near(out, expected)
    assert repr(module) == "LinearAttention(Taylor(), normalise=False)"
    with pytest.raises(ValueError, match="feature_map: expected one of elu\\+1, relu.*, got 'cosine'"):
        LinearConfig("cosine")
    with pytest.raises(TypeError, match="feature_map: expected a name, got EluPlusOne"):
        LinearConfig(EluPlusOne())
    with pytest.raises(TypeError, match="normalise: expected True or False, got int"):
        LinearConfig(normalise=1)
    with pytest.raises(ValueError, match="nu: expected less than 2, twice the width of a head, got 3"):
        LinearConfig("dpfp-3").build(HeadSizes(6, 6, 6, 1, 1))
