"""The kernel of causal linear attention on every instruction set, against the masked quadratic form in float64.

Shape legend: B batch, H / Hkv query and key-value heads, L length, M features, Dv value width.
"""

from __future__ import annotations

import pytest
import torch

from looped import looped
from native.fuzzing import each_set
from saccade import Causal, Padding
from saccade.variants import LinearState, _causal_native as kernel, linear_attention, linear_step
from saccade.variants._step_native import quick_step
from saccade.variants.feature_maps import NAMES, EluPlusOne

SPAN = 2048  # native/call.h, kLinearSpan


def slow(*sizes):
    return pytest.param(*sizes, marks=pytest.mark.slow)


def problem(length, group, features, width, dtype=torch.float32, batch=2, kv_heads=2):
    torch.manual_seed(length + features)
    query = torch.rand(batch, kv_heads * group, length, features).to(dtype)
    key = torch.rand(batch, kv_heads, length, features).to(dtype)
    value = torch.randn(batch, kv_heads, length, width).to(dtype)
    return [x.requires_grad_() for x in (query, key, value)]


def quadratic(query, key, value, sums, scale, normalise):
    """Every weight, in units of the greatest scale so far, and the state as one more key for each feature."""
    group = query.shape[1] // key.shape[1]
    running = scale.cummax(-1).values
    states = sums[..., :-1], sums[..., -1]
    key, value, scale, running, *states = (x.repeat_interleave(group, 1) for x in (key, value, scale, running, *states))
    away = scale[..., None, 1:] - running[..., 1:, None]
    weights = torch.where(
        torch.ones_like(away, dtype=torch.bool).tril(), (query @ key.mT) * away.clamp(max=0).exp(), 0.0
    )
    before = query * (scale[..., :1] - running[..., 1:]).exp()[..., None]
    out = weights @ value + before @ states[0]
    return out / (weights.sum(-1) + (before @ states[1][..., None])[..., 0])[..., None] if normalise else out


def after(key, value, sums, scale):
    """The sums after the last token, in units of the greatest scale."""
    top = scale.amax(-1, keepdim=True)
    ones = torch.nn.functional.pad(value, (0, 1), value=1.0)
    kept = (scale - top).exp()
    return (key * kept[..., 1:, None]).mT @ ones + sums * kept[..., :1, None]


def errors(found, expected):
    """The largest error, as a share of the largest entry or of 1, which the terms are near."""
    pairs = [(one.detach().double(), other.detach()) for one, other in zip(found, expected, strict=True)]
    return max(float((one - other).abs().max() / other.abs().max().clamp(min=1)) for one, other in pairs)


@looped("scaled", [False, True])
@looped("normalise", [False, True])
@pytest.mark.parametrize(
    "length, group, features, width",
    [(17, 1, 3, 1), (64, 2, 64, 64), (131, 3, 7, 37), slow(SPAN, 1, 16, 5), slow(SPAN + 67, 2, 33, 17)],
)
def test_values_and_gradients(length, group, features, width, normalise, scaled):
    tensors = problem(length, group, features, width)
    tensors.append(torch.rand(2, 2, features, width + 1, requires_grad=True))
    scale = torch.zeros(2, 2, 1 + length)
    if scaled:
        scale = torch.cat([torch.zeros(2, 2, 1), 3 * torch.randn(2, 2, length)], -1)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = quadratic(*exact, scale.double(), normalise), after(*exact[1:], scale.double())
    cotangents = [torch.randn_like(x).float() for x in expected]
    wanted = torch.autograd.grad(expected, exact, [x.double() for x in cotangents])
    settings = kernel.CausalKernelSettings(kernel.IDENTITY, normalise, 1e-19)
    for instructions in each_set():
        out, sums = kernel.read(settings, *tensors, scale if scaled else None)
        found = torch.autograd.grad((out, sums), tensors, cotangents)
        # Sums of `length` products, whose roundings are independent: 2^-24 sqrt(length), and a few such in a row.
        allowed = 8 * 2**-24 * max(length, 64) ** 0.5
        assert errors((out, sums, *found), (*expected, *wanted)) <= allowed, instructions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [97, SPAN + 131])
def test_elu_plus_one_and_padding(dtype, length):
    """The map inside the kernel, from and to each dtype, with tokens that are not there."""
    query, key, value = problem(length, 3, 11, 7, dtype)
    with torch.no_grad():
        query.sub_(0.5), key.sub_(0.5)
    kept = torch.rand(2, length) > 0.2
    mask = Padding(kept, kept) & Causal()
    with torch.no_grad():
        key[~kept[:, None].expand(2, 2, length)] = float("nan")
    safe = key.detach().nan_to_num(0.0)
    key = safe.clone().requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    expected = linear_attention(*exact, mask)
    cotangent = torch.randn_like(expected).to(dtype)
    wanted = torch.autograd.grad(expected, exact, cotangent.double())
    # Half a unit of the dtype in what is written; backward reads the rounded output once more.
    unit = torch.finfo(dtype).eps
    for instructions in each_set():
        out = linear_attention(query, key, value, mask)
        found = torch.autograd.grad(out, (query, key, value), cotangent)
        assert out.dtype == dtype
        assert errors([out], [expected]) <= unit / 2 + 8 * 2**-24 * length**0.5, instructions
        assert errors(found, wanted) <= 2 * unit + 8 * 2**-24 * length**0.5, instructions
        for gradient in found:
            assert (gradient.transpose(1, 2)[~kept] == 0).all(), instructions


