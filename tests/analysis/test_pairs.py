"""The weights of listed pairs are those of the dense matrix, whatever the call is made of."""

from __future__ import annotations

import pytest
import torch

import saccade
from saccade import ALiBi, Causal, Documents, PerHead, RelativeBias, Window
from saccade.analysis._scores import pair_weights
from saccade.operator._call import ObservedCall

B, HQ, HKV, L, D, DV = 1, 6, 3, 29, 7, 5
PAIRS = 211


def call_of(mask=None, bias=None, softcap=None, sink=None, scale=None, dtype=torch.float64, batch=B):
    q = torch.randn(batch, HQ, L, D, dtype=dtype) * 2
    k, v = torch.randn(batch, HKV, L, D, dtype=dtype), torch.randn(batch, HKV, L, DV, dtype=dtype)
    out = saccade.attention(q, k, v, mask, bias=bias, scale=scale, softcap=softcap, sink=sink)
    return ObservedCall(q, k, v, mask, bias, scale, softcap, sink, out=out, source="test")


def lse_of(call):
    return saccade.attention_with_lse(
        call.query,
        call.key,
        call.value,
        call.mask,
        bias=call.bias,
        scale=call.scale,
        softcap=call.softcap,
        sink=call.sink,
    )[1]


def dense(call):
    return saccade.attention_weights(
        call.query, call.key, call.mask, bias=call.bias, scale=call.scale, softcap=call.softcap, sink=call.sink
    )[0]


def calls():
    torch.manual_seed(0)
    inf = torch.zeros(1, 1, L, L, dtype=torch.float64)
    inf[..., 3::5] = float("-inf")
    yield "plain", call_of()
    yield "causal", call_of(Causal())
    yield "a window", call_of(Causal() & Window(5, 0))
    yield "a tensor as mask", call_of(torch.rand(L, L) > 0.4)
    yield "documents", call_of(Causal() & Documents(torch.arange(L)[None] // 11))
    yield "per head", call_of(PerHead([Causal(), Window(2, 2)] * 3))
    yield "bias", call_of(bias=torch.randn(1, HQ, L, L, dtype=torch.float64))
    yield "a bias of all heads", call_of(bias=torch.randn(L, L, dtype=torch.float64))
    yield "a bias of -inf", call_of(bias=inf)
    yield "ALiBi", call_of(Causal(), bias=ALiBi(ALiBi.slopes(HQ).double()))
    yield "T5", call_of(bias=RelativeBias(torch.randn(8, HQ, dtype=torch.float64)))
    yield "softcap", call_of(softcap=1.5, scale=0.7)
    yield "sink", call_of(Causal(), sink=torch.randn(HQ, dtype=torch.float64))


@pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in calls()])
def test_pairs_are_entries_of_the_matrix(call):
    rows, keys = torch.randint(L, (PAIRS,)), torch.randint(L, (PAIRS,))
    found = pair_weights(call, lse_of(call), rows, keys)
    assert found.shape == (HQ, PAIRS)
    # Sums of 7 products and one exp in float64, of logits below 100.
    torch.testing.assert_close(found, dense(call)[:, rows, keys], rtol=1e-11, atol=1e-13)


def test_pairs_in_several_blocks_are_the_same(monkeypatch):
    call = call_of(Causal())
    rows, keys = torch.randint(L, (PAIRS,)), torch.randint(L, (PAIRS,))
    whole = pair_weights(call, lse_of(call), rows, keys)
    monkeypatch.setattr("saccade.analysis._scores._ENTRIES", HQ * D * 13)
    assert torch.equal(pair_weights(call, lse_of(call), rows, keys), whole)


def test_what_is_not_seen_is_not_read():
    call = call_of(Causal())
    call.key[0, :, 20] = float("nan")
    rows, keys = torch.tensor([5, 19, 5]), torch.tensor([20, 20, 3])
    found = pair_weights(call, lse_of(call), rows, keys)
    assert (found[:, :2] == 0).all()
    assert (found[:, 2] > 0).all()


def test_no_pairs_give_none():
    nothing = torch.zeros(0, dtype=torch.int64)
    call = call_of()
    assert pair_weights(call, lse_of(call), nothing, nothing).shape == (HQ, 0)


def test_only_one_text_at_a_time():
    call = call_of(batch=2)
    with pytest.raises(ValueError, match="call: expected one text, got a batch of 2"):
        pair_weights(call, lse_of(call), torch.tensor([0]), torch.tensor([0]))
