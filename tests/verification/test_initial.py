"""Initial weights that leave no gradient are named with what they do; usual ones are left alone.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from saccade.verification import Finding, Reading
from saccade.verification.checks import _gradients as gradients
from saccade.verification.checks._gradients_initial import at_the_start
from saccade.verification.subject._subject import Subject

E, H = 33, 3


class Block(nn.Module):
    """Self-attention with weights of these standard deviations; the default of nn.Linear is 0.58 / sqrt(E) = 0.1."""

    def __init__(self, *, query: float | None = None, key: float | None = None, every: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.q, self.k, self.v, self.out = (nn.Linear(E, E) for _ in range(4))
        for layer, std in ((self.q, query), (self.k, key)):
            if std is not None:
                nn.init.normal_(layer.weight, std=std)
                nn.init.zeros_(layer.bias)
        for parameter in self.parameters() if every is not None else ():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=every)

    def logits(self, x: Tensor) -> Tensor:
        q, k = (layer(x).unflatten(-1, (H, -1)).transpose(1, 2) for layer in (self.q, self.k))
        return q @ k.mT / (E // H) ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        v = self.v(x).unflatten(-1, (H, -1)).transpose(1, 2)
        return self.out((self.logits(x).softmax(-1) @ v).transpose(1, 2).flatten(-2))


def subject_of(module: nn.Module) -> Subject:
    return Subject(module.eval(), Reading("self", "BLD", E, heads=H))


def told(module: nn.Module) -> list[Finding]:
    return list(at_the_start(subject_of(module)))


@pytest.mark.parametrize("weights", [{}, {"every": 0.02}, {"every": E**-0.5}, {"query": 0.3, "key": 0.3}], ids=str)
def test_usual_weights_are_left_alone(weights):
    assert told(Block(**weights)) == []


def test_a_softmax_that_is_saturated_from_the_start():
    block = Block(query=1.0, key=1.0)
    (found,) = told(block)
    # q and k have variance E: logits have E * sqrt(D) / sqrt(D) = E
    assert found.evidence["logits_std"] == pytest.approx(E, rel=0.25)
    logits = block.logits(subject_of(block).inputs(2, 7)["x"]).detach()
    assert found.evidence["largest_weight"] == pytest.approx(float(logits.softmax(-1).amax(-1).mean()), abs=1e-5)
    assert "saturated from the start" in found.message and "xavier_uniform_" in found.fix
    assert (found.severity, found.location.code) == ("error", "nn.init.normal_(layer.weight, std=std)")


@pytest.mark.parametrize("side", ["query", "key"])
def test_queries_or_keys_of_zeros(side):
    """They leave 0 at the first step, and some start so on purpose."""
    (found,) = told(Block(**{side: 0.0}))
    assert found.message.startswith("All logits are 0 for random inputs: queries or keys are 0")
    assert found.severity == "warning"


def test_queries_and_keys_of_zeros_never_learn():
    block = Block(query=0.0, key=0.0)
    (found,) = told(block)
    assert "neither has a gradient" in found.message and found.severity == "error"
    block(torch.randn(2, 7, E)).square().sum().backward()
    assert not block.q.weight.grad.any() and not block.k.weight.grad.any()


def test_an_output_that_hardly_depends_on_the_input():
    """Biases of 0.1 and weights of 1e-5: the output is the last bias."""
    block = Block(every=1e-5)
    (found,) = told(block)
    assert found.message.startswith("The output hardly depends on the input")
    assert 0 < found.evidence["relative_change"] < 1e-4
    weight, bias = block.v.weight, block.out.bias
    x = torch.randn(2, 7, E, requires_grad=True)
    block(x).square().sum().backward()
    assert x.grad.abs().max() < 1e-4 * bias.grad.abs().max() and weight.grad.abs().max() < 1e-3 * bias.grad.abs().max()


def test_only_modules_have_a_start():
    reading = Reading("attention", "BHLD", 7, heads=3)
    assert list(at_the_start(Subject(lambda q, k, v: (100 * q @ k.mT).softmax(-1) @ v, reading))) == []


@pytest.mark.parametrize("weights", [{"query": 1.0, "key": 1.0}, {"query": 0.0, "key": 0.0}, {"every": 1e-5}], ids=str)
def test_the_check_of_gradients_tells_it_as_an_error(weights):
    (found,) = gradients.CHECK.run(subject_of(Block(**weights)))
    assert (found.family, found.severity) == ("gradients", "error")
    assert found == told(Block(**weights))[0]
