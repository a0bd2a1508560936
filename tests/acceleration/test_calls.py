"""Single calls, taken: equal to PyTorch's dense path in float64, to the rounding of their dtype.

B batch, Hq / Hkv heads, Lq / Lk lengths, D / Dv widths.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

import saccade
from looped import looped

pytestmark = pytest.mark.usefixtures("every_size")

HQ = 6


def allowed(query, key, value, mask, scale, dtype) -> float:
    """How far an output may be from the exact one.

    A logit of D products is off by (D + 2) eps of the sum of their sizes, and by eps of the mask; a weight by twice
    that share, a sum of Lk of them by Lk eps more; and the result is rounded to the dtype.
    """
    eps, keys = torch.finfo(torch.float32).eps, key.shape[-2]
    scale = abs(query.shape[-1] ** -0.5 if scale is None else scale)
    sizes = query.abs().amax(tuple(range(query.dim() - 1))) @ key.abs().amax(tuple(range(key.dim() - 1)))
    added = 0.0
    if mask is not None and mask.is_floating_point():
        added = float(mask[mask != -math.inf].abs().max()) if (mask != -math.inf).any() else 0.0
    logit = eps * ((query.shape[-1] + 2) * scale * float(sizes) + added)
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    return float(value.abs().max()) * (2 * logit + (keys + 8) * eps + rounding)


@st.composite
def calls(draw):
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    grouped = draw(st.booleans())
    heads = HQ, draw(st.sampled_from([1, 2, 3])) if grouped else HQ
    batch = draw(st.sampled_from([(2,), (2, 3), ()]))
    rows, keys = draw(st.sampled_from([(5, 7), (7, 5), (5, 5), (1, 17), (17, 1), (53, 67)]))
    width = draw(st.sampled_from([1, 3, 16]))
    value_width = draw(st.sampled_from([width, 11]))
    torch.manual_seed(draw(st.integers(0, 2**20)))
    query = torch.randn(*batch, heads[0], rows, width).to(dtype)
    key = torch.randn(*batch, heads[1], keys, width).to(dtype)
    value = torch.randn(*batch, heads[1], keys, value_width).to(dtype)
    options = {"scale": draw(st.sampled_from([None, 0.3, 0.0])), "enable_gqa": grouped}
    kind = draw(st.sampled_from(["none", "causal", "boolean", "hiding", "added"]))
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        whole = (*batch, HQ, rows, keys)
        axes = draw(st.integers(2, len(whole)))
        shape = [draw(st.sampled_from([1, size])) for size in whole[len(whole) - axes :]]
        mask = torch.rand(shape) < draw(st.sampled_from([0.4, 0.9]))
        if kind != "boolean":
            scores = torch.randn(shape) if kind == "added" else torch.zeros(shape)
            mask = scores.to(draw(st.sampled_from([dtype, torch.float32]))).masked_fill(~mask, -math.inf)
        options["attn_mask"] = mask
    return (query, key, value), options


def exact(tensors, options):
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options = {**options, "attn_mask": mask.double()}
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*(tensor.double() for tensor in tensors), **options)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # it changes nothing between examples
@given(calls())
def test_every_combination_of_arguments_is_taken_and_exact_to_rounding(call):
    tensors, options = call
    with saccade.accelerate() as run:
        out = F.scaled_dot_product_attention(*tensors, **options)
    assert (run.taken, run.calls) == (1, 1)
    expected = exact(tensors, options)
    assert (out.shape, out.dtype) == (expected.shape, tensors[0].dtype)
    wide = [tensor.double() for tensor in tensors]
    bound = allowed(*wide, options.get("attn_mask"), options["scale"], tensors[0].dtype)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=bound)


@looped("kind", ["none", "causal", "boolean", "added"])
def test_gradients_of_every_input(kind):
    options = {"none": {}, "causal": {"is_causal": True}}.get(kind)
    tensors = [torch.randn(2, 6, 13, 8), torch.randn(2, 6, 17, 8), torch.randn(2, 6, 17, 5)]
    mask = None
    if options is None:
        mask = torch.rand(2, 1, 13, 17) < 0.7 if kind == "boolean" else torch.randn(6, 13, 17)
        options = {"attn_mask": mask}
    leaves = [*tensors, mask] if kind == "added" else tensors
    cotangent = torch.randn(2, 6, 13, 5)

    def gradients(dtype):
        given = [leaf.to(dtype, copy=True).requires_grad_() for leaf in leaves]
        named = {"attn_mask": given[3]} if kind == "added" else options
        out = F.scaled_dot_product_attention(*given[:3], **named)
        return torch.autograd.grad((out * cotangent.to(dtype)).sum(), given)

    expected, plain = gradients(torch.float64), gradients(torch.float32)
    with saccade.accelerate() as run:
        ours = gradients(torch.float32)
    assert run.taken == 1
    for one, other, judge in zip(ours, plain, expected, strict=True):
        # At most twice PyTorch's own error, and the last bit of the largest entry.
        theirs = float((other.double() - judge).abs().max())
        last_bit = torch.finfo(torch.float32).eps * float(judge.abs().max())
        assert float((one.double() - judge).abs().max()) <= 2 * theirs + last_bit


def test_second_derivatives():
    tensors = [torch.randn(1, 2, 5, 3, requires_grad=True) for _ in range(3)]

    def twice(tensors):
        out = F.scaled_dot_product_attention(*tensors, is_causal=True)
        first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in first), tensors)

    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    with sdpa_kernel(SDPBackend.MATH):
        expected = twice(wide)
    with saccade.accelerate() as run:
        ours = twice(tensors)
    assert run.taken == 1
    for one, judge in zip(ours, expected, strict=True):
        # Sums of squares of gradients: a thousand roundings of the largest entry at most.
        torch.testing.assert_close(one.double(), judge, rtol=0, atol=1000 * 2**-24 * float(judge.abs().max()))


def test_dropout_drops_and_keeps_the_mean():
    query, key, value = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 20_011, 2), torch.ones(1, 1, 20_011, 3)
    with saccade.accelerate() as run:
        torch.manual_seed(1)
        first = F.scaled_dot_product_attention(query, key, value, dropout_p=0.3)
        other = F.scaled_dot_product_attention(query, key, value, dropout_p=0.3)
        torch.manual_seed(1)
        again = F.scaled_dot_product_attention(query, key, value, dropout_p=0.3)
    assert run.taken == 3
    assert torch.equal(first, again) and not torch.equal(first, other)
    # The mean of 20,011 kept or dropped weights: five standard deviations.
    spread = 5 * math.sqrt(0.3 / 0.7 / 20_011)
    assert abs(float(first.mean()) - 1) < spread and abs(float(other.mean()) - 1) < spread


def test_autocast_casts_as_without():
    query, key, value = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8).bfloat16(), torch.randn(2, 3, 7, 8)
    with torch.autocast("cpu", torch.bfloat16):
        plain = F.scaled_dot_product_attention(query, key, value)
        with saccade.accelerate() as run:
            out = F.scaled_dot_product_attention(query, key, value)
    assert run.taken == 1
    assert out.dtype == plain.dtype == torch.bfloat16
    rounded = [tensor.bfloat16().double() for tensor in (query, key, value)]
    bound = allowed(*rounded, None, None, torch.bfloat16)
    torch.testing.assert_close(out.double(), exact(rounded, {}), rtol=0, atol=bound)


def test_rows_that_see_nothing_are_zero():
    query, key, value = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1, :, 2] = False
    with saccade.accelerate() as run:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out.square().sum().backward()
    assert run.taken == 1
    assert (out[1, :, 2] == 0).all() and (query.grad[1, :, 2] == 0).all()
    assert out.isfinite().all() and key.grad.isfinite().all() and value.grad.isfinite().all()


def test_inference_mode():
    with torch.inference_mode():
        query = torch.randn(2, 3, 5, 8)
        mask = torch.rand(2, 1, 5, 5) < 0.8
        with saccade.accelerate() as run:
            first = F.scaled_dot_product_attention(query, query, query, attn_mask=mask)
            mask.fill_(True)
            second = F.scaled_dot_product_attention(query, query, query, attn_mask=mask)
        assert run.taken == 2
        full = exact((query,) * 3, {})
        torch.testing.assert_close(
            second.double(), full, rtol=0, atol=allowed(*[query.double()] * 3, None, None, torch.float32)
        )
        assert not torch.allclose(first.double(), full)


@looped("heads_first", [True, False])
@looped("grad", [True, False])
def test_memory_is_laid_out_as_by_pytorch(heads_first, grad):
    """So that callers who merge the heads by a view still can."""
    tensors = [torch.randn((2, 3, 53, 8) if heads_first else (2, 53, 3, 8)) for _ in range(3)]
    tensors = [(tensor if heads_first else tensor.transpose(1, 2)).requires_grad_(grad) for tensor in tensors]
    expected = F.scaled_dot_product_attention(*tensors)
    with saccade.accelerate() as run:
        out = F.scaled_dot_product_attention(*tensors)
    assert run.taken == 1
    assert out.stride() == expected.stride()
