"""What modules do beside computing: it happens as often, and to the same numbers, as without acceleration."""

from __future__ import annotations

import functools
import random
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from saccade.acceleration import _proof
from saccade.operator._products import dtypes

pytestmark = pytest.mark.skipif(not dtypes(), reason="PyTorch without oneDNN")
CALLS = 0


class Last:
    def __init__(self):
        self.seen = None

    def __call__(self, x):
        self.seen = x.clone()
        return x


class Range(nn.Module):
    """What quantisation observes: of ordinary calls, most do not change it."""

    def __init__(self):
        super().__init__()
        self.high = 1e3

    def forward(self, x):
        self.high = max(self.high, float(x.abs().max()))
        return F.gelu(x)


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("high", torch.zeros(()))

    def forward(self, x):
        self.high.copy_(torch.maximum(self.high, x.abs().max()))
        return x


class Counter:
    def __init__(self):
        self.calls, self.shapes = 0, []

    def __call__(self, x):
        self.calls += 1
        self.shapes.append(tuple(x.shape))
        return x


class OfClass(nn.Module):
    shapes: list = []  # noqa: RUF012

    def forward(self, x):
        self.shapes.append(tuple(x.shape))
        return x


class Drawing(nn.Module):
    """Monte Carlo dropout of so little that it shows in hardly any call."""

    def forward(self, x):
        random.random()
        return F.dropout(x, 1e-9, training=True)


def of_file(x):
    global CALLS
    CALLS += 1
    return x


class FeedForward(nn.Module):
    def __init__(self, act=None, record=None):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(192, 311), act or nn.GELU(), nn.Linear(311, 192)
        self.record = record or (lambda x: x)

    def forward(self, x):
        return self.record(self.down(self.act(self.up(x))))


class Layer(nn.Module):
    def __init__(self, record):
        super().__init__()
        self.projection, self.output, self.record = nn.Linear(192, 576), nn.Linear(192, 192), record

    def forward(self, hidden_states, attention_mask):
        heads = self.projection(self.record(hidden_states)).unflatten(-1, (3, 6, 32)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(*heads, attn_mask=attention_mask)
        return hidden_states + self.output(out.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self, record):
        super().__init__()
        self.layers = nn.ModuleList([Layer(record), Layer(record)])

    def forward(self, x):
        mask = (torch.arange(16) < torch.tensor([[12], [6]]))[:, None, None]
        for layer in self.layers:
            x = layer(x, mask)
        return x


def closure():
    calls = []
    return lambda x: calls.append(tuple(x.shape)) or x, calls


def held(module):
    """What the recorders of a module have recorded."""
    kept = [CALLS, OfClass.shapes, *module.buffers()]
    for part in module.modules():
        record = getattr(part, "record", None)
        for recorder in (part, record):
            kept += [getattr(recorder, name, None) for name in ("seen", "high", "calls", "shapes")]
        kept += [cell.cell_contents for cell in getattr(record, "__closure__", None) or ()]
    return [torch.as_tensor(x, dtype=torch.float64).clone() for x in kept if x is not None]


RECORDERS = {
    "the last input": Last,
    "a range": Range,
    "a range in a buffer": Buffered,
    "a counter and a list": Counter,
    "a list of its class": OfClass,
    "a list around a function": lambda: closure()[0],
    "a number of its file": lambda: of_file,
    "random numbers": Drawing,
}


@pytest.mark.parametrize("make", [lambda record: FeedForward(record=record), Stack], ids=["feed-forward", "layers"])
@pytest.mark.parametrize("name", RECORDERS)
@torch.no_grad()
def test_what_modules_record(name, make, monkeypatch):
    monkeypatch.setattr(_proof, "_MEAN", 1)  # later proofs, too
    recorded = []
    for accelerated in (False, True):
        monkeypatch.setitem(globals(), "CALLS", 0)
        OfClass.shapes.clear()
        torch.manual_seed(0), random.seed(0)
        model = make(RECORDERS[name]()).eval()
        with saccade.accelerate(model if accelerated else None):
            for _ in range(4):
                model(torch.randn(2, 16, 192))
        recorded.append((held(model), torch.get_rng_state(), hash(random.getstate())))
    torch.testing.assert_close(*recorded, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("act", [Range, lambda: nn.Sequential(Range()), OfClass, Drawing])
@torch.no_grad()
def test_activations_are_not_called_by_an_empty_block(act):
    torch.manual_seed(0)
    OfClass.shapes.clear()
    module = FeedForward(act())
    before = held(module), torch.get_rng_state()
    with saccade.accelerate(module):
        pass
    torch.testing.assert_close((held(module), torch.get_rng_state()), before)


@torch.no_grad()
def test_a_module_that_changes_its_argument():
    torch.manual_seed(0)
    scaled = type("Scaling", (FeedForward,), {"forward": lambda self, x: FeedForward.forward(self, x.mul_(2))})()
    with saccade.accelerate(scaled):
        for _ in range(3):
            x = torch.ones(3, 11, 192)
            scaled(x)
            assert bool((x == 2).all())


@torch.no_grad()
def test_a_proof_of_what_has_no_copies():
    torch.manual_seed(0)
    module = FeedForward()
    module.callback = functools.partial(print, threading.Lock())
    x = torch.randn(3, 11, 192)
    with saccade.accelerate(module) as run:
        before = module(x)
        torch.testing.assert_close(module(x), before)
    assert "raises TypeError" in run.explain()
