"""Every statistic against dense float64, on every mask, bias, sink, softcap and placement there is a case of."""

from __future__ import annotations

import functools
import math

import torch

import dense_statistics
import problems
import saccade
from looped import looped

# Where rows stand among the keys, for the cases whose mask says so; bottom-right otherwise.
STANDING = {
    "causal_placed_at_zero": 0,
    "causal_placed_per_item": [-3, 5],
    "cache": [2, 9],
    "everything": [1, -2],
}


@functools.cache
def judge_of(name, dtype):
    assert dtype == problems.DTYPE
    return dense_statistics.of_case(problems.CASES[name](), STANDING.get(name))


def draw(name, backend, **more):
    """(statistics, the judge, how far a weight may be off relative to itself, a group of keys (B, Lk))."""
    problem = problems.CASES[name]()
    tensors = problem.tensors
    judge = judge_of(name, problems.DTYPE)
    group = torch.rand(*tensors["key"].shape[::2], generator=torch.Generator().manual_seed(5)) < 0.4
    got = saccade.statistics(
        tensors["query"],
        tensors["key"],
        problem.mask,
        value=tensors["value"],
        bias=problem.to_bias(tensors),
        sink=tensors.get("sink"),
        groups={"some": group},
        backend=backend,
        **problem.options,
        **more,
    )
    off = dense_statistics.bound(judge, tensors["query"], tensors["key"], got.lse.dtype, problem.options.get("scale"))
    return got, judge, off, group


def near(got, want, atol):
    assert got.dtype in (torch.float32, torch.float64)
    torch.testing.assert_close(got.double(), want.expand(got.shape), rtol=0, atol=atol)


@problems.every_case
def test_rows(name, backend):
    got, judge, off, group = draw(name, backend)
    batch, heads, rows, keys = judge.p.shape
    assert got.shape == (batch, heads, rows, keys)
    assert torch.equal(got.counted, judge.counted)
    assert torch.equal(got.lse == -torch.inf, ~judge.counted)
    # the absolute error of lse is the relative one of the sum it is the logarithm of
    near(got.lse.masked_fill(~judge.counted, 0), judge.lse.masked_fill(~judge.counted, 0), off)
    # |d(-p log p)| <= |dp| (|log p| + 1), and sum_j p_ij |log p_ij| = H <= log Lk, or 1/e more with a sink
    near(got.entropy, judge.entropy, off * (math.log(keys) + 2))
    near(got.largest, judge.largest, off)
    near(got.distance, judge.distance, off * (keys + rows + 9))  # 9: how far rows are placed outside
    near(got.mass["self"], judge.beside(0), off)
    near(got.mass["previous"], judge.beside(-1), off)
    near(got.mass["next"], judge.beside(1), off)
    near(got.mass["first"], judge.first, off)
    near(got.mass["sink"], judge.sink, off)
    near(got.mass["some"], judge.on(group[:, None, None]), off)


@problems.every_case
def test_where_the_largest_is(name, backend):
    got, judge, off, _ = draw(name, backend)
    assert got.largest_at.dtype == torch.int64
    assert (got.largest_at[~judge.counted] == -1).all()
    at = got.largest_at.clamp(min=0)[..., None]
    assert judge.seen.gather(-1, at)[..., 0][judge.counted].all()
    near(judge.p.gather(-1, at)[..., 0], judge.largest, off)


@problems.every_case
def test_received(name, backend):
    got, judge, off, _ = draw(name, backend)
    near(got.received, judge.received, off * judge.p.shape[2])
    without = draw(name, backend, received=False)[0]
    assert without.received is None
    assert torch.equal(without.entropy, got.entropy)


@problems.every_case
def test_how_many_keys_a_row_sees(name, backend):
    got, judge, _, _ = draw(name, backend)
    assert got.keys_seen.dtype == torch.int64
    assert torch.equal(got.keys_seen.expand(judge.counted.shape), judge.keys_seen)
    assert got.rows_counted == int(judge.counted.sum())
    assert got.rows_counted + got.rows_empty + got.rows_padded == judge.counted.numel()


@problems.every_case
def test_top_keys(name, backend):
    got, judge, off, _ = draw(name, backend, top=7)
    weights = torch.sort(judge.p, dim=-1, descending=True).values[..., :7]
    near(got.top_weights, torch.nn.functional.pad(weights, (0, 7 - weights.shape[-1])), off)
    named = got.top_keys >= 0
    assert torch.equal(named.sum(-1), judge.keys_seen.clamp(max=7))
    assert (got.top_weights[~named] == 0).all()
    near(judge.p.gather(-1, got.top_keys.clamp(min=0)) * named, got.top_weights.double(), off)
    # each key once
    keys = torch.where(named, got.top_keys, -1 - torch.arange(7)).sort(-1).values
    assert (keys.diff(dim=-1) > 0).all()


@problems.every_case
def test_logits_and_weights_per_head(name, backend):
    got, judge, off, _ = draw(name, backend)
    for h in range(judge.p.shape[1]):
        logits, weights = (x[:, h][judge.seen[:, h]] for x in (judge.logits, judge.p))
        for what, entries in (("logits", logits), ("weights", weights)):
            near(got.heads[what]["min"][h], entries.min(), off)
            near(got.heads[what]["max"][h], entries.max(), off)
    for what in ("logits", "weights"):
        assert (got.heads[what]["nonfinite"] == 0).all()
        assert (got.heads[what]["nonfinite_at"] == -1).all()


@problems.every_case
def test_vectors_per_head(name, backend):
    got, judge, _, _ = draw(name, backend)
    tensors = problems.CASES[name]().tensors
    read = judge.seen.any(2).unflatten(1, (tensors["key"].shape[1], -1)).any(2)  # (B, Hkv, Lk)
    for what, real in (("query", judge.counted), ("key", read), ("value", read)):
        tensor, found = tensors[what], got.heads[what]
        assert set(found) == {"min", "max", "norm", "nonfinite", "nonfinite_at"}
        for h in range(tensor.shape[1]):
            vectors = tensor[:, h][real[:, h]]
            assert (found["min"][h], found["max"][h]) == (vectors.min(), vectors.max())
            # a sum of D squares, then one of the rows
            off = torch.finfo(vectors.dtype).eps * (vectors.shape[1] + len(vectors))
            torch.testing.assert_close(found["norm"][h], vectors.norm(dim=-1).mean(), rtol=2 * off, atol=0)


def test_the_judge_has_the_weights_of_the_oracle():
    for make in problems.CASES.values():
        problem = make()
        torch.testing.assert_close(dense_statistics.of_case(problem).p, problem.truth().weights, rtol=0, atol=1e-13)


@looped("name", STANDING)
def test_the_judge_would_notice_another_placement(name):
    judge, other = (dense_statistics.of_case(problems.CASES[name](), where) for where in (STANDING[name], None))
    assert not torch.allclose(judge.distance, other.distance)


@looped("size", [1e-30, 1e30])
def test_norms_whose_squares_leave_the_range(size):
    """Of float32: 32 lanes and a tail, and a row that is 0."""
    query = size * torch.randn(2, 3, 5, 37, dtype=torch.float64)
    query[1, 2, 3] = 0
    key = torch.zeros(2, 3, 5, 37)
    found = saccade.statistics(query.float(), key, backend="native").heads
    torch.testing.assert_close(found["query"]["norm"].double(), query.norm(dim=-1).mean((0, 2)), rtol=1e-6, atol=0)
    assert (found["key"]["norm"] == 0).all()
