"""torch.func: grad, vjp, jvp, vmap, jacobians, hessians and their compositions, by `chunked` and by `auto`."""

from __future__ import annotations

import pytest
import torch
from torch import func

import problems
import saccade
from looped import looped
from problems import CASES, assert_close

NAMES = ("plain", "wide_causal", "keys_padded", "alibi", "relative_both_ways", "everything")
every_name = looped("name", NAMES)


def loss_of(problem, backend):
    draw = torch.Generator().manual_seed(13)
    batch, heads, rows, _ = problem.shape
    weight = torch.randn(batch, heads, rows, problem.tensors["value"].shape[-1], dtype=torch.float64, generator=draw)

    def loss(tensors):
        out, lse = problem.ours(tensors, backend)
        return (out * weight).sum() + torch.where(lse == -torch.inf, 0.0, lse).sin().sum()

    def truth(tensors):
        out, lse, _ = problem.truth(tensors)
        return (out * weight).sum() + torch.where(lse == -torch.inf, 0.0, lse).sin().sum()

    return loss, truth


@every_name
def test_grad(name, transformed):
    problem = CASES[name]()
    loss, truth = loss_of(problem, transformed)
    got = func.grad(loss)(problem.tensors)
    leaves = problems.leaves(problem.tensors)
    want = torch.autograd.grad(truth(leaves), list(leaves.values()))
    for one, other in zip(got.values(), want, strict=True):
        assert_close(one, other, terms=256)


@every_name
def test_jvp_agrees_with_vjp(name, transformed):
    problem = CASES[name]()
    loss, _ = loss_of(problem, transformed)
    draw = torch.Generator().manual_seed(17)
    tangents = {k: torch.randn(t.shape, dtype=t.dtype, generator=draw) for k, t in problem.tensors.items()}
    value, pushed = func.jvp(loss, (problem.tensors,), (tangents,))
    same, pull = func.vjp(loss, problem.tensors)
    (pulled,) = pull(torch.ones_like(value))
    want = sum((pulled[k] * tangents[k]).sum() for k in tangents)
    assert_close(value, same)
    assert want.abs() > 1e-3  # a tangent of zero would agree with nothing
    assert_close(pushed, want, terms=4096)


@pytest.mark.slow
@every_name
def test_hessian_vector_products_forward_over_reverse_and_reverse_over_reverse(name, transformed):
    problem = CASES[name]()
    loss, truth = loss_of(problem, transformed)
    draw = torch.Generator().manual_seed(19)
    tangents = {k: torch.randn(t.shape, dtype=t.dtype, generator=draw) for k, t in problem.tensors.items()}
    _, forward = func.jvp(func.grad(loss), (problem.tensors,), (tangents,))

    def directional(tensors):
        gradient = func.grad(loss)(tensors)
        return sum((gradient[k] * tangents[k]).sum() for k in tangents)

    reverse = func.grad(directional)(problem.tensors)
    leaves = problems.leaves(problem.tensors)
    first = torch.autograd.grad(truth(leaves), list(leaves.values()), create_graph=True)
    total = sum((g * tangents[k]).sum() for g, k in zip(first, leaves, strict=True))
    want = torch.autograd.grad(total, list(leaves.values()))
    for one, two, other in zip(forward.values(), reverse.values(), want, strict=True):
        assert_close(one, other, terms=4096)
        assert_close(two, other, terms=4096)


def small(rows=3, keys=5):
    return problems.tensors(batch=1, heads=2, kv_heads=1, rows=rows, keys=keys, width=2, value_width=3)


def test_jacobians_and_hessian(transformed):
    named = small()

    def call(query):
        return saccade.attention(query, named["key"], named["value"], saccade.Causal(), backend=transformed)

    def dense(query):
        logits = query @ named["key"].mT * 2**-0.5
        return torch.softmax(logits.masked_fill(~torch.ones(3, 5).tril(2).bool(), -torch.inf), -1) @ named["value"]

    want = torch.autograd.functional.jacobian(dense, named["query"])
    assert_close(func.jacrev(call)(named["query"]), want)
    assert_close(func.jacfwd(call)(named["query"]), want)
    want = torch.autograd.functional.hessian(lambda q: dense(q).sin().sum(), named["query"])
    assert_close(func.hessian(lambda q: call(q).sin().sum())(named["query"]), want)
    assert_close(func.jacrev(func.jacrev(lambda q: call(q).sin().sum()))(named["query"]), want)


def stacked(problem, count=3):
    """`count` versions of each tensor, in a new leading axis."""
    draw = torch.Generator().manual_seed(23)
    return {
        k: torch.stack([t + 0.1 * torch.randn(t.shape, dtype=t.dtype, generator=draw) for _ in range(count)])
        for k, t in problem.tensors.items()
    }


@every_name
def test_vmap_is_a_loop(name, transformed):
    problem = CASES[name]()
    many = stacked(problem)
    got = func.vmap(lambda tensors: problem.ours(tensors, transformed))(many)
    for n in range(3):
        want = problem.truth({k: t[n] for k, t in many.items()})
        assert_close(got[0][n], want.out)
        assert_close(got[1][n], want.lse)


@looped("which", ["query", "key", "value", "bias", "sink"])
def test_vmap_over_one_input_alone(which, transformed):
    problem = CASES["everything"]()
    many = stacked(problem)[which].movedim(0, -1)
    got = func.vmap(lambda x: problem.out(problem.tensors | {which: x}, transformed), in_dims=-1, out_dims=1)(many)
    for n in range(3):
        assert_close(got[:, n], problem.truth(problem.tensors | {which: many[..., n]}).out)


