"""Outputs, log-sum-exps and gradients of every case of problems.py, on every backend, against the oracle."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

import oracle
import problems
import saccade
from looped import looped
from problems import CASES, assert_close
from saccade.operator._backends.native import _kernels

every_case = looped("name", CASES)


@functools.cache
def truth(name, dtype):
    """Of a case stated in `dtype`: the oracle's results, their gradients, and the gradients of the output alone."""
    assert dtype == problems.DTYPE
    problem = CASES[name]()
    leaves = problems.leaves(problem.tensors)
    found = problem.truth(leaves)
    of_both = gradients(found.out, found.lse, leaves, retain_graph=True)
    return (found.out.detach(), found.lse.detach()), of_both, gradients_of_out(found.out, leaves)


@every_case
def test_output_and_lse(name, backend):
    problem = CASES[name]()
    out, lse = problem.ours(backend=backend)
    want_out, want_lse = truth(name, problems.DTYPE)[0]
    assert out.dtype == lse.dtype == problems.DTYPE
    assert_close(out, want_out)
    assert_close(lse, want_lse)
    assert_close(problem.out(backend=backend), want_out)


def gradients(out, lse, leaves, seed=3, **options):
    """Of random cotangents on both results; they are random on empty rows too, where they must not matter."""
    draw = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(x.shape, dtype=problems.DTYPE, generator=draw) for x in (out, lse)]
    return dict(zip(leaves, problems.pull((out, lse), leaves, cotangents, **options), strict=True))


def gradients_of_out(out, leaves):
    """Of a random cotangent of stride 2: nothing asks for contiguous ones."""
    cotangent = torch.randn(*out.shape, 2, dtype=problems.DTYPE, generator=torch.Generator().manual_seed(0))[..., 0]
    return torch.autograd.grad(out, list(leaves.values()), cotangent)


@every_case
def test_gradient_of_every_input(name, backend):
    problem = CASES[name]()
    ours = problems.leaves(problem.tensors)
    got, want = gradients(*problem.ours(ours, backend), ours), truth(name, problems.DTYPE)[1]
    for leaf in want:
        assert_close(got[leaf], want[leaf], terms=256)


@every_case
def test_gradient_without_lse(name, backend):
    problem = CASES[name]()
    ours = problems.leaves(problem.tensors)
    got, want = gradients_of_out(problem.out(ours, backend), ours), truth(name, problems.DTYPE)[2]
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, terms=256)


SAME = [(torch.float64, "chunked"), (torch.float32, "chunked" if _kernels.module is None else "native")]


