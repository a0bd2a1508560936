"""`explain` tells what runs and why; a named backend does the call or says why it cannot."""

from __future__ import annotations

import pytest
import torch

import oracle
import problems
import saccade
from looped import looped
from problems import CASES, assert_close

BACKENDS = ("reference", "chunked", "native", "sdpa", "flex")


def explained(problem, tensors=None, **more):
    tensors = problem.tensors if tensors is None else tensors
    return saccade.explain(
        tensors["query"],
        tensors["key"],
        tensors["value"],
        problem.mask,
        bias=problem.to_bias(tensors),
        sink=tensors.get("sink"),
        **problem.options,
        **more,
    )


@looped("name", CASES)
def test_the_plan_is_what_runs(name):
    problem = CASES[name]()
    plan = explained(problem)
    assert plan.backend in BACKENDS
    assert isinstance(plan.reason, str) and plan.reason
    assert plan.backend in str(plan)
    assert torch.equal(problem.out(backend="auto"), problem.out(backend=plan.backend))


@looped("name", CASES)
@looped("backend", BACKENDS)
def test_a_named_backend_does_the_call_or_explains(name, backend):
    problem = CASES[name]()
    try:
        plan = explained(problem, backend=backend)
    except ValueError as refusal:
        assert backend in str(refusal) and len(str(refusal)) > len(backend) + 10
        with pytest.raises(ValueError, match=backend):
            problem.out(backend=backend)
        return
    assert plan.backend == backend
    assert_close(problem.out(backend=backend), problem.truth().out)


@looped("name", CASES)
def test_reference_and_chunked_do_every_call(name):
    for backend in ("reference", "chunked"):
        assert explained(CASES[name](), backend=backend).backend == backend


@looped("name", ["plain", "grouped_heads", "one_kv_head", "square_causal", "bias_matrix"])
def test_sdpa_does_what_it_means(name):
    assert_close(CASES[name]().out(backend="sdpa"), CASES[name]().truth().out)


REFUSED = {"softcap": "softcap", "sink": "sink", "window": "mask", "causal_documents": "mask"}


@looped("name", REFUSED)
def test_sdpa_refuses_and_says_why(name):
    problem = CASES[name]()
    with pytest.raises(ValueError, match=f"(?is)sdpa.*{REFUSED[name]}"):
        problem.out(backend="sdpa")


def test_sdpa_refuses_a_differentiable_lse():
    problem = CASES["plain"]()
    with pytest.raises(ValueError, match="(?is)sdpa.*(lse|log-sum-exp)"):
        problem.ours(problems.leaves(problem.tensors), "sdpa")


@pytest.mark.skipif(problems.CUDA, reason="flex is there on CUDA")
def test_flex_is_refused_without_cuda():
    with pytest.raises(ValueError, match="(?s)flex.*CUDA"):
        CASES["plain"]().out(backend="flex")


@pytest.mark.skipif(not problems.CUDA, reason="flex needs CUDA")
@looped("name", ["square_causal", "window", "causal_documents", "alibi", "softcap"])
def test_flex_on_cuda(name):
    problem = CASES[name]()
    named = {k: t.float().cuda() for k, t in problem.tensors.items()}
    out = problem.out(named, "flex").cpu()
    # TF32 is off by default; float32 sums of 13 terms
    torch.testing.assert_close(out.double(), problem.truth().out, rtol=0, atol=1e-5)


def test_auto_never_picks_what_cannot_reproduce_dropout():
    for dropout in (0.2, saccade.Dropout(0.2, 3)):
        assert explained(CASES["plain"](), dropout=dropout).backend not in ("sdpa", "flex")


def test_tangents_and_transforms_are_seen():
    problem = CASES["plain"]()
    seen = []

    def call(query):
        seen.append(explained(problem, problem.tensors | {"query": query}))
        return query.sum()

    torch.func.grad(call)(problem.tensors["query"])
    torch.func.vmap(call)(problem.tensors["query"][None])
    torch.func.jvp(call, (problem.tensors["query"],), (problem.tensors["query"],))
    assert [plan.backend for plan in seen] == ["chunked"] * 3


