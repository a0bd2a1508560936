"""Inside `accelerate(model)` attributes of a module change, of whatever kind: outputs follow."""

from __future__ import annotations

import argparse
import copy

import pytest
import torch
from torch import nn

import saccade
from feed_forwards import WIDTH, FeedForward, agree
from saccade.operator._products import dtypes

pytestmark = pytest.mark.skipif(not dtypes(), reason="PyTorch without oneDNN")
HEADS = 6


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Scaled(FeedForward):
    """With settings of its own in all the ways that a module can hold them."""

    shift = 1.0

    def __init__(self):
        super().__init__()
        self.gain, self.table, self.steps = torch.ones(()), {"gain": 1.0}, [1.0]
        self.config = argparse.Namespace(gain=1.0)

    def post(self, y):
        return y

    def forward(self, x):
        y = super().forward(x) * self.gain * self.table["gain"] * self.steps[0] * self.config.gain * self.shift
        return self.post(y + self.bias if hasattr(self, "bias") else y)


OWN = {
    "tensor written to": lambda m: m.gain.fill_(2.0),
    "tensor": lambda m: setattr(m, "gain", torch.tensor(2.0)),
    "dictionary": lambda m: m.table.update(gain=2.0),
    "list": lambda m: m.steps.__setitem__(0, 2.0),
    "configuration": lambda m: setattr(m.config, "gain", 2.0),
    "class default": lambda m: setattr(m, "shift", 2.0),
    "method": lambda m: setattr(m, "post", lambda y: 2 * y),
    "parameter": lambda m: m.register_parameter("bias", nn.Parameter(torch.ones(()))),
    "buffer": lambda m: m.register_buffer("bias", torch.ones(())),
}


@pytest.mark.parametrize("name", OWN)
def test_a_modules_own_attributes_are_all_compared(name):
    torch.manual_seed(0)
    module, x = Scaled().eval(), torch.randn(3, 37, WIDTH)
    if not name.startswith("tensor"):
        module.gain = 1.0
    with torch.no_grad(), saccade.accelerate(module) as run:
        module(x), module(x)
        held = "holds what may change unnoticed (gain: Tensor)" if name.startswith("tensor") else "feed-forward, taken"
        assert held in run.explain()
        OWN[name](module)
        agree(module(x), copy.deepcopy(module).double()(x.double()))


def test_a_norm_given_a_parameter_later():
    norm, x = Norm(), torch.randn(3, 37, WIDTH)
    norm.register_parameter("bias", None)
    model = nn.Sequential(norm)
    with torch.no_grad(), saccade.accelerate(model) as run:
        model(x)
        assert "RMS norm, taken" in run.explain()
        norm.bias = nn.Parameter(torch.ones(WIDTH))
        model(x)
        assert "a part of it was replaced inside the block" in run.explain()


def test_a_module_that_writes_its_attributes_is_left_alone():
    class Counting(FeedForward):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    module, x = Counting().eval(), torch.randn(3, WIDTH)
    with torch.no_grad(), saccade.accelerate(module):
        for _ in range(5):
            module(x)
    assert module.calls == 5


def test_attention_whose_attributes_change():
    attention, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval(), torch.randn(2, 37, WIDTH)
    with torch.no_grad(), saccade.accelerate(attention):
        attention(x, x, x, need_weights=False), attention(x, x, x, need_weights=False)
        attention.add_zero_attn = True
        out = attention(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(out, attention(x, x, x, need_weights=False)[0].detach(), rtol=0, atol=1e-5)
