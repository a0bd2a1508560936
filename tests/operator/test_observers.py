"""Observers of a thread are told of each attention call once, with what it was, and nothing else changes."""

from __future__ import annotations

import threading

import pytest
import torch

import saccade
from saccade.operator import _observers


def inputs(*, grad=False, dtype=torch.float32):
    torch.manual_seed(3)
    shapes = (2, 6, 7, 5), (2, 3, 11, 5), (2, 3, 11, 13)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def told(function):
    """(what `function` gives, the calls of which its thread's observer was told)."""
    seen = []
    with _observers.observed_by(seen.append):
        return function(), seen


def test_a_call_is_told_with_everything_it_was():
    query, key, value = inputs()
    mask, bias, sink = saccade.Causal() & saccade.Window(3, 0), saccade.ALiBi(torch.rand(6)), torch.randn(6)
    out, (call,) = told(
        lambda: saccade.attention(query, key, value, mask, bias=bias, scale=0.3, softcap=7.0, sink=sink, dropout=0.25)
    )
    assert torch.equal(call.query, query) and torch.equal(call.key, key) and torch.equal(call.value, value)
    assert (call.mask, call.scale, call.softcap) == (mask, 0.3, 7.0)
    assert torch.equal(call.sink, sink) and call.bias is not None and call.dropout.p == 0.25
    assert call.out is out and call.source == "saccade.attention"


@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
def test_observed_calls_give_the_same_bits_and_gradients(backend):
    def run():
        query, key, value = inputs(grad=True)
        out, lse = saccade.attention_with_lse(query, key, value, saccade.Causal(), backend=backend)
        plain = saccade.attention(query, key, value, saccade.Causal(), backend=backend)
        (out.sum() + lse.sum() + plain.square().sum()).backward()
        return [out, lse, plain, query.grad, key.grad, value.grad]

    watched, calls = told(run)
    assert len(calls) == 2
    for ours, theirs in zip(watched, run(), strict=True):
        assert torch.equal(ours, theirs)


def test_every_observer_is_told_and_none_afterwards():
    inner, outer = [], []
    query, key, value = inputs()
    with _observers.observed_by(outer.append):
        with _observers.observed_by(inner.append):
            saccade.attention(query, key, value)
        saccade.attention(query, key, value)
    saccade.attention(query, key, value)
    assert (len(inner), len(outer)) == (1, 2)


def test_calls_inside_of_another_are_not_told():
    query, key, value = inputs()

    def whole():
        with _observers.aside() as observers:
            saccade.attention(query, key, value)
            assert len(observers) == 1
        saccade.attention(query, key, value)

    _, calls = told(whole)
    assert len(calls) == 1


def test_an_exception_leaves_no_observer_behind():
    query, key, value = inputs()

    def fails(call):
        raise RuntimeError("from the observer")

    with pytest.raises(RuntimeError, match="from the observer"), _observers.observed_by(fails):
        saccade.attention(query, key, value)
    assert _observers.THREAD.observers == ()
    with pytest.raises(ValueError, match="key has width"), _observers.observed_by(fails):
        saccade.attention(query, key[..., :3], value)
    assert _observers.THREAD.observers == ()


def test_other_threads_are_not_observed():
    query, key, value = inputs()

    def elsewhere():
        thread = threading.Thread(target=lambda: saccade.attention(query, key, value))
        thread.start()
        thread.join()

    assert told(elsewhere)[1] == []


@pytest.mark.slow
def test_compiled_code_is_seen_where_it_is_made_to_run_eagerly():
    query, key, value = inputs()
    compiled = torch.compile(lambda: saccade.attention(query, key, value, saccade.Causal()), backend="eager")
    expected = compiled()
    with torch.compiler.set_stance("force_eager"):
        out, calls = told(compiled)
    assert len(calls) == 1
    assert torch.equal(out, expected)
