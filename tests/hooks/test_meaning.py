"""What F.sdpa's arguments mean: Saccade's reference on the meaning is PyTorch's own dense path on the call.

B batch, Hq / Hkv heads, Lq / Lk lengths, D / Dv widths; all in float64.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

import saccade
from looped import looped
from saccade import Causal, FromTensor, Padding
from saccade.interception._hooks import SdpaCall

B, HQ, LQ, LK, D, DV = 2, 6, 5, 7, 3, 11


def tensors(batch=(B,), heads=(HQ, HQ), lengths=(LQ, LK), dtype=torch.float64):
    shapes = (
        (*batch, heads[0], lengths[0], D),
        (*batch, heads[1], lengths[1], D),
        (*batch, heads[1], lengths[1], DV),
    )
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def computed(call: SdpaCall) -> torch.Tensor:
    """By the specification, from the meaning alone."""
    meaning = call.meaning()
    assert not isinstance(meaning, str), meaning
    out = saccade.attention(
        meaning.query,
        meaning.key,
        meaning.value,
        meaning.mask,
        bias=meaning.bias,
        scale=meaning.scale,
        backend="reference",
    )
    return meaning.shaped(out)


def dense(call: SdpaCall) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            call.query,
            call.key,
            call.value,
            attn_mask=call.attn_mask,
            is_causal=call.is_causal,
            scale=call.scale,
            enable_gqa=call.enable_gqa,
        )


def agree(call: SdpaCall) -> None:
    # float64 sums of at most 11 terms of size 1: 1e-14, a hundred times that for what cancels.
    torch.testing.assert_close(computed(call), dense(call), rtol=0, atol=1e-12)


@st.composite
def calls(draw):
    grouped = draw(st.booleans())
    kv_heads = draw(st.sampled_from([1, 2, 3, 6])) if grouped else HQ
    batch = draw(st.sampled_from([(B,), (2, 3), (), (1,)]))
    lengths = draw(st.sampled_from([(LQ, LK), (LK, LQ), (LQ, LQ), (1, LK), (LQ, 1)]))
    torch.manual_seed(draw(st.integers(0, 2**20)))
    query, key, value = tensors(batch, (HQ, kv_heads), lengths)
    whole = (*batch, HQ, *lengths)
    kind = draw(st.sampled_from(["none", "causal", "boolean", "added", "hiding"]))
    mask = None
    if kind in ("boolean", "added", "hiding"):
        axes = draw(st.integers(2, len(whole)))
        shape = [draw(st.sampled_from([1, size])) for size in whole[len(whole) - axes :]]
        mask = torch.rand(shape) < draw(st.sampled_from([0.3, 0.8]))
        if kind != "boolean":
            size = 1.0 if kind == "added" else 0.0
            mask = (size * torch.randn(shape, dtype=torch.float64)).masked_fill(~mask, -math.inf)
    scale = draw(st.sampled_from([None, 0.3, -1.0, 0.0]))
    return SdpaCall(query, key, value, mask, 0.0, kind == "causal", scale, grouped)


@given(calls())
def test_every_combination_of_arguments(call):
    agree(call)


def test_two_and_three_axes():
    query, key, value = (tensor[0, 0] for tensor in tensors())
    agree(SdpaCall(query, key, value, torch.rand(LQ, LK) < 0.5))
    assert computed(SdpaCall(query, key, value)).shape == (LQ, DV)
    query, key, value = (tensor[0] for tensor in tensors())
    agree(SdpaCall(query, key, value, torch.rand(HQ, 1, LK) < 0.5, is_causal=False))
    assert computed(SdpaCall(query, key, value)).shape == (HQ, LQ, DV)


def test_batch_and_heads_broadcast_as_in_pytorch():
    query, key, value = tensors()
    agree(SdpaCall(query, key[:1], value[:1]))
    agree(SdpaCall(query, key[:, :1], value[:, :1]))
    agree(SdpaCall(query[:1], key, value))
    agree(SdpaCall(query[:, :1], key, value))
    agree(SdpaCall(query[0], key, value))
    agree(SdpaCall(query, key[0], value[0], torch.rand(B, 1, LQ, LK) < 0.5))


def test_causal_is_from_the_top_left():
    query, key, value = tensors()
    assert SdpaCall(query, key, value, is_causal=True).meaning().mask == Causal().at(0)
    square = tensors(lengths=(LQ, LQ))
    assert SdpaCall(*square, is_causal=True).meaning().mask == Causal()


def test_mask_and_causal_together_hide_what_either_hides():
    query, key, value = (tensor.float() for tensor in tensors(lengths=(LK, LQ)))
    mask = torch.rand(B, 1, LK, LQ) < 0.6
    meaning = SdpaCall(query, key, value, mask, is_causal=True).meaning()
    see = mask & torch.ones(LK, LQ, dtype=torch.bool).tril()
    assert torch.equal(meaning.mask.dense(LK, LQ), see)
    square = SdpaCall(*tensors(lengths=(LQ, LQ)), mask[:, :, :LQ], is_causal=True).meaning()
    assert torch.equal(square.mask.dense(LQ, LQ), see[:, :, :LQ])


def test_a_mask_of_keys_is_padding_however_it_was_expanded():
    query, key, value = tensors()
    keep = torch.rand(B, 1, 1, LK) < 0.5
    for mask in (keep, keep.expand(B, 1, LQ, LK), keep.expand(B, HQ, LQ, LK)):
        assert SdpaCall(query, key, value, mask).meaning().mask == Padding(keep[:, 0, 0])
    assert isinstance(SdpaCall(query, key, value, torch.rand(LQ, LK) < 0.5).meaning().mask, FromTensor)
    assert SdpaCall(query, key, value, keep[:1]).meaning().mask == Padding(keep[:1, 0, 0])


def test_rows_that_see_nothing_are_zero_and_finfo_min_is_a_number():
    query, key, value = tensors()
    mask = torch.ones(B, 1, LQ, LK, dtype=torch.bool)
    mask[1, :, 2] = False
    for hidden in (mask, torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)):
        assert (computed(SdpaCall(query, key, value, hidden))[1, :, 2] == 0).all()
    lowest = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    mean = value[1].mean(1)
    torch.testing.assert_close(computed(SdpaCall(query, key, value, lowest))[1, :, 2], mean, rtol=0, atol=1e-12)


def test_a_float_mask_may_have_another_dtype_than_the_query():
    query, key, value = (tensor.bfloat16() for tensor in tensors())
    mask = torch.randn(LQ, LK)
    meaning = SdpaCall(query, key, value, mask).meaning()
    assert meaning.bias.dtype == torch.float32
    assert torch.equal(meaning.bias[0, 0], mask)
    assert SdpaCall(query, key, value, mask.bfloat16()).meaning().bias.dtype == torch.bfloat16


def test_gradients_reach_a_float_mask():
    query, key, value = tensors()
    mask = torch.randn(HQ, 1, LK, dtype=torch.float64, requires_grad=True)
    call = SdpaCall(query, key, value, mask)
    (ours,) = torch.autograd.grad(computed(call).sin().sum(), mask)
    (theirs,) = torch.autograd.grad(dense(call).sin().sum(), mask)
    assert ours.abs().max() > 0
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_autocast_is_followed():
    query, key, value = (tensor.float() for tensor in tensors())
    with torch.autocast("cpu", torch.bfloat16):
        meaning = SdpaCall(query, key.bfloat16(), value, torch.full((LQ, LK), torch.finfo(torch.float32).min)).meaning()
        expected = F.scaled_dot_product_attention(query, key.bfloat16(), value)
    assert meaning.query.dtype == meaning.key.dtype == meaning.value.dtype == expected.dtype == torch.bfloat16
    assert not meaning.mask.dense(LQ, LK).any()  # the cast makes -inf of it, in PyTorch too
    assert SdpaCall(query, key.bfloat16(), value).meaning() == "dtypes that differ or are not floating point"


REFUSED = {
    "widths or lengths that do not fit": lambda q, k, v: SdpaCall(q, k[..., :2], v),
    "leading axes that do not broadcast": lambda q, k, v: SdpaCall(q, k[:, :4], v[:, :4]),
    "numbers of heads that do not fit": lambda q, k, v: SdpaCall(q, k[:, :4], v[:, :4], enable_gqa=True),
    "dtypes that differ or are not floating point": lambda q, k, v: SdpaCall(q.float(), k, v),
    "attn_mask is torch.int64, which PyTorch does not accept with torch.float64": lambda q, k, v: SdpaCall(
        q, k, v, torch.zeros(LQ, LK, dtype=torch.int64)
    ),
    f"attn_mask of shape (3, {LK}) does not broadcast to {(B, HQ, LQ, LK)}": lambda q, k, v: SdpaCall(
        q, k, v, torch.zeros(3, LK)
    ),
    f"attn_mask of shape ({LK},) does not broadcast to {(B, HQ, LQ, LK)}": lambda q, k, v: SdpaCall(
        q, k, v, torch.zeros(LK)
    ),
    f"attn_mask of shape (4, 1, 1, {LQ}, {LK}) does not broadcast to {(B, HQ, LQ, LK)}": lambda q, k, v: SdpaCall(
        q, k, v, torch.zeros(4, 1, 1, LQ, LK)
    ),
}


@looped("why", REFUSED)
def test_what_has_no_meaning_says_why_and_is_refused_by_pytorch(why):
    call = REFUSED[why](*tensors())
    assert call.meaning() == why
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        F.scaled_dot_product_attention(*call[:4], enable_gqa=call.enable_gqa)


def test_nested_tensors_have_no_meaning():
    nested = torch.nested.nested_tensor([torch.randn(HQ, 3, D), torch.randn(HQ, 5, D)], layout=torch.jagged)
    assert SdpaCall(nested, nested, nested).meaning() == "tensors that are nested or sparse"
