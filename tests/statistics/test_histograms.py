"""Histograms: every entry that is real lies in one bin, and in the right one up to the rounding of an edge."""

from __future__ import annotations

import torch

import dense_statistics
import problems
import saccade
from looped import looped

CASES = ("square_causal", "queries_padded", "bias_with_hidden_pairs", "everything")


def observed(name, backend):
    problem = problems.CASES[name]()
    tensors = problem.tensors
    got = saccade.statistics(
        tensors["query"],
        tensors["key"],
        problem.mask,
        value=tensors["value"],
        bias=problem.to_bias(tensors),
        sink=tensors.get("sink"),
        histograms=True,
        backend=backend,
        **problem.options,
    )
    return got, dense_statistics.of_case(problem), tensors


def check(found, entries, h, slack):
    """Cumulated counts lie between those of entries below the edges less `slack` and plus it."""
    edges, counts = found["edges"][h].double(), found["counts"][h]
    assert counts.dtype == torch.int64 and len(edges) == len(counts) + 1 and (edges.diff() > 0).all()
    assert int(counts.sum()) == entries.numel()
    below = counts.cumsum(0)[:-1]
    for sign, compare in ((-1, torch.le), (1, torch.ge)):
        moved = edges[1:-1] + sign * slack
        assert compare((entries[:, None] < moved).sum(0), below).all()


@looped("name", CASES)
def test_of_vectors(name, backend):
    got, judge, tensors = observed(name, backend)
    read = judge.seen.any(2).unflatten(1, (tensors["key"].shape[1], -1)).any(2)
    for what, real in (("query", judge.counted), ("key", read), ("value", read)):
        for h in range(tensors[what].shape[1]):
            entries = tensors[what][:, h][real[:, h]].double().flatten()
            found = got.heads[what]
            tiny = torch.finfo(tensors[what].dtype).eps * entries.abs().max().item()
            check(found, entries, h, 64 * tiny)
            assert (found["edges"][h, 0], found["edges"][h, -1]) == (found["min"][h], found["max"][h])


@looped("name", CASES)
def test_of_logits_and_weights(name, backend):
    got, judge, tensors = observed(name, backend)
    scale = problems.CASES[name]().options.get("scale")
    off = dense_statistics.bound(judge, tensors["query"], tensors["key"], got.lse.dtype, scale)
    for h in range(6):
        for what, entries in (("logits", judge.logits), ("weights", judge.p)):
            check(got.heads[what], entries[:, h][judge.seen[:, h]], h, off + 64 * torch.finfo(got.lse.dtype).eps)
    edges = got.heads["weights"]["edges"][0]
    assert edges[0] == 0 and edges[-1] == 1 and (edges[1:].log2().diff() == 1).all()


def test_only_those_asked_for(backend):
    named = problems.tensors()
    for asked in ((), ("key",), ["logits"], {"weights", "query"}, "value"):
        got = saccade.statistics(named["query"], named["key"], value=named["value"], histograms=asked, backend=backend)
        have = {what for what, found in got.heads.items() if "counts" in found}
        assert have == ({asked} if isinstance(asked, str) else set(asked))


def test_weights_that_are_powers_of_two_lie_above_their_edge(backend):
    """Eight equal keys: each weight is 1/8 but for rounding, which the softmax of equal logits has none of."""
    query = torch.zeros(1, 1, 3, 5, dtype=problems.DTYPE)
    key = torch.ones(1, 1, 8, 5, dtype=problems.DTYPE)
    counts = saccade.statistics(query, key, histograms="weights", backend=backend).heads["weights"]["counts"][0]
    assert counts.nonzero().flatten().tolist() in ([30], [29])
    assert counts.sum() == 24


def test_a_single_value_and_none(backend):
    query, key = torch.zeros(2, 1, 3, 5, dtype=problems.DTYPE), torch.ones(2, 1, 7, 5, dtype=problems.DTYPE)
    got = saccade.statistics(query, key, histograms=("query", "key", "logits"), backend=backend)
    for what, value, count in (("query", 0, 30), ("key", 1, 70), ("logits", 0, 42)):
        edges, counts = got.heads[what]["edges"][0], got.heads[what]["counts"][0]
        assert (edges[0], edges[-1]) == (value - 0.5, value + 0.5)
        assert counts[32] == count == counts.sum()
    nothing = saccade.statistics(query, key, saccade.Padding([0, 0]), histograms=True, backend=backend)
    for found in nothing.heads.values():
        assert found["counts"].sum() == 0
        assert torch.isfinite(found["edges"]).all()


@looped("size", [1e20, 3e38, -3e38, 1e-40])
def test_entries_that_are_all_the_same_huge_number(size, backend):
    # A half more or less than 1e20 is 1e20, and a bin of no width holds nothing.
    same = torch.full((1, 2, 3, 5), size)
    got = saccade.statistics(same, same, value=same, histograms=True, backend=backend)
    for name in ("query", "key", "value"):
        edges, counts = got.heads[name]["edges"], got.heads[name]["counts"]
        assert edges.isfinite().all() and (edges[:, 0] < edges[:, -1]).all()
        assert (edges[:, 0] <= size).all() and (edges[:, -1] >= same[0, 0, 0, 0]).all()
        assert (counts.sum(1) == 15).all() and (counts > 0).sum() == 2


def test_logits_at_the_ends_of_the_numbers(backend):
    """A bias of finfo.min is a number: the width of such a histogram is beyond the greatest one."""
    named = problems.tensors(dtype=torch.float32)
    bias = torch.zeros(11, 13)
    bias[:, 7:] = torch.finfo(torch.float32).min
    bias[2, 3] = torch.finfo(torch.float32).max
    got = saccade.statistics(named["query"], named["key"], bias=bias, histograms="logits", backend=backend)
    counts = got.heads["logits"]["counts"]
    assert (counts[:, 0] == 2 * 11 * 6).all()
    assert (counts[:, -1] == 2).all()
    assert (counts.sum(1) == 2 * 11 * 13).all()
    assert torch.isfinite(got.heads["logits"]["edges"]).all()
