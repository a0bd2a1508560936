"""Calls that can be compared: random numbers, state, sizes of weights, and what may differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from saccade.support._restored import seeded
from saccade.verification import Reading
from saccade.verification.subject._steady import exact, steady, tolerance, vivid
from saccade.verification.subject._subject import Subject

E = 7
SELF = Reading("self", "BLD", E)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.first, self.last, self.table = nn.Linear(E, E), nn.Linear(E, E), nn.Embedding(11, E)
        self.calls, self.dtype = 0, dtype
        nn.init.normal_(self.first.weight, std=0.001)
        nn.init.zeros_(self.last.weight)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        inner = x if self.dtype is None else x.to(self.dtype)
        out = torch.sin(inner.cumsum(-2)) + torch.rand(1, dtype=inner.dtype)
        return out.to(x.dtype) * self.calls


def test_calls_are_alike_and_leave_nothing() -> None:
    subject = Subject(Model().eval(), SELF)
    inputs = subject.inputs(2, 3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (steady(subject, inputs, seed).out for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert subject.target.calls == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_random_numbers_go_on_after_an_error() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(KeyError), seeded(0, devices=None):
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_are_large_enough_to_see() -> None:
    model = Model()
    large = model.first.bias.data.fill_(3.0).clone()
    vivid(Subject(model, SELF))
    # the estimate of a deviation from 49 numbers is the very number that it was scaled to
    torch.testing.assert_close(model.first.weight.double().std(), torch.tensor(E**-0.5).double())
    torch.testing.assert_close(model.table.weight.double().std(), torch.tensor(1.0).double())
    assert model.last.weight.std() > 0.2
    assert torch.equal(model.first.bias, large)


def test_what_may_differ_follows_the_precision_of_what_is_computed() -> None:
    for dtype, relative in ((None, 1e-6), (torch.float32, 1e-4)):
        subject = exact(Subject(Model(dtype).eval(), SELF))
        inputs = subject.inputs(2, 5)
        assert inputs["x"].dtype == torch.float64
        out = steady(subject, inputs).out
        assert tolerance(subject, inputs, out) == pytest.approx(relative * float(out.abs().max()))


def test_a_target_of_float32_alone_is_called_in_it() -> None:
    class Single(Model):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.eye(E)  # raises with float64

    assert exact(Subject(Single(), SELF)).dtype == torch.float32
