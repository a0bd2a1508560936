"""First and second derivatives against finite differences, backwards and forwards."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.autograd.forward_ad as fwd

import oracle
import problems
import saccade
from looped import looped
from problems import CASES, assert_close

# Cases small enough to differentiate twice by finite differences, of every kind of input there is.
SMALL = {"batch": 2, "heads": 2, "kv_heads": 1, "rows": 3, "keys": 5, "width": 2, "value_width": 3}


def small(kind: str) -> problems.Problem:
    named = problems.tensors(**SMALL)
    draw = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    causal = {"see": oracle.causal(3, 5), "mask": saccade.Causal()}
    padding = saccade.Padding(torch.tensor([5, 0]))
    return {
        "plain": lambda: problems.Problem(named),
        "causal softcap": lambda: problems.Problem(named, **causal, options={"softcap": 1.1, "scale": 0.6}),
        "bias": lambda: problems.Problem(named | {"bias": normal(1, 2, 3, 5)}, **causal),
        "slopes": lambda: problems.Problem(
            named | {"slopes": normal(2)}, **causal, to_bias=lambda t: saccade.ALiBi(t["slopes"])
        ),
        "table": lambda: problems.Problem(
            named | {"table": normal(4, 2)}, to_bias=lambda t: saccade.RelativeBias(t["table"], max_distance=5)
        ),
        "sink and empty rows": lambda: problems.Problem(named | {"sink": normal(2)}, mask=padding),
        "padding": lambda: problems.Problem(named, mask=saccade.Padding(torch.tensor([3, 5]), torch.tensor([3, 2]))),
    }[kind]()


KINDS = ("plain", "causal softcap", "bias", "slopes", "table", "sink and empty rows", "padding")
every_kind = looped("kind", KINDS)


def results(problem, backend):
    """Both results as functions of the leaves alone; an lse of -inf does not depend on them."""

    def call(*given):
        out, lse = problem.ours(dict(zip(problem.tensors, given, strict=True)), backend)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    return call


@every_kind
def test_gradcheck(kind, twice_differentiated):
    problem = small(kind)
    given = list(problems.leaves(problem.tensors).values())
    assert torch.autograd.gradcheck(results(problem, twice_differentiated), given, fast_mode=True)


@pytest.mark.slow
@every_kind
def test_gradgradcheck(kind, differentiable):
    problem = small(kind)
    given = list(problems.leaves(problem.tensors).values())
    assert torch.autograd.gradgradcheck(results(problem, differentiable), given, fast_mode=True)


@every_kind
def test_forward_mode_gradcheck(kind, twice_differentiated):
    problem = small(kind)
    given = list(problems.leaves(problem.tensors).values())
    assert torch.autograd.gradcheck(
        results(problem, twice_differentiated),
        given,
        check_forward_ad=True,
        check_backward_ad=False,
        check_undefined_grad=False,
        fast_mode=True,
    )


@pytest.mark.slow
@every_kind
def test_forward_over_reverse(kind, twice_differentiated):
    problem = small(kind)
    given = list(problems.leaves(problem.tensors).values())
    assert torch.autograd.gradgradcheck(
        results(problem, twice_differentiated),
        given,
        check_fwd_over_rev=True,
        check_rev_over_rev=False,
        check_undefined_grad=False,
        fast_mode=True,
    )


def second(function, problem):
    """Derivatives by the leaves and by the cotangents, of the gradient in a random direction."""
    leaves = problems.leaves(problem.tensors)
    draw = torch.Generator().manual_seed(7)
    out, lse = function(leaves)
    cotangents = [torch.randn(x.shape, dtype=torch.float64, generator=draw).requires_grad_() for x in (out, lse)]
    first = problems.pull((out, lse), leaves, cotangents, create_graph=True)
    directions = [torch.randn(g.shape, dtype=torch.float64, generator=draw) for g in first]
    return problems.pull(first, [*leaves.values(), *cotangents], directions)


@functools.cache
def second_of_oracle(name):
    problem = CASES[name]()
    return second(lambda t: problem.truth(t)[:2], problem)


@pytest.mark.slow
@looped("name", CASES)
def test_second_derivatives_are_the_oracles(name, twice_differentiated):
    problem = CASES[name]()
    found = second(lambda t: problem.ours(t, twice_differentiated), problem)
    for got, want in zip(found, second_of_oracle(name), strict=True):
        assert_close(got, want, terms=512)


def tangents_of(tensors, seed=11):
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, dtype=t.dtype, generator=draw) for name, t in tensors.items()}


@functools.cache
def pulled_by_oracle(name):
    """Cotangents of both results, and what they give for each leaf."""
    problem = CASES[name]()
    leaves = problems.leaves(problem.tensors)
    results, draw = problem.truth(leaves)[:2], torch.Generator().manual_seed(0)
    cotangents = [torch.randn(x.shape, dtype=x.dtype, generator=draw) for x in results]
    return cotangents, problems.pull(results, leaves, cotangents)


@looped("name", CASES)
def test_jvp_is_the_transpose_of_the_oracles_gradient(name, differentiable):
    # <c, J t> = <J^T c, t> for random c and t, with J^T from the oracle.
    problem = CASES[name]()
    tangents = tangents_of(problem.tensors)
    with fwd.dual_level():
        dual = {name: fwd.make_dual(t, tangents[name]) for name, t in problem.tensors.items()}
        pushed = [fwd.unpack_dual(x).tangent for x in problem.ours(dual, differentiable)]
    assert all(x is not None for x in pushed), "forward mode gave no tangent"
    (c_out, c_lse), pulled = pulled_by_oracle(name)
    want = sum((g * t).sum() for g, t in zip(pulled, tangents.values(), strict=True))
    got = (pushed[0] * c_out).sum() + (pushed[1] * c_lse).sum()
    assert_close(got, want, terms=c_out.numel())


@looped("which", ["query", "key", "value", "bias", "sink"])
def test_a_single_dual_input_gives_its_tangent(which, differentiable):
    # one dual input among plain ones is how a forward-mode rule gets lost
    problem = CASES["everything"]()
    tangent = torch.randn_like(problem.tensors[which])
    step = 1e-6

    def moved(sign):
        return problem.ours(problem.tensors | {which: problem.tensors[which] + sign * step * tangent}, differentiable)

    differences = [(a - b) / (2 * step) for a, b in zip(moved(+1), moved(-1), strict=True)]
    with fwd.dual_level():
        dual = problem.tensors | {which: fwd.make_dual(problem.tensors[which], tangent)}
        pushed = [fwd.unpack_dual(x).tangent for x in problem.ours(dual, differentiable)]
    finite = torch.isfinite(differences[1])
    assert differences[0].abs().max() > 1e-3
    # a central difference errs by step^2 in truncation and eps / step in rounding, both under 1e-9 here
    torch.testing.assert_close(pushed[0], differences[0], rtol=0, atol=1e-8)
    if which == "value":  # the log-sum-exp does not depend on it
        assert pushed[1] is None or (pushed[1][finite] == 0).all()
    else:
        torch.testing.assert_close(pushed[1][finite], differences[1][finite], rtol=0, atol=1e-8)
    assert pushed[1] is None or pushed[1].isfinite().all()


@pytest.mark.parametrize("name", ["plain", "square_causal"])
def test_forward_mode_through_sdpa_is_right_or_refused(name):
    problem = CASES[name]()
    tangents = tangents_of(problem.tensors)
    with fwd.dual_level():
        dual = {name: fwd.make_dual(t, tangents[name]) for name, t in problem.tensors.items()}
        want = fwd.unpack_dual(problem.out(dual, "reference")).tangent
        try:
            got = fwd.unpack_dual(problem.out(dual, "sdpa")).tangent
        except (ValueError, NotImplementedError, RuntimeError) as refusal:
            assert str(refusal)
            return
        assert got is not None
        assert_close(got, want)


@looped("wanted", [("query",), ("key",), ("value",), ("query", "value"), ("bias",), ("sink",)])
def test_gradients_of_some_inputs_only(wanted, backend):
    problem = CASES["everything"]()
    some = {name: t.clone().requires_grad_(name in wanted) for name, t in problem.tensors.items()}
    out, lse = problem.ours(some, backend)
    every = problems.leaves(problem.tensors)
    want_out, want_lse = problem.truth(every)[:2]
    ours = (out.sum() + lse[lse > -torch.inf].sum(), [some[name] for name in wanted])
    truth = (want_out.sum() + want_lse[want_lse > -torch.inf].sum(), [every[name] for name in wanted])
    for got, want in zip(torch.autograd.grad(*ours), torch.autograd.grad(*truth), strict=True):
        assert_close(got, want, terms=256)


def test_no_graph_is_made_where_none_is_asked(backend):
    problem = CASES["everything"]()
    assert not problem.out(backend=backend).requires_grad
    with torch.no_grad():
        assert not problem.out(problems.leaves(problem.tensors), backend).requires_grad


def test_inference_mode(backend):
    problem = CASES["everything"]()
    want = problem.truth().out
    with torch.inference_mode():
        assert_close(problem.out(backend=backend), want)


def test_same_tensor_as_query_key_and_value(backend):
    shared = problems.tensors(heads=3, rows=13, width=5, value_width=5)["key"]
    ours, theirs = shared.clone().requires_grad_(), shared.clone().requires_grad_()
    out = saccade.attention(ours, ours, ours, saccade.Causal(), backend=backend)
    want = oracle.attend(theirs, theirs, theirs, oracle.causal(13, 13)).out
    cotangent = torch.randn_like(out)
    assert_close(out, want)
    got = torch.autograd.grad(out, [ours], cotangent)[0]
    assert_close(got, torch.autograd.grad(want, [theirs], cotangent)[0], terms=256)


def test_gradients_accumulate_over_repeated_backward(backend):
    leaves = problems.leaves(CASES["everything"]().tensors)
    out = CASES["everything"]().out(leaves, backend)
    once = torch.autograd.grad(out.sum(), list(leaves.values()), retain_graph=True)
    again = torch.autograd.grad(out.sum(), list(leaves.values()))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
