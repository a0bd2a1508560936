"""NaN and Inf in every place that may not be seen, forward and backward.

The oracle sums over sets, so on poisoned inputs it says exactly where the poison may arrive: wherever it is finite
the library must be finite and equal.
"""

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

# The third differs from the second in its sign, and stands in WHERE below, too.
POISON = [math.nan, math.inf, pytest.param(-math.inf, marks=pytest.mark.slow)]
every_poison = pytest.mark.parametrize("bad", POISON, ids=["nan", "+inf", "-inf"])

# (a): places no query of the item may see, and queries that are padded.
PADDED = ("keys_padded", "no_keys_in_one_item", "queries_padded", "cache", "everything")


def hidden_places(problem):
    """bool (B, Lk) of keys no query of the item sees, bool (B, Lq) of rows that see nothing under any head."""
    seen = problem.seen()
    return torch.from_numpy(~seen.any((1, 2))), torch.from_numpy(~seen.any((1, 3)))


def poison(tensor, places, bad):
    """The tensor with `bad` at `places` (B, L) of every head."""
    return torch.where(places[:, None, :, None], torch.tensor(bad, dtype=tensor.dtype), tensor)


def run(problem, tensors, backend, cotangent):
    leaves = problems.leaves(tensors)
    out, lse = problem.ours(leaves, backend)
    cotangents = [cotangent, torch.where(lse == -math.inf, 0.0, torch.ones_like(lse)).detach()]
    return out.detach(), lse.detach(), torch.autograd.grad([out, lse], list(leaves.values()), cotangents)


@every_poison
@looped("name", PADDED)
def test_padding_and_unused_cache_are_never_read(name, bad, backend):
    problem = CASES[name]()
    keys, _ = hidden_places(problem)
    assert keys.any()
    out, lse, gradients = run(problem, problem.tensors, backend, torch.ones(*problem.shape[:3], 7).double())
    dirty = problem.tensors | {n: poison(problem.tensors[n], keys, bad) for n in ("key", "value")}
    got = run(problem, dirty, backend, torch.ones_like(out))
    # never read, so the very same bits
    assert torch.equal(got[0], out) and torch.equal(got[1], lse)
    for one, other in zip(got[2], gradients, strict=True):
        assert torch.equal(one, other)


@every_poison
@looped("name", ["queries_padded", "everything"])
@looped("where", ["query", "upstream", "both"])
def test_padded_queries_and_their_upstream_gradients_are_never_read(name, where, bad, backend):
    problem = CASES[name]()
    _, rows = hidden_places(problem)
    assert rows.any()
    cotangent = torch.randn(*problem.shape[:3], 7, dtype=problems.DTYPE)
    want = run(problem, problem.tensors, backend, cotangent)
    dirty = dict(problem.tensors)
    if where != "upstream":
        dirty["query"] = poison(dirty["query"], rows, bad)
    got = run(problem, dirty, backend, poison(cotangent, rows, bad) if where != "query" else cotangent)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    for one, other in zip(got[2], want[2], strict=True):
        assert torch.equal(one, other)


@every_poison
def test_padded_rows_with_poisoned_lse_cotangent(bad, exact):
    problem = CASES["queries_padded"]()
    _, rows = hidden_places(problem)
    leaves = problems.leaves(problem.tensors)
    lse = problem.ours(leaves, exact)[1]
    clean = torch.where(rows[:, None], 0.0, torch.randn(lse.shape, dtype=problems.DTYPE))
    want = torch.autograd.grad(lse, [leaves["query"], leaves["key"]], clean, retain_graph=True)
    got = torch.autograd.grad(lse, [leaves["query"], leaves["key"]], torch.where(rows[:, None], bad, clean))
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@every_poison
@looped("name", ["tall_causal_has_empty_rows", "no_keys_in_one_item", "boolean_matrix"])
def test_empty_rows_never_pass_poison_on(name, bad, exact):
    problem = CASES[name]()
    _, rows = hidden_places(problem)
    assert rows.any()
    cotangent = torch.randn(*problem.shape[:3], 7, dtype=problems.DTYPE)
    want = run(problem, problem.tensors, exact, cotangent)
    dirty = problem.tensors | {"query": poison(problem.tensors["query"], rows, bad)}
    got = run(problem, dirty, exact, poison(cotangent, rows, bad))
    assert_close(got[0], want[0])
    for one, other in zip(got[2], want[2], strict=True):
        assert_close(one, other, terms=256)


