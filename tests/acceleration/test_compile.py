"""torch.compile with fullgraph: the switch is seen when flipped, and calls are counted while it traces.

B batch, H heads, L length, D width.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter

import saccade
from saccade.acceleration._answers import _WEIGHTS
from slowly import slow_but

pytestmark = pytest.mark.usefixtures("every_size")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """Self-attention and a multilayer perceptron."""

    def __init__(self, width=12, heads=3):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask=None, causal=False):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2).flatten(2)
        )


def close(one, other):
    # Two orders of the same float32 sums, of a few dozen terms of size 1.
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_flipping_the_switch_is_seen_and_compiles_once_each():
    counter = CompileCounter()
    layer, x = Layer(), torch.randn(2, 5, 12)
    compiled, expected = torch.compile(layer, fullgraph=True, backend=counter), layer(x)
    plain = compiled(x)
    for _ in range(10):
        with saccade.accelerate() as run:
            close(compiled(x), expected)
        assert torch.equal(compiled(x), plain)
    assert counter.frame_count == 2
    assert run.calls == 0  # the last time nothing was traced


@pytest.mark.slow
def test_calls_are_counted_where_they_are_traced():
    layer, x = nn.ModuleList([Layer(), Layer()]), torch.randn(2, 5, 12)

    @torch.compile(fullgraph=True, backend="eager")
    def model(x):
        for part in layer:
            x = part(x)
        return F.scaled_dot_product_attention(x.double()[None], x.double()[None], x.double()[None])

    with saccade.accelerate() as run:
        for _ in range(3):
            model(x)
        assert (run.taken, run.calls, run.traced) == (2, 3, 3)
        layer[0](x)
    assert (run.taken, run.calls, run.traced) == (3, 4, 3)
    assert "3  of these seen while torch.compile traced; its graphs run uncounted" in str(run)


@pytest.mark.parametrize("masked", [False, True])
def test_the_operator_is_in_the_graph_with_gradients(masked):
    graphs = []

    def keep(graph, example):
        graphs.append(graph.graph)
        return graph.forward

    layer, x = Layer(), torch.randn(2, 5, 12)
    mask = torch.rand(2, 1, 5, 5) < 0.7 if masked else None
    expected = layer(x, mask)
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    with saccade.accelerate() as run:
        out = torch.compile(layer, fullgraph=True, backend=keep)(x, mask)
        out.square().sum().backward()
    assert run.taken == run.traced == 1
    names = [str(node.target) for graph in graphs for node in graph.nodes]
    assert any("saccade" in name for name in names) and not any("scaled_dot" in name for name in names)
    close(out, expected)
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        close(parameter.grad, gradient)


def test_a_compiled_mask_is_read_anew_each_time():
    layer, x, mask = Layer(), torch.randn(2, 5, 12), torch.rand(2, 1, 5, 5) < 0.7
    with saccade.accelerate():
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        close(compiled(x, mask), layer(x, mask))
        mask.logical_not_()
        close(compiled(x, mask), layer(x, mask))


@pytest.mark.slow
def test_lengths_may_change():
    layer = Layer()
    with saccade.accelerate():
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
        for length in (5, 7, 11):
            x = torch.randn(2, length, 12)
            close(compiled(x, causal=True), layer(x, causal=True))


def test_export():
    layer, x = Layer().eval(), torch.randn(2, 5, 12)
    with saccade.accelerate() as run:
        program = torch.export.export(layer, (x,))
    assert run.taken == 1
    assert any("saccade" in str(node.target) for node in program.graph.nodes)
    close(program.module()(x), layer(x))


@pytest.mark.slow
def test_with_inductor():
    layer, x = Layer(), torch.randn(2, 5, 12)
    compiled, expected = torch.compile(layer, fullgraph=True), layer(x)
    with saccade.accelerate() as run:
        close(compiled(x), expected)
    assert run.taken == 1
    close(compiled(x), expected)


@pytest.mark.parametrize("masked", slow_but([False, True], True))
def test_multihead_attention_into_which_the_compiler_does_not_look(masked):
    attention, x = nn.MultiheadAttention(12, 3, batch_first=True), torch.randn(2, 5, 12)
    ignored = torch.arange(5)[None] >= torch.tensor([5, 3])[:, None] if masked else None
    expected, _ = attention(x, x, x, need_weights=False, key_padding_mask=ignored)
    graphs = []

    def keep(graph, example):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    with saccade.accelerate() as run:
        compiled = torch.compile(attention, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
        with torch.no_grad():
            close(compiled(x, x, x, need_weights=False, key_padding_mask=ignored)[0], expected)
    assert run.taken == run.traced == run.calls > 0
    assert any("saccade" in str(node.target) for graph in graphs for node in graph.nodes)


@pytest.mark.slow
def test_compiled_multihead_attention_with_weights_says_so():
    attention, x = nn.MultiheadAttention(12, 3, batch_first=True), torch.randn(2, 5, 12)
    expected = attention(x, x, x)
    with saccade.accelerate() as run:
        close(torch.compile(attention, fullgraph=True, backend="aot_eager")(x, x, x), expected)
    assert run.taken == 0
    assert set(run.left) == {_WEIGHTS}
