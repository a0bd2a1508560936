"""The native kernels in one compiled graph, with masks from inside and outside, dynamic shapes, and in torch.export."""

from __future__ import annotations

import pytest
import torch

import problems
import saccade
from looped import looped
from problems import CASES, assert_close
from saccade import ALiBi, Causal, Documents, Dropout, Padding, PerHead, RelativeBias, Window
from saccade.operator._backends.native import _operator
from slowly import slow_but


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(problems, "DTYPE", torch.float32)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check(function, *leaves, backend="aot_eager", **options):
    """Output and gradients of one graph are those without a compiler, to the bit."""
    compiled = torch.compile(function, fullgraph=True, backend=backend, **options)
    found = []
    for call in (compiled, function):
        out = call(*leaves)
        draw = torch.Generator().manual_seed(3)
        cotangent = torch.randn(out.shape, generator=draw).to(out.dtype)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, cotangent)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


FIRST = ["wide_causal", "everything"]


@pytest.mark.parametrize("name", [*FIRST, *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n not in FIRST)])
def test_every_case_in_one_graph(name):
    problem = CASES[name]()
    leaves = problems.leaves(problem.tensors)

    def call(*given):
        return problem.out(dict(zip(leaves, given, strict=True)), "auto")

    check(call, *leaves.values())


INSIDE = {
    "window": lambda q, k, v: saccade.attention(q, k, v, Window(3, 1)),
    "intersection": lambda q, k, v: saccade.attention(q, k, v, Causal() & Window(4, 0)),
    "lengths": lambda q, k, v: saccade.attention(q, k, v, Padding((v[:, 0, :, 0] > -1).sum(1))),
    "booleans": lambda q, k, v: saccade.attention(q, k, v, Causal() & Padding(v[:, 0, :, 0] > -1)),
    "placed": lambda q, k, v: saccade.attention(q, k, v, Causal().at(torch.tensor([3, -1])), bias=ALiBi(torch.ones(6))),
    "heads": lambda q, k, v: saccade.attention(q, k, v, PerHead([Causal()] * 3 + [Window(2, 2)] * 3)),
    "a boolean tensor": lambda q, k, v: saccade.attention(q, k, v, torch.ones(11, 13, dtype=torch.bool).tril()),
    "dropout": lambda q, k, v: saccade.attention(q, k, v, dropout=Dropout(0.3, -5)),
    "lse": lambda q, k, v: saccade.attention_with_lse(q, k, v, sink=q.new_ones(6))[1],
    "relative": lambda q, k, v: saccade.attention(q, k, v, bias=RelativeBias(torch.arange(48.0).view(8, 6) / 48)),
}


@pytest.mark.parametrize("name", slow_but(INSIDE, "placed", "dropout"))
def test_masks_made_inside(name):
    check(INSIDE[name], *problems.leaves(problems.tensors()).values())


@pytest.mark.slow
def test_padding_of_other_lengths_runs_the_same_graph():
    query, key, value = problems.tensors().values()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(saccade.attention, fullgraph=True, backend=counter)
    for lengths in ([5, 13], [1, 2], [13, 13]):
        mask = Padding(torch.tensor(lengths))
        assert torch.equal(compiled(query, key, value, mask), saccade.attention(query, key, value, mask))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_dynamic_lengths_run_the_same_graph():
    def call(query, key, value):
        return saccade.attention(query, key, value, Causal())

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    frames = set()
    for rows, keys in ((11, 13), (7, 19), (29, 31)):
        given = problems.tensors(rows=rows, keys=keys).values()
        assert torch.equal(compiled(*given), call(*given))
        frames.add(counter.frame_count)
    assert len(frames) == 1


@pytest.mark.slow
def test_drawn_dropout_in_a_graph():
    query, key, value = (t.requires_grad_() for t in problems.tensors(heads=3).values())
    value = torch.eye(13).expand(2, 3, 13, 13)

    def call():
        return saccade.attention(query, key, value, dropout=0.5)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    first, second = compiled(), compiled()
    assert not torch.equal(first == 0, second == 0)
    share = (torch.stack([first, second]) == 0).float().mean()
    assert abs(share - 0.5) < 5 * (0.25 / first.numel() / 2) ** 0.5
    assert torch.autograd.grad(first.sum(), query)[0].abs().max() > 0


@pytest.mark.slow
def test_inductor():
    documents = Documents(torch.tensor([[0] * 4 + [1] * 9, [5] * 1 + [3] * 12]))
    layer = torch.nn.Linear(24, 24)

    def call(x):
        q, k, v = layer(x).view(2, 13, 3, 8).transpose(1, 2).chunk(3, -3)
        return saccade.attention(q, k, v, Causal() & documents).transpose(1, 2).flatten(2)

    x = torch.randn(2, 13, 24, requires_grad=True)
    compiled = torch.compile(call, fullgraph=True)
    out, want = compiled(x), call(x)
    assert_close(out, want.double())
    found = [torch.autograd.grad(y.sin().sum(), (x, *layer.parameters())) for y in (out, want)]
    for one, other in zip(*found, strict=True):
        assert_close(one, other.double(), terms=256)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(ALiBi.slopes(6))

    def forward(self, query, key, value):
        return saccade.attention(query, key, value, Causal() & Window(5, 0), bias=ALiBi(self.slopes))


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_operator(strict):
    given = tuple(problems.tensors().values())
    program = torch.export.export(Layer(), given, strict=strict)
    assert "saccade.attention" in str(program.graph)
    assert torch.equal(program.module()(*given), Layer()(*given))


def test_a_dispatch_mode_sees_the_operator():
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    query, key, value = problems.tensors().values()
    with Watch():
        out = saccade.attention(query, key, value, Causal())
    assert any("saccade.attention" in name for name in seen)
    assert torch.equal(out, saccade.attention(query, key, value, Causal()))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["wide_causal", "everything", "relative_backwards"], "everything"))
def test_the_operators_schema_and_rules(name):
    """PyTorch's own checks: the schema, the fake rule and the autograd rule, with real and with fake tensors."""
    problem, calls = CASES[name](), []
    leaves = problems.leaves(problem.tensors)

    class Catch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "saccade.attention" in str(function):
                calls.append(args)
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Catch():
        problem.out(leaves, "auto")
    (arguments,) = calls
    arguments = [*leaves_of(arguments, leaves), *arguments[5:]]
    torch.library.opcheck(torch.ops.saccade.attention.default, arguments)


def leaves_of(arguments, leaves):
    known = {leaf.data_ptr(): leaf for leaf in leaves.values()}
    return [x if x is None else known.get(x.data_ptr(), x) for x in arguments[:5]]


@looped("seed", [0, 1, -1, 2**63, 2**64 - 1, 2**64 + 7, -(2**63)])
def test_seeds_pass_through_a_tensor(seed):
    signed = _operator._signed(seed)
    assert signed % 2**64 == seed % 2**64
    assert torch.tensor([signed]).item() == signed
