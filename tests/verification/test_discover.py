"""Functions of many styles are called as they mean to be called, the broken ones too.

A function is read rightly when the output that the reading gives is that of attention written out here.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from saccade.verification import Promise, Undecided
from saccade.verification.subject._reading import Hints
from saccade.verification.subject.discovery._discover import discover


def expected(query, key, value, pairs=None):
    """Attention of (B, H, L, D) with kv heads repeated, in float64."""
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    scores = torch.einsum("bhqd,bhkd->bhqk", query.double(), key.double()) / math.sqrt(query.shape[-1])
    if pairs is not None:
        scores = scores.masked_fill(~pairs, -math.inf)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), value.double()).to(query.dtype)


def plain(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return scores.softmax(-1) @ v


def heads_third(q, k, v):
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def heads_third_by_transposing(query, key, value):
    query, key, value = (one.transpose(1, 2) for one in (query, key, value))
    return plain(query, key, value).transpose(1, 2)


def batched(queries, keys, values):
    return torch.bmm(torch.softmax(torch.bmm(queries, keys.mT) / queries.shape[-1] ** 0.5, -1), values)


def sequence_first(xq, xk, xv):
    scores = torch.einsum("qbd,kbd->bqk", xq, xk) / math.sqrt(xq.shape[-1])
    return torch.einsum("bqk,kbd->qbd", scores.softmax(-1), xv)


def one_sequence(Q, K, V):
    return torch.softmax(Q @ K.T / math.sqrt(K.shape[1]), dim=1) @ V


def one_sequence_of_heads(q, k, v):
    """q, k, v: (heads, length, width)"""
    return torch.bmm(torch.softmax(torch.bmm(q, k.mT) / math.sqrt(q.shape[2]), -1), v)


def grouped(query_states, key_states, value_states):
    groups = query_states.shape[1] // key_states.shape[1]
    return plain(query_states, key_states.repeat_interleave(groups, 1), value_states.repeat_interleave(groups, 1))


def with_a_scale(q, k, v, scale):
    return torch.softmax(q @ k.mT * scale, -1) @ v


def with_everything(q, k, v, attn_mask, dropout_p, is_causal, training):
    return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p if training else 0.0, is_causal)


def as_dict(q, k, v):
    weights = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
    return {"weights": weights, "output": weights @ v}


@dataclass
class Given:
    attentions: torch.Tensor
    out: torch.Tensor


def as_dataclass(q, k, v):
    return Given(**{"attentions": (w := torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)), "out": w @ v})


def weights_first(q, k, v):
    attn = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
    return attn, attn @ v


def asked_for_weights(q, k, v, return_attention=False):
    attn = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
    return (attn @ v, attn) if return_attention else attn @ v


def by_place(q, k, v, /, mask=None):
    return plain(q, k, v, mask)


def by_unknown_names(a, b, c):
    return plain(a, b, c)


def even_widths_only(q, k, v):
    assert q.shape[-1] % 2 == 0
    return plain(q, k, v)


class Callable:
    def __call__(self, q, k, v):
        return plain(q, k, v)

    def method(self, q, k, v):
        return plain(q, k, v)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        return plain(q, k, v)


@pytest.mark.parametrize(
    ("target", "layout"),
    [
        (F.scaled_dot_product_attention, "BHLD"),
        (plain, "BHLD"),
        (heads_third, "BLHD"),
        (heads_third_by_transposing, "BLHD"),
        (batched, "BLD"),
        (sequence_first, "LBD"),
        (one_sequence, "LD"),
        (one_sequence_of_heads, "HLD"),
        (grouped, "BHLD"),
        (with_a_scale, "BHLD"),
        (with_everything, "BHLD"),
        (as_dict, "BHLD"),
        (as_dataclass, "BHLD"),
        (weights_first, "BHLD"),
        (asked_for_weights, "BHLD"),
        (by_place, "BHLD"),
        (by_unknown_names, "BHLD"),
        (even_widths_only, "BHLD"),
        (functools.partial(plain, mask=None), "BHLD"),
        (lambda q, k, v: plain(q, k, v), "BHLD"),
        (Callable(), "BHLD"),
        (Callable().method, "BHLD"),
        (Callable, "BHLD"),
        (Function, "BHLD"),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)[:20]),
)
def test_functions_are_called_in_their_own_layout(target, layout):
    subject = discover(target)
    assert (subject.reading.form, subject.reading.layout) == ("attention", layout)
    inputs = subject.inputs(2, 5, 5)
    torch.testing.assert_close(subject(inputs).out, expected(*inputs.tensors.values()))


@pytest.mark.parametrize("target", [as_dict, as_dataclass, weights_first, asked_for_weights])
def test_weights_are_found_wherever_they_are_returned(target):
    subject = discover(target)
    result = subject(inputs := subject.inputs(2, 5, 7))
    torch.testing.assert_close(result.weights @ inputs["value"], result.out)


def test_key_heads_are_fewer_where_that_is_taken():
    assert discover(grouped).reading.kv_heads == 2
    assert discover(F.scaled_dot_product_attention).reading.kv_heads == 2  # with enable_gqa
    assert discover(plain).reading.kv_heads is None


def test_values_have_a_width_of_their_own_where_that_is_taken():
    assert discover(plain).reading.value_width == 12

    def same_width(q, k, v):
        return (plain(q, k, v) + q * 0).view(q.shape)

    assert discover(same_width).reading.value_width is None


def over_the_batch(q, k, v):
    return torch.softmax(torch.bmm(q, k.mT) / math.sqrt(q.shape[-1]), 0) @ v


def over_the_queries(q, k, v):
    return torch.softmax(torch.bmm(q, k.mT) / math.sqrt(q.shape[-1]), 1) @ v


def batch_items_shared(q, k, v):
    out = plain(q, k, v)
    return out + 0.1 * out.mean(0, keepdim=True)


def over_the_heads(q, k, v):
    """q, k, v: (B, L, H, D)"""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(1), v)


def forgets_to_transpose(q, k, v):
    """Attention over sequences of heads.

    Args:
        q: (batch, seq_len, num_heads, head_dim)
    """
    return plain(q, k, v)


def unpacked_as_meant(query, key, value):
    _batch, _heads, length, _width = query.shape
    return torch.softmax(query @ key.mT / math.sqrt(length), 1) @ value


@pytest.mark.parametrize(
    ("target", "layout"),
    [
        (over_the_batch, "BLD"),
        (over_the_queries, "BLD"),
        (batch_items_shared, "BHLD"),
        (over_the_heads, "BLHD"),
        (forgets_to_transpose, "BLHD"),
        (unpacked_as_meant, "BHLD"),
    ],
)
def test_broken_functions_are_read_as_they_were_meant(target, layout):
    assert discover(target).reading.layout == layout


def test_hints_win():
    assert discover(plain, Hints(layout="BLD")).reading.layout == "BLD"
    reading = discover(plain, Hints(layout="BHLD", embed_dim=24, num_heads=5)).reading
    assert (reading.layout, reading.width, reading.heads) == ("BHLD", 24, 5)


def test_what_must_be_given_and_says_nothing_is_named():
    def odd(q, k, v, frobnication):
        return plain(q, k, v) * frobnication

    with pytest.raises(Undecided, match="'frobnication' must be given and its name does not show what it is") as raised:
        discover(odd)
    assert ("give frobnication in every call", "--arg frobnication=VALUE") in raised.value.candidates
    assert discover(odd, arguments={"frobnication": 1.0}).reading.constants == {"frobnication": 1.0}


def test_no_way_to_call_it_lists_what_was_tried():
    def picky(q, k, v):
        if q.shape[0] != 1000:
            raise ValueError(f"expected a batch of 1000, got shape {list(q.shape)}")
        return q

    with pytest.raises(Undecided, match="no way to call it was found .*expected a batch of 1000") as raised:
        discover(picky)
    assert any("--layout" in option for _, option in raised.value.candidates)


def test_a_causal_flag_is_found():
    assert discover(F.scaled_dot_product_attention).reading.causal_flag == "is_causal"
    assert discover(with_everything).reading.causal_flag == "is_causal"

    def refuses(q, k, v, causal=False):
        if causal:
            raise NotImplementedError
        return plain(q, k, v)

    assert discover(refuses).reading.causal_flag is None


def test_nothing_is_left_behind(recwarn):
    def noisy(q, k, v, mask=None):
        import warnings

        warnings.warn("noise", stacklevel=1)
        torch.rand(3)
        return plain(q, k, v, mask)

    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    discover(noisy)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert not recwarn.list


def test_an_exit_goes_through():
    def leaves(q, k, v):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        discover(leaves)


def test_the_report_says_what_was_assumed():
    assumed = " ".join(discover(plain).reading.assumed)
    assert "(batch, heads, length, width)" in assumed
    assert "mask: True = attend, by what it does" in assumed


def test_adapters_win():
    def odd(packed, which):
        return plain(*packed.unbind(0)), which

    def adapter(target, query, key, value, mask=None):
        return target(torch.stack([query, key, value]), 0)[0]

    subject = discover(odd, how=adapter)
    inputs = subject.inputs(2, 5, 5)
    assert subject.form == "attention"
    torch.testing.assert_close(subject(inputs).out, expected(*inputs.tensors.values()))
    assert [(mask.argument, mask.axes, mask.meaning) for mask in subject.reading.masks] == [("mask", "BHQK", "attend")]


def test_an_adapter_of_unknown_parameters_is_refused():
    with pytest.raises(Undecided, match=r"the adapter takes \(a, b\) after the target, expected \(query, key, value\)"):
        discover(plain, how=lambda target, a, b: None)


def test_promises_say_what_a_mask_means():
    assert discover(plain, promise=Promise(mask="ignore")).reading.masks[0].meaning == "ignore"


@pytest.mark.parametrize(
    "changed", [lambda out: out.to("meta"), lambda out: out.to_sparse(), lambda out: out.numpy(), lambda out: None]
)
def test_what_holds_no_numbers_is_no_output(changed):
    with pytest.raises(Undecided):
        discover(lambda q, k, v: changed(plain(q, k, v)), Hints(), Promise())
