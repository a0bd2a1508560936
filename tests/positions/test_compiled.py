"""Positions under torch.compile: one graph, and no new one for each length or offset."""

from __future__ import annotations

import pytest
import torch

from saccade.positions import Learned, Rotary, Sinusoidal, YaRNScaling
from slowly import alternate, slow_but

MODULES = {
    "rotary": lambda: Rotary(6),
    "rotary, yarn": lambda: Rotary(6, layout="interleaved", turned=4, scaling=YaRNScaling(4.0, 41)),
    "sinusoidal": lambda: Sinusoidal(6),
    "learned": lambda: Learned(97, 6),
}
OFFSETS = {
    "int": lambda batch, length: 3 * length + 2,
    "items": lambda batch, length: torch.randint(0, 70, (batch,)),
    "tokens": lambda batch, length: torch.randint(0, 97, (batch, length)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), alternate([*MODULES], ["int", "items", "tokens"]))
def test_one_graph_serves_every_length_and_offset(name, kind):
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    module, counter = MODULES[name](), CompileCounter()
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    graphs = []
    for length in (7, 11, 13, 5, 23, 17, 2):
        x = torch.randn(3, 2, length, 6) if name.startswith("rotary") else torch.randn(3, length, 6)
        offset = OFFSETS[kind](3, length)
        eps = torch.finfo(torch.float32).eps  # tables and angles by themselves: the same numbers, rounded alike
        torch.testing.assert_close(compiled(x, offset), module(x, offset), rtol=eps, atol=eps)
        graphs.append(counter.frame_count)
    # The first length, then any length.
    assert graphs == [1, 2, 2, 2, 2, 2, 2]


@pytest.mark.slow
def test_decoding_compiles_once_for_all_positions():
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    rotary, counter = Rotary(6), CompileCounter()
    compiled = torch.compile(rotary, backend=counter, fullgraph=True)
    graphs = []
    for position in range(2, 40):
        x = torch.randn(3, 2, 1, 6)
        torch.testing.assert_close(compiled(x, position), rotary(x, position), rtol=1.2e-7, atol=1.2e-7)
        graphs.append(counter.frame_count)
    assert graphs[-1] == graphs[1] <= 2


@pytest.mark.parametrize("name", slow_but(MODULES, "rotary, yarn", "learned"))
def test_gradients_pass_through_the_graph(name):
    torch.compiler.reset()
    module = MODULES[name]().double()
    x = torch.randn((3, 2, 7, 6) if name.startswith("rotary") else (3, 7, 6), dtype=torch.float64, requires_grad=True)
    offset = torch.tensor([0, 5, 71])
    leaves = [x, *module.parameters()]
    out, want = torch.compile(module, backend="aot_eager", fullgraph=True)(x, offset), module(x, offset)
    cotangent = torch.randn_like(want)
    got = torch.autograd.grad(out, leaves, cotangent)
    for one, other in zip(got, torch.autograd.grad(want, leaves, cotangent), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


def test_errors_are_those_without_a_compiler():
    torch.compiler.reset()
    compiled = torch.compile(Learned(11, 6), backend="eager")
    with pytest.raises(ValueError, match="offset: the table has 11 learned positions, 0 to 10, .* 9 to 13"):
        compiled(torch.zeros(3, 5, 6), 9)


@pytest.mark.slow
def test_nothing_traced_is_kept():
    rotary, x = Rotary(6), torch.randn(2, 3, 5, 6)
    exported = torch.export.export(rotary, (x, torch.tensor([3, 9])))
    assert rotary._waves._cos is None
    want = rotary(x, torch.tensor([9, 2]))
    torch.testing.assert_close(exported.module()(x, torch.tensor([9, 2])), want, rtol=1.2e-7, atol=1.2e-7)
    fake = Rotary(6)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert fake(mode.from_tensor(x), 3).shape == x.shape
    torch.testing.assert_close(fake(x, 3), rotary(x, 3), rtol=0, atol=0)
