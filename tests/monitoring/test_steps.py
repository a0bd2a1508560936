"""Watched steps of decoding: computed natively, told as the modules tell them, and added up many at once."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch

import saccade
from attention_numbers import dense, numbers
from saccade import Padding, Window
from saccade.intervention import Ablate
from saccade.monitoring import Alarms, Thresholds
from saccade.nn import AttentionConfig, BlockConfig, Decoder
from saccade.operator import _observers
from saccade.operator._backends.native import _kernels
from saccade.positions import RotaryConfig
from saccade.see.monitoring import _watch
from slowly import slow_after

pytestmark = pytest.mark.skipif(_kernels.module is None, reason="no native kernels")
STEPS, WIDTH = 37, 30


class Steps:
    """A decoder of three layers, whose second has a window and a sink, and tokens for it."""

    def __init__(self, items=2, unequal=False):
        torch.manual_seed(0)
        plain = AttentionConfig(WIDTH, 6, 2, positions=RotaryConfig(turned=4), softcap=7.0)
        local = AttentionConfig(WIDTH, 6, 3, window=Window(4, 0), sink=True, scale=0.7)
        self.model = Decoder([BlockConfig(one, hidden=23) for one in (plain, local, plain)]).eval()
        for parameter in self.model.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
        self.prompt, self.tokens = torch.randn(items, 5, WIDTH), torch.randn(items, STEPS, WIDTH)
        self.padding = Padding([5] + [3] * (items - 1)) if unequal else None

    def run(self, tokens=None, **options):
        """The output; `hidden_states=[]` has the modules compute the steps."""
        cache, tokens = self.model.cache(), self.tokens if tokens is None else tokens
        with torch.no_grad():
            self.model(self.prompt, padding=self.padding, cache=cache)
            steps = tokens.split(1, 1)
            return torch.cat([self.model(x, cache=cache, **options) for x in steps], 1)


@pytest.fixture
def taken(monkeypatch):
    """The steps that were computed natively."""
    native, found = _kernels.module.step, []

    class Module:
        def __getattr__(self, name):
            return getattr(native_module, name)

        def step(self, *args):
            found.append(args)
            return native(*args)

    native_module = _kernels.module
    monkeypatch.setattr(_kernels, "module", Module())
    return found


def observed(steps, **options):
    calls = []
    with _observers.observed_by(calls.append):
        steps.run(**options)
    return calls[3:]  # those of the prompt are others


@pytest.mark.parametrize("unequal", [False, True])
def test_calls_are_those_of_the_modules(taken, unequal):
    """Of items of equal and unequal length: a wrong mask, a query before its positions, an output of another layer."""
    steps = Steps(unequal=unequal)
    ours = observed(steps)
    assert len(taken) == STEPS
    theirs = observed(steps, hidden_states=[])
    assert len(taken) == STEPS and len(ours) == len(theirs) == 3 * STEPS
    for one, other in zip(ours, theirs, strict=True):
        for name in ("query", "key", "value", "out"):
            got, want = getattr(one, name), getattr(other, name)
            got, want = (x[:, :, : 8 if name in ("key", "value") else None] for x in (got, want))
            assert got.shape == want.shape
            assert torch.allclose(got, want, atol=WIDTH * 2.0**-20 * want.abs().max().item()), name
        assert repr(one.mask) == repr(other.mask) and one.source == other.source
        assert (one.scale, one.softcap, one.sink) == (other.scale, other.softcap, other.sink)
        assert not one.dropout and one.bias is one.real is None


@pytest.mark.parametrize("items", [1, 3])
def test_aggregates_are_those_of_all_steps(taken, items):
    """The oracle is dense float64 over what was observed, whose steps must all be counted once."""
    steps, calls = Steps(items), []
    with saccade.watch(steps.model) as seen, _observers.observed_by(calls.append):
        steps.run()
    assert len(taken) == STEPS and (seen.steps, seen.unobserved) == (STEPS + 1, {})
    assert [site.name for site in seen.calls] == [f"blocks.{n}.attention" for n in range(3)]
    assert [site.layer for site in seen.calls] == [0, 1, 2]
    for layer in (0, 2):
        own = calls[layer::3]
        samples = [numbers(capped(call)) for call in own]
        for head in range(6):
            got = seen.aggregates[f"blocks.{layer}.attention"][head]
            for name in ("entropy", "largest", "distance", "mass.self"):
                values = torch.cat([one[name][head] for one in samples])
                want = values.mean(), values.std(correction=0), values.min(), values.max()
                assert got[name].count == len(values) == items * (5 + STEPS)
                for one, other in zip(
                    (got[name].mean, got[name].spread, got[name].min, got[name].max), want, strict=True
                ):
                    assert abs(one - float(other)) <= 2e-5 * max(1.0, abs(float(other))), name
            norms = torch.stack([call.query[:, head].double().norm(dim=-1).mean() for call in own])
            assert got["query.norm"].count == STEPS + 1 and math.isclose(
                got["query.norm"].max, norms.max(), rel_tol=1e-5
            )
            norms = torch.stack([call.out[:, head].double().norm(dim=-1).mean() for call in own])
            assert math.isclose(got["out.norm"].mean, norms.mean(), rel_tol=1e-5)


def capped(call):
    """Dense weights of a call with a softcap of 7 and no window."""
    query, key = call.query.double(), call.key.double().repeat_interleave(3, 1)
    logits = 7 * (query @ key.mT * query.shape[-1] ** -0.5 / 7).tanh()
    hidden = torch.ones(logits.shape[-2:]).triu(1 + logits.shape[-1] - logits.shape[-2]).bool()
    return dense(query[..., :1] * 0, key[..., :1] * 0, ~hidden, bias=logits)


@pytest.mark.parametrize("items", slow_after(1, [1, 3]))
def test_alarms_are_those_of_one_call_after_another(taken, items):
    """Readings of 5 rows begin and end within what is added up at once; a NaN on the way is found at its step."""
    steps = Steps(items)
    limits = Thresholds(
        rows=5, keys=2, sink=0.2, dead=0.6, uniform=0.8, formed=0.9, logit=0.1, grown=1.01, diverging=6.0
    )
    spoiled = steps.tokens.clone()
    spoiled[0, 20] = torch.nan  # and all later steps of this text with it
    one_by_one = Alarms(limits)
    with (
        saccade.watch(steps.model, alarms=limits) as seen,
        saccade.watch(steps.model, alarms=False, on_record=one_by_one.observe),
    ):
        steps.run(spoiled)
        steps.run()
    assert taken
    kinds = {alarm.kind for alarm in seen.alarms}
    assert "not finite" in kinds and len(kinds) > 3
    names = "kind", "name", "head", "step", "last_step", "count", "over"
    got, want = (
        [[getattr(alarm, name) for name in names] for alarm in alarms] for alarms in (seen.alarms, one_by_one.fired)
    )
    assert got == want


@pytest.mark.slow
def test_what_begins_inside_a_step_or_edits_gets_the_modules(taken):
    """A watch of one layer has its steps begun by a hook that a native step would not call."""
    steps = Steps()
    with saccade.watch(steps.model.blocks[1]) as seen:
        steps.run()
    assert not taken and (seen.steps, len(seen.calls)) == (STEPS + 1, 1)
    plain = steps.run()
    assert len(taken) == STEPS
    with saccade.intervene(steps.model, {0: Ablate(1)}):
        assert not torch.allclose(steps.run(), plain)
    assert len(taken) == STEPS
    with saccade.watch(steps.model, every=5) as seen:
        assert torch.equal(steps.run(), plain)
    assert len(taken) == 2 * STEPS and (seen.steps, seen.observed) == (STEPS + 1, 8)
    with saccade.watch(steps.model) as outer, saccade.watch(steps.model, keep=True) as inner:
        steps.run()
    assert len(taken) == 3 * STEPS
    assert str(outer) == str(inner)
    kept = inner.kept["blocks.2.attention"]
    assert torch.allclose(kept.out, saccade.attention(kept.query, kept.key, kept.value, softcap=7.0), atol=1e-5)


@pytest.mark.slow
def test_another_thread_reads_a_watch_that_runs(monkeypatch):
    """Two threads never add up at once: numbers would be lost or counted twice."""
    steps, inside, most = Steps(), [], []
    real = _watch.steps_together

    def slow(waiting):
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.002)
        inside.pop()
        return real(waiting)

    monkeypatch.setattr(_watch, "steps_together", slow)
    monkeypatch.setattr(_watch, "_TOGETHER", 5)
    with saccade.watch(steps.model) as watch:
        over = threading.Event()
        reading = threading.Thread(target=lambda: [watch.aggregates for _ in iter(over.is_set, True)])
        reading.start()
        steps.run()
        over.set()
        reading.join()
    assert max(most) == 1
    counts = {one.count for heads in watch.aggregates.values() for one in (heads[0]["entropy"],)}
    assert counts == {2 * (5 + STEPS)}
