"""What attention must do whatever the numbers: symmetries, causality, linearity, sums."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings

import oracle
import problems
import saccade
from looped import looped
from problems import CASES, assert_close


def test_permuting_keys_changes_nothing_without_positions(backend):
    query, key, value = problems.tensors().values()
    order = torch.randperm(13)
    want = saccade.attention(query, key, value, backend=backend)
    assert_close(saccade.attention(query, key[:, :, order], value[:, :, order], backend=backend), want)


def test_permuting_queries_permutes_the_output(backend):
    query, key, value = problems.tensors().values()
    order = torch.randperm(11)
    want = saccade.attention(query, key, value, backend=backend)[:, :, order]
    assert_close(saccade.attention(query[:, :, order], key, value, backend=backend), want)


def test_permuting_a_sequence_with_its_mask_permutes_everything(exact):
    query, key, value = problems.tensors(rows=13).values()
    order, bits = torch.randperm(13), torch.rand(13, 13) < 0.6
    want = saccade.attention(query, key, value, bits, backend=exact)[:, :, order]
    given = [x[:, :, order] for x in (query, key, value)]
    assert_close(saccade.attention(*given, bits[order][:, order], backend=exact), want)


@looped("mask", ["causal", "window", "boolean"])
def test_the_past_does_not_depend_on_the_future(mask, backend):
    leaves = problems.leaves(problems.tensors(rows=13))
    masks = {"causal": saccade.Causal(), "window": saccade.Window(4, 0), "boolean": torch.ones(13, 13).tril().bool()}
    out = saccade.attention(*leaves.values(), masks[mask], backend=backend)
    for t in (0, 1, 6, 12):
        found = torch.autograd.grad(out[:, :, :t].sum(), list(leaves.values()), retain_graph=True)
        for gradient in found:
            assert (gradient[:, :, t:] == 0).all(), "a gradient from before t reached after t"
        if t:
            assert all((g[:, :, :t] != 0).any() for g in found[2:])


def test_changing_the_future_leaves_the_past_bit_for_bit(exact):
    named = problems.tensors(rows=13)
    want = saccade.attention(*named.values(), saccade.Causal(), backend=exact)
    for t in named.values():
        t[:, :, 7:] = torch.randn_like(t[:, :, 7:])
    got = saccade.attention(*named.values(), saccade.Causal(), backend=exact)
    assert torch.equal(got[:, :, :7], want[:, :, :7]) and not torch.equal(got, want)


def test_equal_values_come_through_unchanged(backend):
    named = problems.tensors()
    named["value"] = torch.full_like(named["value"], 1.5)
    assert_close(saccade.attention(*named.values(), backend=backend), torch.full((2, 6, 11, 7), 1.5).double())


def test_shifting_every_logit_shifts_lse_alone(exact):
    problem = CASES["bias_matrix"]()
    out, lse = problem.ours(backend=exact)
    problem.tensors["bias"] = problem.tensors["bias"] + 3.0
    shifted_out, shifted_lse = problem.ours(backend=exact)
    assert_close(shifted_out, out)
    assert_close(shifted_lse, lse + 3.0)


def test_a_sink_is_a_key_with_value_zero(exact):
    problem = CASES["sink"]()
    query, key, value, sink = problem.tensors.values()
    # one more key whose logit is the sink, by a bias over a zero key, and whose value is zero
    more = [torch.cat([x, torch.zeros_like(x[:, :, :1])], 2) for x in (key, value)]
    bias = torch.zeros(1, 6, 1, 14, dtype=problems.DTYPE)
    bias[0, :, 0, -1] = sink
    want = saccade.attention_with_lse(query, *more, bias=bias.expand(1, 6, 11, 14), backend=exact)
    for got, expected in zip(problem.ours(backend=exact), want, strict=True):
        assert_close(got, expected)


def test_a_very_low_sink_is_no_sink(exact):
    problem = CASES["plain"]()
    want = problem.ours(backend=exact)
    problem.tensors["sink"] = torch.full((3,), -1e4, dtype=problems.DTYPE)
    for got, expected in zip(problem.ours(backend=exact), want, strict=True):
        assert_close(got, expected)


def test_attention_is_linear_in_values(exact):
    query, key, value = problems.tensors().values()
    other = torch.randn_like(value)
    both = saccade.attention(query, key, 2.0 * value - 3.0 * other, backend=exact)
    parts = [saccade.attention(query, key, v, backend=exact) for v in (value, other)]
    assert_close(both, 2.0 * parts[0] - 3.0 * parts[1])


def test_attention_with_lse_and_attention_agree(backend):
    for name in CASES:
        problem = CASES[name]()
        assert_close(problem.ours(backend=backend)[0], problem.out(backend=backend))


sizes = st.tuples(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2), (6, 3)]),
    st.integers(1, 17),
    st.integers(1, 19),
    st.integers(1, 9),
    st.integers(1, 9),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    size=sizes,
    seed=st.integers(0, 2**20),
    offset=st.one_of(st.none(), st.integers(-9, 9)),
    with_sink=st.booleans(),
    left=st.one_of(st.none(), st.integers(0, 7)),
    right=st.one_of(st.none(), st.integers(0, 3)),
    softcap=st.one_of(st.none(), st.floats(0.5, 5.0)),
    scale=st.one_of(st.none(), st.floats(-2.0, 2.0)),
    lengths=st.lists(st.integers(0, 19), min_size=3, max_size=3),
    padded=st.booleans(),
)
def test_any_problem(small_tiles, size, seed, offset, with_sink, left, right, softcap, scale, lengths, padded):
    batch, (heads, kv_heads), rows, keys, width, value_width = size
    named = problems.tensors(batch, heads, kv_heads, rows, keys, width, value_width, seed=seed)
    if with_sink:
        named["sink"] = torch.randn(heads, dtype=problems.DTYPE, generator=torch.Generator().manual_seed(seed))
    see, mask = oracle.window(rows, keys, left, right, offset), saccade.Window(left, right)
    if padded:
        lengths = [min(n, keys) for n in lengths[:batch]]
        see, mask = see & oracle.key_lengths(lengths, keys), mask & saccade.Padding(torch.tensor(lengths))
    if offset is not None:
        mask = mask.at(offset)
    problem = problems.Problem(named, np.asarray(see), mask, {"softcap": softcap, "scale": scale})
    ours, theirs = problems.leaves(named), problems.leaves(named)
    got, want = problem.ours(ours, "chunked"), problem.truth(theirs)
    assert_close(got[0], want.out)
    assert_close(got[1], want.lse)
    cotangents = [torch.randn_like(got[0]), torch.where(got[1] == -torch.inf, 0.0, torch.randn_like(got[1])).detach()]
    found = problems.pull(got, ours, cotangents)
    for one, other in zip(found, problems.pull(want[:2], theirs, cotangents), strict=True):
        assert_close(one, other, terms=1024)