@every_name
def test_vmap_of_grad_gives_a_gradient_per_sample(name, transformed):
    problem = CASES[name]()
    loss, truth = loss_of(problem, transformed)
    many = stacked(problem)
    got = func.vmap(func.grad(loss))(many)
    for n in range(3):
        leaves = problems.leaves({k: t[n] for k, t in many.items()})
        want = torch.autograd.grad(truth(leaves), list(leaves.values()))
        for one, other in zip(got.values(), want, strict=True):
            assert_close(one[n], other, terms=256)


def test_vmap_of_jvp_and_jvp_of_vmap(transformed):
    problem = CASES["everything"]()
    loss, _ = loss_of(problem, transformed)
    many = stacked(problem)
    directions = {k: torch.randn_like(t) for k, t in many.items()}
    inside = func.vmap(lambda t, d: func.jvp(loss, (t,), (d,))[1])(many, directions)
    outside = func.jvp(func.vmap(loss), (many,), (directions,))[1]
    want = torch.stack(
        [
            func.jvp(loss, ({k: t[n] for k, t in many.items()},), ({k: d[n] for k, d in directions.items()},))[1]
            for n in range(3)
        ]
    )
    assert (want != 0).all()
    assert_close(inside, want, terms=4096)
    assert_close(outside, want, terms=4096)


def test_vmap_inside_autograd(transformed):
    problem = CASES["wide_causal"]()
    ours, theirs = problems.leaves(stacked(problem)), problems.leaves(stacked(problem))
    out = func.vmap(lambda t: problem.out(t, transformed))(ours)
    want = torch.stack([problem.truth({k: t[n] for k, t in theirs.items()}).out for n in range(3)])
    cotangent = torch.randn(out.shape, dtype=out.dtype)
    got = torch.autograd.grad(out, list(ours.values()), cotangent)
    for one, other in zip(got, torch.autograd.grad(want, list(theirs.values()), cotangent), strict=True):
        assert_close(one, other, terms=256)


def test_functional_call_of_a_module_with_grad_and_vmap(transformed):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(6, 18, dtype=torch.float64)
            self.sink = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x):
            query, key, value = self.project(x).unflatten(-1, (3, 2, 3)).permute(1, 2, 0, 3).unsqueeze(1)
            return saccade.attention(query, key, value, saccade.Causal(), sink=self.sink, backend=transformed).sum()

    layer, batch = Layer(), torch.randn(5, 7, 6, dtype=torch.float64)
    parameters = dict(layer.named_parameters())
    per_sample = func.vmap(func.grad(lambda p, x: func.functional_call(layer, p, (x,))), in_dims=(None, 0))
    got = per_sample({k: p.detach() for k, p in parameters.items()}, batch)
    for n in range(5):
        want = torch.autograd.grad(layer(batch[n]), list(parameters.values()))
        for one, other in zip(got.values(), want, strict=True):
            assert_close(one[n], other)


MASKS = {
    "padding": lambda: saccade.Padding([3, 5], queries=[5, 2]),
    "marked padding": lambda: saccade.Padding([[True, False, True, True, False], [True] * 5]),
    "documents": lambda: saccade.Causal() & saccade.Documents([0, 0, 1, 1, 1]),
    "cumulative": lambda: saccade.Documents.from_cu_seqlens(torch.tensor([0, 2, 5])),
    "placed": lambda: saccade.Causal().at([1, 0]),
    "prefix and global": lambda: saccade.Prefix([2, 4]) | saccade.Global([3]),
    "edges": lambda: saccade.Edges([0, 2, 4], [1, 0, 4]) | saccade.Window(0, 0),
    "blocks": lambda: saccade.Blocks([[True, False], [True, True]], 3),
    "tensor": lambda: saccade.FromTensor(torch.ones(5, 5, dtype=torch.bool).tril(1)),
    "heads": lambda: saccade.PerHead([saccade.Causal(), saccade.Padding([3, 5])]),
}


@pytest.mark.slow
@pytest.mark.parametrize("build", MASKS.values(), ids=MASKS)
def test_masks_built_inside_of_transforms(build):
    """The same as the mask built before, bit for bit."""
    query, key, value, tangent = torch.randn(4, 2, 2, 5, 3, dtype=torch.float64)
    many, mask = torch.stack([query, tangent]), build()

    def call(query, mask=None):
        return saccade.attention(query, key, value, build() if mask is None else mask).square().sum((1, 2, 3))

    def total(query, mask=None):
        return call(query, mask).sum()

    for transformed in (
        lambda *m: func.grad(lambda q: total(q, *m))(query),
        lambda *m: func.vmap(func.grad(lambda q: total(q, *m)))(many),
        lambda *m: func.jvp(lambda q: call(q, *m), (query,), (tangent,))[1],
        lambda *m: func.jacrev(lambda q: call(q, *m))(query),
        lambda *m: func.jvp(func.grad(lambda q: total(q, *m)), (query,), (tangent,))[1],
    ):
        inside = transformed()
        assert inside.abs().max() > 0
        assert torch.equal(inside, transformed(mask))


def test_vmap_over_boolean_masks(differentiable):
    query, key, value = torch.randn(3, 2, 3, 5, 16, dtype=torch.float64)
    bits = torch.rand(7, 5, 5) < 0.6
    got = func.vmap(lambda m: saccade.attention(query, key, value, m, backend=differentiable))(bits)
    for one, mask in zip(got, bits, strict=True):
        assert_close(one, saccade.attention(query, key, value, mask, backend="reference"))
