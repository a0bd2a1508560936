"""`attention_weights`: exact weights of just the rows, keys and heads asked for."""

from __future__ import annotations

import pytest
import torch

import problems
import saccade
from looped import looped
from problems import CASES, assert_close
from recording import Largest


def weights(problem, **slices):
    return saccade.attention_weights(
        problem.tensors["query"],
        problem.tensors["key"],
        problem.mask,
        bias=problem.to_bias(problem.tensors),
        sink=problem.tensors.get("sink"),
        **problem.options,
        **slices,
    )


@looped("name", CASES)
def test_whole(name):
    problem = CASES[name]()
    got = weights(problem)
    assert got.dtype in (torch.float32, torch.float64)
    assert_close(got, problem.truth().weights.to(got.dtype))


SLICES = [
    {"rows": slice(3, 7)},
    {"keys": slice(5, 12)},
    {"heads": slice(1, 4)},
    {"rows": slice(10, 11), "keys": slice(0, 1), "heads": slice(5, 6)},
    {"rows": slice(None), "keys": slice(-4, None), "heads": slice(0, 6, 2)},
    {"rows": range(2, 9), "keys": range(0, 13, 3), "heads": [4, 1]},
    {"rows": [7, 0, 3], "keys": [12, 1], "heads": range(2, 5)},
]


@looped("name", ["grouped_heads", "everything", "sink_with_empty_rows", "alibi", "boolean_matrix", "cache"])
@looped("slices", SLICES)
def test_slices_are_those_of_the_whole(name, slices):
    problem = CASES[name]()
    want = problem.truth().weights
    for axis, which in ((1, "heads"), (2, "rows"), (3, "keys")):
        size = want.shape[axis]
        chosen = slices.get(which, slice(None))
        index = list(range(size))[chosen] if isinstance(chosen, slice) else [n for n in chosen if n < size]
        want = want.index_select(axis, torch.tensor(index, dtype=torch.int64))
    fitting = {
        which: chosen
        if isinstance(chosen, slice)
        else [n for n in chosen if n < problem.shape[{"heads": 1, "rows": 2, "keys": 3}[which]]]
        for which, chosen in slices.items()
    }
    got = weights(problem, **fitting)
    assert_close(got, want.to(got.dtype))


def test_rows_sum_to_one_and_empty_rows_to_zero():
    problem = CASES["tall_causal_has_empty_rows"]()
    sums = weights(problem).sum(-1)
    assert (sums[:, :, :4] == 0).all()
    assert_close(sums[:, :, 4:], torch.ones_like(sums[:, :, 4:]))


def test_a_sink_takes_its_share():
    problem = CASES["sink"]()
    got = weights(problem).sum(-1)
    _, lse = problem.ours()
    share = torch.exp(problem.tensors["sink"][None, :, None] - lse)
    assert_close(got, (1 - share).to(got.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_float32_from_any_input(dtype):
    named = {k: t.to(dtype) for k, t in problems.tensors().items()}
    got = saccade.attention_weights(named["query"], named["key"], saccade.Causal())
    want = problems.Problem(named, CASES["wide_causal"]().see).truth().weights
    assert got.dtype == torch.float32
    assert_close(got, want.float())


def test_weights_times_values_is_the_output():
    problem = CASES["everything"]()
    got = weights(problem).double() @ problem.tensors["value"].repeat_interleave(2, 1)
    # the weights came in float32
    torch.testing.assert_close(got, problem.out(), rtol=0, atol=64 * 2**-23 * 4)


def test_no_more_than_the_slice_is_formed():
    query, key = torch.randn(1, 2, 4096, 4), torch.randn(1, 1, 4096, 4)
    with Largest() as largest:
        got = saccade.attention_weights(query, key, saccade.Causal(), rows=slice(4090, 4095), keys=slice(7, 12))
    assert got.shape == (1, 2, 5, 5)
    # 5 rows against all keys for their sums, and the inputs themselves; a dense map is 4096 x 4096
    assert largest.numel <= 8 * 2 * 4096 * 4


def test_what_is_out_of_range_is_refused():
    problem = CASES["plain"]()
    for which, chosen in (("rows", [11]), ("keys", [13]), ("heads", [3]), ("heads", [-4])):
        with pytest.raises((ValueError, IndexError), match=which):
            weights(problem, **{which: chosen})


def test_empty_slices():
    assert weights(CASES["plain"](), rows=slice(0, 0)).shape == (2, 3, 0, 13)
    assert weights(CASES["plain"](), keys=slice(4, 4)).shape == (2, 3, 11, 0)


@looped("sink", [-1000.0, 1000.0])
def test_rows_that_see_nothing_are_zero_beside_any_sink(sink):
    query, key = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 3, 3)
    weights = saccade.attention_weights(query, key, mask=saccade.Causal(), sink=torch.tensor([sink, 0.0]))
    assert bool((weights[:, :, :2] == 0.0).all())  # keys begin with the third query
    assert bool(weights.isfinite().all())


@looped("constant", [torch.finfo(torch.float32).min, -1e9, -3e4, 1e9])
@looped("sink", [False, True])
def test_rows_of_huge_logits_are_as_exact_as_others(constant, sink):
    """Beside such a number the log of the count is lost in a float32 lse; adding it to a row changes no weight."""
    torch.manual_seed(5)
    query, key = torch.randn(2, 2, 3, 7), torch.randn(2, 2, 11, 7)
    given = torch.tensor([0.3, -2.0]) if sink else None
    bias = torch.full((3, 11), constant)
    bias[1] = 0
    found = saccade.attention_weights(query, key, bias=bias, sink=given)
    logits = (query @ key.mT * 7**-0.5 + bias).double()  # rounded to float32 as the operator's are
    if given is not None:
        logits = torch.cat([logits, given.double()[None, :, None, None].expand(2, 2, 3, 1)], -1)
    expected = torch.softmax(logits, -1)[..., :11]
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-7)
    part = saccade.attention_weights(query, key, bias=bias, sink=given, rows=[2, 1], keys=[4, 0, 7], heads=[1])
    torch.testing.assert_close(part, expected[:, 1:, [2, 1]][..., [4, 0, 7]].float(), rtol=1e-5, atol=1e-7)


def test_weights_of_each_item_under_vmap():
    query, key = torch.randn(3, 1, 2, 5, 7), torch.randn(3, 1, 2, 11, 7)
    found = torch.vmap(saccade.attention_weights)(query, key)
    one_by_one = [saccade.attention_weights(q, k) for q, k in zip(query, key, strict=True)]
    torch.testing.assert_close(found, torch.stack(one_by_one), rtol=1e-6, atol=1e-7)