@pytest.mark.parametrize(("dtype", "same"), SAME)
@every_case
def test_auto_is_another_to_the_bit(name, dtype, same, monkeypatch):
    # Therefore only one of the two is asked in the tests of every backend.
    monkeypatch.setattr(problems, "DTYPE", dtype)
    found = []
    for backend in ("auto", same):
        problem = CASES[name]()
        leaves = problems.leaves(problem.tensors)
        out, lse = problem.ours(leaves, backend)
        found.append([out, lse, problem.out(leaves, backend), *gradients(out, lse, leaves).values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("layout", ["expanded scalar", "expanded heads", "transposed"])
def test_any_upstream_gradient_layout(layout, backend):
    problem = CASES["everything"]()
    ours, theirs = problems.leaves(problem.tensors), problems.leaves(problem.tensors)
    out, want_out = problem.out(ours, backend), problem.truth(theirs).out
    b, h, r, w = out.shape
    cotangent = {
        "expanded scalar": lambda: torch.ones((), dtype=problems.DTYPE).expand(out.shape),
        "expanded heads": lambda: torch.randn(b, 1, r, w, dtype=problems.DTYPE).expand(out.shape),
        "transposed": lambda: torch.randn(w, r, h, b, dtype=problems.DTYPE).permute(3, 2, 1, 0),
    }[layout]()
    got = torch.autograd.grad(out, list(ours.values()), cotangent)
    want = torch.autograd.grad(want_out, list(theirs.values()), cotangent)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, terms=256)


def test_many_tiles_at_their_real_size():
    # 521 x 541: more than one tile of any plausible size each way, with ragged last ones.
    tensors = problems.tensors(batch=1, heads=2, kv_heads=1, rows=521, keys=541, width=7, value_width=3)
    see = oracle.causal(521, 541) & (oracle.window(521, 541, 97, None) | (np.arange(541) < 3))
    mask = saccade.Causal() & (saccade.Window(97, None) | saccade.Padding(torch.tensor([3])))
    problem = problems.Problem(tensors | {"sink": torch.tensor([0.3, -1.1], dtype=problems.DTYPE)}, see, mask)
    ours, theirs = problems.leaves(problem.tensors), problems.leaves(problem.tensors)
    got, want = problem.ours(ours, "chunked"), problem.truth(theirs)
    assert_close(got[0], want.out, terms=541)
    assert_close(got[1], want.lse, terms=541)
    got_gradients, want_gradients = gradients(*got, ours), gradients(*want[:2], theirs)
    for leaf in want_gradients:
        assert_close(got_gradients[leaf], want_gradients[leaf], terms=541)


@looped("name", ["tall_causal_has_empty_rows", "no_keys_in_one_item", "queries_padded"])
def test_empty_rows_are_zero_exactly(name, backend):
    problem = CASES[name]()
    empty = torch.from_numpy(~problem.seen().any(-1))
    assert empty.any()
    ours = problems.leaves(problem.tensors)
    out, lse = problem.ours(ours, backend)
    assert (out[empty] == 0).all() and (lse[empty] == -math.inf).all()
    found = gradients(out, lse, ours)
    assert (found["query"][empty] == 0).all()
    assert all(g.isfinite().all() for g in found.values())


def test_only_the_lse_cotangent_of_an_empty_row_reaches_the_sink(exact):
    problem = CASES["sink_with_empty_rows"]()
    ours = problems.leaves(problem.tensors)
    out, lse = problem.ours(ours, exact)
    assert (out[:, :, :4] == 0).all()
    assert torch.equal(lse[:, :, :4], ours["sink"].detach()[None, :, None].expand(2, 6, 4))
    one = torch.ones((), dtype=problems.DTYPE)
    assert all((g == 0).all() for g in problems.pull([out[:, :, :4].sum()], ours, [one], retain_graph=True))
    by_lse = dict(zip(ours, problems.pull([lse[:, :, :4].sum()], ours, [one]), strict=True))
    # d lse / d sink = 1 for each of 2 items x 4 empty rows; nothing else moves.
    assert torch.equal(by_lse.pop("sink"), torch.full((6,), 8.0, dtype=problems.DTYPE))
    assert all((g == 0).all() for g in by_lse.values())


def test_lowest_finite_bias_is_a_number_like_any_other(exact):
    problem = CASES["bias_matrix"]()
    lowest = torch.finfo(torch.float32).min
    bias = torch.zeros(11, 13)
    bias[4] = lowest  # the same for all keys of the row: they share alike, they are not masked
    bias[5, :7] = lowest
    named = {name: tensor.float() for name, tensor in problem.tensors.items()} | {"bias": bias}
    out, lse = problem.ours(named, exact)
    assert_close(out, problem.truth(named).out)
    assert_close(lse, problem.truth(named).lse, size=abs(lowest))
    average = named["value"].mean(2).repeat_interleave(2, 1)
    assert_close(out[:, :, 4], average.double())


@looped("bad", [math.nan, math.inf])
def test_bad_bias_propagates_to_its_row_only(bad, exact):
    problem = CASES["bias_matrix"]()
    clean, _ = problem.ours(backend=exact)
    problem.tensors["bias"][3, 5] = bad
    out, lse = problem.ours(backend=exact)
    others = [i for i in range(11) if i != 3]
    assert out[:, :, 3].isnan().all() and not lse[:, :, 3].isfinite().any()
    assert_close(out[:, :, others], clean[:, :, others])


def test_bias_at_minus_infinity_masks_in_value_and_gradient(backend):
    problem = CASES["bias_with_hidden_pairs"]()
    ours = problems.leaves(problem.tensors)
    out, lse = problem.ours(ours, backend)
    hidden = ours["bias"] == -math.inf
    found = gradients(out, lse, ours)["bias"]
    assert (found[hidden] == 0).all() and (found[~hidden] != 0).any()
    assert (out[1, :, 6] == 0).all() and (lse[1, :, 6] == -math.inf).all()


def test_logits_too_large_to_exponentiate(backend):
    named = problems.tensors()
    named["query"] = named["query"] * 1e4
    problem = problems.Problem(named)
    out, lse = problem.ours(backend=backend)
    want = problem.truth()
    # a logit is a sum of 5 products of size up to 1e5: its rounding moves weights by as much, relatively
    assert_close(out, want.out, size=want.lse.abs().max().item())
    assert_close(lse, want.lse)