def test_detours_of_derivatives_are_told():
    problem = CASES["plain"]()
    plan = explained(problem, problems.leaves(problem.tensors))
    if plan.backend in ("reference", "chunked"):
        pytest.skip("the backend has every derivative itself")
    text = str(plan).lower()
    assert "chunked" in text and any(w in text for w in ("derivative", "forward-mode", "double backward", "second"))


def test_explaining_computes_nothing_and_draws_nothing():
    problem = CASES["everything"]()
    before = torch.get_rng_state()
    broken = {k: torch.full_like(t, torch.nan) for k, t in problem.tensors.items()}
    explained(problem, broken, dropout=0.5)
    assert torch.equal(torch.get_rng_state(), before)
    million = torch.zeros(()).expand(1, 1, 2**20, 8)  # one number; attending would take hours
    assert saccade.explain(million, million, million, saccade.Causal(), softcap=1.0).backend in BACKENDS


def test_rows_without_keys_are_told():
    """Of an inverted mask the shapes are right and the output is finite: only this line says what is wrong."""
    x, triangle = torch.zeros(2, 3, 5, 8), torch.ones(5, 5, dtype=torch.bool).triu(1)
    cases = [
        (triangle, (1, 5)),
        (triangle[None, None].expand(2, 1, 5, 5), (2, 10)),
        (~triangle, (0, 5)),
        (torch.zeros(5, 5, dtype=torch.bool), (5, 5)),
        (saccade.Padding([5, 0]), (5, 10)),
        (saccade.PerHead([saccade.Causal(), ~saccade.Causal(), saccade.Causal()]), (1, 15)),
        (None, (0, 0)),
    ]
    for mask, expected in cases:
        plan = saccade.explain(x, x, x, mask)
        assert plan.empty_rows == expected, mask
        line = (
            f"{expected[0]} of {expected[1]} rows see no key: their output is 0; is the mask inverted (True = attend)?"
        )
        assert (line in str(plan)) == (expected[0] > 0)
    million = torch.zeros(()).expand(1, 1, 2**20, 8)
    assert saccade.explain(million, million, million, ~saccade.Causal()).empty_rows == (0, 0)  # too many to count
    assert saccade.explain(million, million, million, saccade.Padding([0])).empty_rows == (2**20, 2**20)


def test_no_silent_fallback(monkeypatch):
    # what a named backend raises must arrive, not be answered by another
    import saccade.operator._backends.chunked as chunked

    def broken(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(chunked, "run", broken)
    with pytest.raises(RuntimeError, match="on purpose"):
        CASES["plain"]().out(backend="chunked")


@pytest.mark.parametrize("rows", [11, 13, 17])
def test_sdpa_and_causal_lengths_that_differ(rows):
    """F.sdpa is top-left, Saccade bottom-right: sdpa is right or refuses."""
    named = problems.tensors(rows=rows)
    want = oracle.attend(*named.values(), oracle.causal(rows, 13)).out
    for mask in (saccade.Causal(), saccade.Causal().at(0)):
        try:
            got = saccade.attention(*named.values(), mask, backend="sdpa")
        except ValueError as refusal:
            assert "sdpa" in str(refusal)
            continue
        placed = want if mask == saccade.Causal() else oracle.attend(*named.values(), oracle.causal(rows, 13, 0)).out
        assert_close(got, placed)


def test_what_functions_of_masks_became_is_told():
    query = torch.randn(1, 2, 37, 8)
    opaque = saccade.Predicate(lambda b, h, q, k: torch.special.i0(q.double()) > 0)
    near = saccade.Predicate(lambda b, h, q, k: (q >= k) & (q - k <= 5))
    steep = saccade.Predicate(lambda b, h, q, k: 2 * q >= k)
    plan = saccade.explain(query, query, query, (near | steep) & opaque)
    assert plan.predicates[:2] == ("recognised as Window(5, 0)", "a program of 5 nodes")
    assert plan.predicates[2].startswith("called for each pair, as it cannot be traced: torch.") and "i0" in str(plan)
