"""`merge` over disjoint key sets is the whole; attention split over keys uses `mask.slice`."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import problems
import saccade
from looped import looped
from problems import CASES, assert_close

MERGED = (
    "wide_causal",
    "tall_causal_has_empty_rows",
    "causal_placed_per_item",
    "window",
    "keys_padded",
    "queries_padded",
    "cache",
    "causal_documents",
    "boolean_matrix",
    "window_or_first_key",
    "no_keys_in_one_item",
    "softcap",
    "plain",
    "alibi",
    "sink",
    "sink_with_empty_rows",
    "everything",
    "bias_matrix",
)


def part(problem, tensors, start, stop, carries_sink, backend="chunked", rows=slice(None)):
    """Attention over keys start ... stop - 1 alone."""
    length_q, length_k = problem.shape[2:]
    mask = problem.mask
    if mask is not None:
        whole = saccade.FromTensor(mask) if isinstance(mask, torch.Tensor) else mask
        mask = whole.slice(slice(*rows.indices(length_q)), slice(start, stop), lengths=(length_q, length_k))
    bias = problem.to_bias(tensors)
    if isinstance(bias, torch.Tensor):
        bias = bias[..., start:stop] if bias.shape[-2] == 1 else bias[..., rows, start:stop]
    return saccade.attention_with_lse(
        tensors["query"][:, :, rows],
        tensors["key"][:, :, start:stop],
        tensors["value"][:, :, start:stop],
        mask,
        bias=bias,
        sink=tensors.get("sink") if carries_sink else None,
        backend=backend,
        **problem.options,
    )


def merged(problem, tensors, cuts, carrier, backend="chunked"):
    edges = [0, *sorted(cuts), problem.shape[3]]
    spans = list(itertools.pairwise(edges))
    carrier %= len(spans)
    return saccade.merge([part(problem, tensors, a, b, n == carrier, backend) for n, (a, b) in enumerate(spans)])


@pytest.mark.parametrize("name", MERGED)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12)
@given(cuts=st.lists(st.integers(0, 13), min_size=1, max_size=4), carrier=st.integers(0, 4))
def test_random_splits_are_the_whole(name, cuts, carrier):
    problem = CASES[name]()
    out, lse = merged(problem, problem.tensors, cuts, carrier)
    want_out, want_lse = problem.ours(backend="chunked")
    assert_close(out, want_out)
    assert_close(lse, want_lse)


@looped("name", ["wide_causal", "everything", "sink_with_empty_rows", "alibi"])
def test_splits_on_every_backend_against_the_oracle(name, backend):
    problem = CASES[name]()
    out, lse = merged(problem, problem.tensors, [4, 9], 1, backend)
    want = problem.truth()
    assert_close(out, want.out)
    assert_close(lse, want.lse)


@looped("name", ["wide_causal", "everything", "sink_with_empty_rows", "alibi", "no_keys_in_one_item"])
def test_gradients_through_merge(name, exact):
    problem = CASES[name]()
    ours, theirs = problems.leaves(problem.tensors), problems.leaves(problem.tensors)
    out, lse = merged(problem, ours, [4, 9], 1, exact)
    want = problem.truth(theirs)
    cotangents = [torch.randn_like(out), torch.where(lse == -math.inf, 0.0, torch.randn_like(lse)).detach()]
    got = torch.autograd.grad([out, lse], list(ours.values()), cotangents)
    expected = torch.autograd.grad([want.out, want.lse], list(theirs.values()), cotangents)
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other, terms=256)


def test_slices_of_rows_keep_their_positions(exact):
    problem = CASES["wide_causal"]()
    whole, _ = problem.ours(backend=exact)
    for rows in (slice(0, 4), slice(4, 5), slice(5, 11)):
        parts = [part(problem, problem.tensors, a, b, True, exact, rows) for a, b in ((0, 7), (7, 13))]
        assert_close(saccade.merge(parts)[0], whole[:, :, rows])


def test_all_empty_parts_merge_to_zero_and_minus_infinity():
    out = torch.zeros(2, 3, 5, 7)
    lse = torch.full((2, 3, 5), -math.inf)
    leaves = [out.clone().requires_grad_(), lse.clone().requires_grad_()]
    merged_out, merged_lse = saccade.merge([tuple(leaves), (out, lse)])
    assert (merged_out == 0).all() and (merged_lse == -math.inf).all()
    gradients = torch.autograd.grad(merged_out.sum(), leaves, allow_unused=True)
    assert all(g is None or (g == 0).all() for g in gradients)


def test_one_part_is_itself():
    problem = CASES["tall_causal_has_empty_rows"]()
    out, lse = problem.ours()
    again = saccade.merge([(out, lse)])
    assert_close(again[0], out)
    assert_close(again[1], lse)


def test_an_empty_part_changes_nothing():
    problem = CASES["plain"]()
    out, lse = problem.ours()
    nothing = (torch.zeros_like(out), torch.full_like(lse, -math.inf))
    for parts in ([(out, lse), nothing], [nothing, (out, lse)], [nothing, (out, lse), nothing]):
        again = saccade.merge(parts)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merge_accumulates_in_float32(dtype):
    problem = CASES["plain"]()
    named = {name: tensor.to(dtype) for name, tensor in problem.tensors.items()}
    out, lse = merged(problem, named, [2, 4, 6, 8, 10, 12], 0)
    want = problem.truth(named)
    assert out.dtype == dtype and lse.dtype == torch.float32
    # each part was rounded to dtype once and the result once more: weights sum to 1, so two half-units of the size
    bound = torch.finfo(dtype).eps * named["value"].abs().max().item() + 64 * 2**-23
    assert (out.double() - want.out).abs().max() <= bound
    assert_close(lse, want.lse)


def test_merge_of_large_and_small_log_sum_exps():
    # parts 1000 nats apart: the small one vanishes, nothing overflows
    big, small = torch.full((1, 1, 3), 1000.0), torch.full((1, 1, 3), 0.0)
    ones, twos = torch.ones(1, 1, 3, 2), torch.full((1, 1, 3, 2), 2.0)
    out, lse = saccade.merge([(ones, big), (twos, small)])
    assert torch.equal(out, ones) and torch.equal(lse, big)
    out, lse = saccade.merge([(ones, -big), (twos, -big)])
    assert_close(out, 1.5 * ones)
    assert_close(lse, (-big + math.log(2)), size=1000.0)


def test_order_of_parts_matters_only_to_rounding():
    problem = CASES["everything"]()
    parts = [part(problem, problem.tensors, a, b, a == 0) for a, b in ((0, 3), (3, 8), (8, 13))]
    want = saccade.merge(parts)
    got = saccade.merge(parts[::-1])
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])


@looped(
    ("parts", "words"),
    [
        ([], "(?i)parts|empty|at least one"),
        ([(torch.zeros(1, 2, 3, 5), torch.zeros(1, 2, 4))], r"(?s)lse.*\(1, 2, 4\)"),
        ([(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))], r"(?s)out.*\(1, 2, 3\)"),
        (
            [(torch.zeros(1, 2, 3, 5), torch.zeros(1, 2, 3)), (torch.zeros(1, 2, 7, 5), torch.zeros(1, 2, 7))],
            r"(?s)\(1, 2, 7, 5\)",
        ),
    ],
)
def test_bad_parts_are_refused(parts, words):
    with pytest.raises(ValueError, match=words):
        saccade.merge(parts)


@pytest.mark.parametrize("parts", [[torch.zeros(1, 2, 3, 5)], [("out", "lse")], None])
def test_parts_of_another_type_are_refused(parts):
    with pytest.raises((TypeError, ValueError), match="(?i)merge|part|pair"):
        saccade.merge(parts)