def test_threads_change_no_bit(instructions):
    tensors = problem(3 * SPAN + 5, 2, 16, 16, batch=1)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out = linear_attention(*tensors, Causal())
            results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0][1:], result[1:], strict=True))
        assert torch.equal(results[0][0], result[0])


def test_strides_are_read_as_they_are(instructions):
    """(B, L, H, D) in memory, every second row of a larger tensor, and a last axis that is not contiguous."""
    query, key, value = (x.detach() for x in problem(131, 1, 16, 16))
    plain = linear_attention(query, key, value, Causal())
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    spread = [torch.stack([x, x + 1], 3).flatten(2, 3)[:, :, ::2] for x in (query, key, value)]
    columns = [x.mT.contiguous().mT for x in (query, key, value)]
    for given in (turned, spread, columns):
        assert torch.equal(linear_attention(*given, Causal()), plain)


def test_a_prompt_and_its_continuation(instructions):
    query, key, value = (x.detach() for x in problem(SPAN + 200, 2, 16, 9))
    whole = linear_attention(query, key, value, Causal())
    state, outs = None, []
    for part in torch.arange(SPAN + 200).split([SPAN + 100, 70, 1, 29]):
        out, state = linear_step(query[:, :, part], key[:, :, part], value[:, :, part], state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=0, atol=1e-5)


def test_the_module_repeats_the_checks():
    query, key, value = (x.detach() for x in problem(20, 1, 3, 2))
    out, denominator, states = torch.empty_like(value), torch.empty(2, 2, 20), torch.empty(2, 2, 2, 3, 3)
    at = [(x.data_ptr(), x.stride()) for x in (query, key, value, out)]
    shape = (query.shape, key.shape, value.shape, 0, 0, 1, 1, 1e-19)
    none = ((0, 0, 0, 0), (0, 0))
    call = kernel._kernels.module.linear
    with pytest.raises(ValueError, match="shapes of query, key and value do not belong together"):
        call((query.shape, (2, 2, 19, 3), *shape[2:]), *at[:3], *none, at[3], denominator.data_ptr(), states.data_ptr())
    with pytest.raises(ValueError, match="linear attention lacks memory"):
        call(shape, *at[:3], *none, at[3], denominator.data_ptr(), 0)
    with pytest.raises(ValueError, match="at least one thread"):
        call((*shape[:6], 0, 1e-19), *at[:3], *none, at[3], denominator.data_ptr(), states.data_ptr())
    with pytest.raises(ValueError, match="linear attention of nothing"):
        call(((2, 2, 0, 3), *shape[1:]), *at[:3], *none, at[3], denominator.data_ptr(), states.data_ptr())


@looped("dtype", [torch.float32, torch.bfloat16, torch.float16])
@looped("normalise", [False, True])
@looped("feature_map", NAMES.values())
@pytest.mark.parametrize("group, features, width", [(1, 3, 5), (3, 13, 67)])
def test_single_tokens_after_a_prompt(instructions, dtype, normalise, feature_map, group, features, width):
    """The state comes from a longer call, then from steps, against the parallel form in float64."""
    length, prompt = 23, 19
    tensors = [x.detach() for x in problem(length, group, features, width, dtype)]
    whole = linear_attention(*(x.double() for x in tensors), Causal(), feature_map=feature_map, normalise=normalise)
    options = dict(feature_map=feature_map, normalise=normalise)
    _, state = linear_step(*(x[:, :, :prompt] for x in tensors), **options)
    outs = []
    for place in range(prompt, length):
        token = [x[:, :, place : place + 1] for x in tensors]
        before = [x.clone() for x in state]
        found = quick_step(*token, state, feature_map, normalise)
        assert found is not None
        assert all(torch.equal(one, other) for one, other in zip(before, state, strict=True))
        out, state = found
        outs.append(out)
    # The output is rounded once; sums of 23 terms and of M products, and exp, are float32.
    unit = torch.finfo(dtype).eps if dtype != torch.float32 else 0
    allowed = unit + (length + feature_map.width(features)) * 2**-23
    assert errors([torch.cat(outs, 2)], [whole[:, :, prompt:]]) <= allowed


def test_a_step_changes_no_bit_with_threads_or_batch_mates(instructions):
    tensors = [x.detach() for x in problem(1, 1, 64, 64, batch=7, kv_heads=5)]
    state = linear_step(*tensors)[1]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(linear_step(*tensors, state))
    finally:
        torch.set_num_threads(before)
    alone = linear_step(*(x[3:4] for x in tensors), LinearState(*(x[3:4] for x in state)))
    (out, after), (other, others) = found
    assert torch.equal(out, other) and all(map(torch.equal, after, others))
    assert torch.equal(out[3:4], alone[0]) and all(torch.equal(x[3:4], y) for x, y in zip(after, alone[1], strict=True))


@pytest.mark.parametrize("kind", ["a graph", "padding", "float64", "any function"])
def test_what_the_step_of_the_kernel_leaves_to_others(kind):
    tensors = [x.detach() for x in problem(1, 1, 3, 5)]
    if kind == "a graph":
        tensors[1].requires_grad_()
    if kind == "float64":
        tensors = [x.double() for x in tensors]
    feature_map = (lambda x: x.exp()) if kind == "any function" else EluPlusOne()
    assert (quick_step(*tensors, None, feature_map, True) is None) == (kind != "padding")
    mask = Padding([1, 0]) if kind == "padding" else None
    out, state = linear_step(*tensors, None, mask, feature_map=feature_map)
    assert (out[1] == 0).all() == (kind == "padding") and state.sums.requires_grad == (kind == "a graph")
