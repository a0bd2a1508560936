"""Copies share nothing with the original, functions that a module keeps included.

Shape legend: x (B, L, E).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.verification import Reading
from saccade.verification.subject._subject import Subject, copied


class MinGPT(nn.Module):
    """Its feed-forward part is a lambda over its own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"up": nn.Linear(5, 7), "down": nn.Linear(7, 5), "drop": nn.Dropout(0.5)})
        m, factor = self.parts, 2.0
        self.mlpf = lambda x, *, times=1: m.drop(m.down(m.up(x).relu())) * factor * times

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlpf(x)


def test_functions_reach_the_parts_of_the_copy() -> None:
    module = MinGPT().eval()
    x = torch.randn(2, 3, 5)
    before = module(x)
    new = copied(module).double()
    with torch.no_grad():
        new.parts.down.weight.zero_()
    torch.testing.assert_close(new(x.double()), x.double() + 2 * new.parts.down.bias)
    assert torch.equal(module(x), before)
    assert torch.equal(new.mlpf(x.double(), times=0), torch.zeros_like(x).double())


def test_the_mode_is_the_copys() -> None:
    """The original stays in train mode, in which its dropout is active."""
    new = copied(MinGPT().train()).eval()
    x = torch.randn(2, 3, 5)
    assert torch.equal(new(x), new(x))
    assert (
        Subject(new, Reading("self", "BLD", 5))
        .to(torch.float64)(Subject(new, Reading("self", "BLD", 5)).inputs(2, 3, dtype=torch.float64))
        .out.dtype
        == torch.float64
    )


def test_what_is_kept_with_a_graph() -> None:
    module = MinGPT()
    module.last = module(torch.randn(2, 3, 5))
    new = copied(module)
    assert not new.last.requires_grad and torch.equal(new.last, module.last)


def test_functions_over_nothing_of_the_module_are_kept() -> None:
    module = MinGPT()
    module.own = torch.tanh
    module.plain = plain = (lambda number: lambda x: x * number)(3)
    new = copied(module)
    assert new.own is torch.tanh and new.plain is plain