PAIRWISE = (
    "square_causal",
    "wide_causal",
    "tall_causal_has_empty_rows",
    "causal_placed_per_item",
    "window",
    "keys_padded",
    "causal_documents",
    "boolean_matrix",
    "boolean_per_item_and_head",
    "window_or_first_key",
    "bias_with_hidden_pairs",
    "alibi",
    "relative_backwards",
    "sink_with_empty_rows",
    "everything",
    "plain",
)


WHERE = [(("key",), math.nan), (("key",), math.inf), (("value",), -math.inf), (("key", "value"), math.nan)]


def dirty(problem, where, bad):
    places = torch.zeros(2, problem.shape[3], dtype=torch.bool)
    places[0, 8], places[1, 12], places[1, 3] = True, True, True
    return problems.leaves(problem.tensors | {n: poison(problem.tensors[n], places, bad) for n in where})


def drawn_like(results, dtype):
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(x.shape, dtype=dtype, generator=draw) for x in results]


@functools.cache
def reached(name, where, dtype):
    """The oracle's results and gradients with NaN in the places: it marks everything that poison may reach."""
    assert dtype == problems.DTYPE
    problem = CASES[name]()
    leaves = dirty(problem, where, math.nan)
    found = problem.truth(leaves)[:2]
    return [x.detach() for x in found], problems.pull(found, leaves, drawn_like(found, dtype))


@functools.cache
def poisoned_results(name, where, bad, dtype):
    """The oracle's results with `bad` in the places."""
    assert dtype == problems.DTYPE
    problem = CASES[name]()
    with torch.no_grad():
        return problem.truth(dirty(problem, where, bad))[:2]


@pytest.mark.parametrize(("where", "bad"), WHERE, ids=str)
@looped("name", PAIRWISE)
def test_poison_in_a_key_reaches_only_those_who_see_it(name, where, bad, exact):
    problem = CASES[name]()
    ours = dirty(problem, where, bad)
    got, (want, expected) = problem.ours(ours, exact), reached(name, where, problems.DTYPE)
    truth = want if math.isnan(bad) else poisoned_results(name, where, bad, problems.DTYPE)
    for one, other, same in zip(got, want, truth, strict=True):
        assert_close_unless_nan(one.detach(), other)
        assert not one[same.isnan()].isfinite().any(), "poison was seen and hidden"
    found = problems.pull(got, ours, drawn_like(got, problems.DTYPE))
    for one, other in zip(found, expected, strict=True):
        assert_close_unless_nan(one, other)


def assert_close_unless_nan(got, want):
    reached = want.isnan()
    assert_close(torch.where(reached, 0.0, got), torch.where(reached, 0.0, want), terms=256)


@every_poison
@looped("name", ["square_causal", "window", "causal_documents", "alibi", "sink_with_empty_rows"])
def test_poisoned_future_and_a_loss_on_the_past(name, bad, exact):
    # What a user does: a loss over early queries only, garbage in late keys and values.
    problem = CASES[name]()
    places = torch.zeros(2, problem.shape[3], dtype=torch.bool)
    places[:, -2:] = True
    unaware = torch.from_numpy(~problem.seen()[:, 0][:, :, -2:].any(-1))[0]
    clean, dirty = (
        problems.leaves(problem.tensors),
        problems.leaves(problem.tensors | {n: poison(problem.tensors[n], places, bad) for n in ("key", "value")}),
    )
    want, got = problem.out(clean, exact)[:, :, unaware], problem.out(dirty, exact)[:, :, unaware]
    assert_close(got, want)
    one = torch.autograd.grad(got.sum(), [dirty["query"]])[0][:, :, unaware]
    assert_close(one, torch.autograd.grad(want.sum(), [clean["query"]])[0][:, :, unaware])


@every_poison
def test_poison_and_second_derivatives(bad, exact):
    problem = CASES["keys_padded"]()
    keys, _ = hidden_places(problem)
    found = []
    for tensors in (
        problem.tensors,
        problem.tensors | {n: poison(problem.tensors[n], keys, bad) for n in ("key", "value")},
    ):
        leaves = problems.leaves(tensors)
        first = torch.autograd.grad(problem.out(leaves, exact).sin().sum(), list(leaves.values()), create_graph=True)
        found.append(torch.autograd.grad(sum(g.sin().sum() for g in first), list(leaves.values())))
    for want, got in zip(*found, strict=True):
        assert_close(got, want)


@every_poison
@looped("name", ["keys_padded", "square_causal"])
def test_poison_and_forward_mode(name, bad, differentiable):
    problem = CASES[name]()
    keys, _ = hidden_places(problem)
    rows = torch.ones(problem.shape[2], dtype=torch.bool)
    if name == "square_causal":
        keys, rows[-2:] = torch.arange(13).expand(2, 13) >= 11, False
    tangents = {k: torch.randn_like(t) for k, t in problem.tensors.items()}

    def push(tensors, tangents):
        return torch.func.jvp(lambda t: problem.ours(t, differentiable), (tensors,), (tangents,))

    want = push(problem.tensors, tangents)
    dirty, pushing = dict(problem.tensors), dict(tangents)
    for name in ("key", "value"):
        dirty[name], pushing[name] = poison(dirty[name], keys, bad), poison(tangents[name], keys, bad)
    got = push(dirty, pushing)
    for one, other in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert_close(one[:, :, rows], other[:, :, rows])


@every_poison
@looped("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poison_in_other_dtypes(dtype, bad, backend):
    problem = CASES["cache"]()
    named = {name: tensor.to(dtype) for name, tensor in problem.tensors.items()}
    keys, _ = hidden_places(problem)
    want = run(problem, named, backend, torch.ones(*problem.shape[:3], 7, dtype=dtype))
    dirty = named | {n: poison(named[n], keys, bad) for n in ("key", "value")}
    got = run(problem, dirty, backend, torch.ones_like(want[0]))
    for one, other in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True):
        assert torch.equal(one, other)


@every_poison
def test_poison_beyond_one_real_tile(bad, real_tiles):
    # causal at 521 x 541 with a poisoned key in the middle: whole tiles before it, through it and after it
    named = problems.tensors(batch=1, heads=1, kv_heads=1, rows=521, keys=541, width=3, value_width=2)
    problem = problems.Problem(named, oracle.causal(521, 541), saccade.Causal())
    places = (torch.arange(541) == 300)[None]
    want = problem.truth()
    dirty = named | {n: poison(named[n], places, bad) for n in ("key", "value")}
    leaves = problems.leaves(dirty)
    out, lse = problem.ours(leaves, real_tiles)
    unaware = torch.arange(521) + 20 < 300
    assert_close(out[:, :, unaware], want.out[:, :, unaware], terms=541)
    assert_close(lse[:, :, unaware], want.lse[:, :, unaware], terms=541)
    assert not out[:, :, ~unaware].isfinite().any()
    gradient = torch.autograd.grad(out[:, :, unaware].sum(), [leaves["query"]])[0]
    assert gradient[:, :, unaware].isfinite().all()


@every_poison
def test_sdpa_keeps_or_refuses_padding(bad):
    """(a) binds every backend: what it cannot promise it must refuse."""
    problem = CASES["keys_padded"]()
    keys, _ = hidden_places(problem)
    dirty = problem.tensors | {n: poison(problem.tensors[n], keys, bad) for n in ("key", "value")}
    want = problem.truth()
    bits = torch.from_numpy(np.broadcast_to(problem.see, (2, 1, 11, 13)).copy())
    for mask in (problem.mask, bits):
        problem.mask = mask
        try:
            out = problem.out(dirty, "sdpa")
        except ValueError as refusal:
            assert "sdpa" in str(refusal)
            continue
        assert_close(out, want.out)


@every_poison
def test_attention_weights_of_poisoned_padding(bad):
    problem = CASES["keys_padded"]()
    keys, _ = hidden_places(problem)
    query, key = problem.tensors["query"], poison(problem.tensors["key"], keys, bad)
    want = saccade.attention_weights(query, problem.tensors["key"], problem.mask)
    assert torch.equal(saccade.attention_weights(query, key, problem.mask), want)


@every_poison
def test_attention_weights_of_a_poisoned_future(bad):
    problem = CASES["square_causal"]()
    places = torch.arange(13).expand(2, 13) >= 11
    query, key = problem.tensors["query"], poison(problem.tensors["key"], places, bad)
    got = saccade.attention_weights(query, key, problem.mask)[:, :, :11]
    assert got.isfinite().all() and (got[..., 11:] == 0).all()
    assert_close(got, problem.truth().weights[:, :, :11].to(got.dtype))
