"""Dropout on the weights: reproducible, counted by absolute indices, consistent between forward and backward."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import problems
import saccade
from looped import looped
from problems import CASES, assert_close


def factor(dropout, batch=2, heads=3, rows=11, keys=13, *, mask=None, backend="chunked", dtype=None):
    """What each weight is multiplied by, 0 or 1 / (1 - p): equal weights over all keys, the identity as value."""
    dtype = problems.DTYPE if dtype is None else dtype
    query = torch.zeros(batch, heads, rows, 2, dtype=dtype)
    key = torch.zeros(batch, heads, keys, 2, dtype=dtype)
    value = torch.eye(keys, dtype=dtype).expand(batch, heads, keys, keys)
    return saccade.attention(query, key, value, mask, dropout=dropout, backend=backend) * keys


def test_values_are_zero_or_the_inverse_keep_rate(backend):
    found = factor(saccade.Dropout(0.3, 5), backend=backend)
    kept = found > 0.5
    assert_close(found, kept.double() / 0.7)
    assert kept.any() and not kept.all()


def test_a_float_is_reproduced_by_manual_seed_and_differs_from_call_to_call(backend):
    torch.manual_seed(41)
    first, second = factor(0.4, backend=backend), factor(0.4, backend=backend)
    torch.manual_seed(41)
    assert torch.equal(factor(0.4, backend=backend), first)
    assert torch.equal(factor(0.4, backend=backend), second)
    assert not torch.equal(first, second)


def test_a_fixed_seed_leaves_the_generator_alone(backend):
    before = torch.get_rng_state()
    one = factor(saccade.Dropout(0.4, 7), backend=backend)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(factor(saccade.Dropout(0.4, 7), backend=backend), one)
    assert not torch.equal(factor(saccade.Dropout(0.4, 8), backend=backend), one)


@looped("seed", [0, -1, 2**31, 2**63 - 1, -(2**63)])
def test_every_64_bit_seed_serves_and_they_differ(seed, exact):
    found = factor(saccade.Dropout(0.5, seed), backend=exact)
    assert not torch.equal(found, factor(saccade.Dropout(0.5, seed ^ (1 << 40)), backend=exact))
    assert not torch.equal(found, factor(saccade.Dropout(0.5, seed ^ 1), backend=exact))


def test_no_dropout_is_no_dropout(backend):
    problem = CASES["everything"]()
    want = problem.out(backend=backend)
    assert torch.equal(problem.out(backend=backend, dropout=0.0), want)
    assert torch.equal(problem.out(backend=backend, dropout=saccade.Dropout(0.0, 3)), want)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_rate_of_all_and_of_each_head_row_and_key(p):
    found = factor(saccade.Dropout(p, 11), 2, 3, 211, 223, dtype=torch.float32) > 0.5

    def deviations(axes):
        """Of the kept share along `axes`, in standard deviations of a fair draw."""
        n = math.prod(found.shape[a] for a in axes)
        return ((found.double().mean(axes) - (1 - p)) / math.sqrt(p * (1 - p) / n)).abs()

    # 5 deviations: under 6e-7 each by the normal law, so under 1e-3 for the 2 x 3 x 434 rows and keys together
    assert deviations((0, 1, 2, 3)) < 5
    assert deviations((2, 3)).max() < 5
    assert deviations((3,)).max() < 5.5
    assert deviations((2,)).max() < 5.5


def test_draws_do_not_resemble_each_other():
    # Correlation between neighbouring rows, keys, heads, items and seeds: mean of n products of variance 1.
    def draw(seed):
        return (factor(saccade.Dropout(0.5, seed), 2, 3, 211, 223, dtype=torch.float32) > 0.5).double() * 2 - 1

    one = draw(17)
    pairs = {
        "row": (one[:, :, 1:], one[:, :, :-1]),
        "key": (one[..., 1:], one[..., :-1]),
        "diagonal": (one[:, :, 1:, 1:], one[:, :, :-1, :-1]),
        "head": (one[:, 1:], one[:, :-1]),
        "item": (one[1:], one[:-1]),
        "transpose": (one[:, :, :211, :211], one[:, :, :211, :211].mT.contiguous()),
        "next seed": (one, draw(18)),
        "high bits of the seed": (one, draw(17 + 2**32)),
    }
    for name, (a, b) in pairs.items():
        n = a.numel() // (2 if name == "transpose" else 1)
        assert (a * b).mean().abs() * math.sqrt(n) < 5, name


@looped("name", ["plain", "everything", "causal_documents", "one_kv_head", "keys_padded"])
def test_the_same_draw_on_every_backend_and_any_tiles(name, backend):
    problem = CASES[name]()
    dropout = saccade.Dropout(0.35, 23)
    want_out, want_lse = problem.ours(backend="reference", dropout=dropout)
    out, lse = problem.ours(backend=backend, dropout=dropout)
    assert_close(out, want_out)
    assert_close(lse, want_lse)
    assert not torch.allclose(out, problem.out(backend=backend))


@looped("name", ["grouped_heads", "everything", "alibi", "sink_with_empty_rows", "relative_both_ways"])
def test_output_and_gradients_with_the_forwards_draw(name, backend):
    problem = CASES[name]()
    dropout = saccade.Dropout(0.35, 29)
    drawn = factor(dropout, *problem.shape)
    ours, theirs = problems.leaves(problem.tensors), problems.leaves(problem.tensors)
    out, lse = problem.ours(ours, backend, dropout=dropout)
    want = problem.truth(theirs, factor=drawn)
    assert_close(out, want.out)
    assert_close(lse, want.lse)
    cotangents = [torch.randn_like(out), torch.where(lse == -math.inf, 0.0, torch.randn_like(lse)).detach()]
    got = torch.autograd.grad([out, lse], list(ours.values()), cotangents)
    expected = torch.autograd.grad([want.out, want.lse], list(theirs.values()), cotangents)
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other, terms=256)


def test_gradgradcheck_with_dropout(differentiable):
    named = problems.tensors(batch=1, heads=2, kv_heads=1, rows=3, keys=5, width=2, value_width=3)
    problem = problems.Problem(named)
    given = list(problems.leaves(named).values())

    def call(*given):
        return problem.out(dict(zip(named, given, strict=True)), differentiable, dropout=saccade.Dropout(0.4, 31))

    assert torch.autograd.gradcheck(call, given, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


@looped(("rows", "keys"), [((0, 4), (0, 13)), ((3, 11), (5, 12)), ((7, 8), (12, 13))])
def test_a_slice_draws_by_absolute_indices(rows, keys, exact):
    dropout = saccade.Dropout(0.45, 37)
    whole = factor(dropout, backend=exact)
    mask = saccade.Window(None, None).slice(slice(*rows), slice(*keys), lengths=(11, 13))
    got = factor(dropout, rows=rows[1] - rows[0], keys=keys[1] - keys[0], mask=mask, backend=exact)
    assert_close(got, whole[:, :, slice(*rows), slice(*keys)])


def test_slices_of_slices_draw_by_absolute_indices(exact):
    dropout = saccade.Dropout(0.45, 37)
    mask = (
        saccade.Window(None, None).slice(slice(2, 10), slice(3, 12), lengths=(11, 13)).slice(slice(1, 6), slice(4, 8))
    )
    got = factor(dropout, rows=5, keys=4, mask=mask, backend=exact)
    assert_close(got, factor(dropout, backend=exact)[:, :, 3:8, 7:11])


def test_split_and_merged_is_the_whole_with_the_same_seed(exact):
    problem = CASES["wide_causal"]()
    dropout = saccade.Dropout(0.3, 43)
    whole, whole_lse = problem.ours(backend=exact, dropout=dropout)
    query, key, value = problem.tensors.values()
    parts = [
        saccade.attention_with_lse(
            query,
            key[:, :, a:b],
            value[:, :, a:b],
            problem.mask.slice(slice(0, 11), slice(a, b), lengths=(11, 13)),
            dropout=dropout,
            backend=exact,
        )
        for a, b in ((0, 5), (5, 6), (6, 13))
    ]
    out, lse = saccade.merge(parts)
    assert_close(out, whole)
    assert_close(lse, whole_lse)


def test_the_draw_of_one_item_or_row_does_not_depend_on_the_size_of_the_call():
    dropout = saccade.Dropout(0.5, 47)
    whole = factor(dropout)
    assert_close(factor(dropout, batch=1), whole[:1])
    assert_close(factor(dropout, rows=5), whole[:, :, :5])
    assert_close(factor(dropout, keys=7), whole[..., :7])


@looped("reentrant", [False, True])
def test_checkpointing_draws_the_same_again(reentrant, backend):
    problem = CASES["square_causal"]()
    found = []
    for through in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=reentrant)):
        torch.manual_seed(53)
        leaves = problems.leaves(problem.tensors)

        def call(*given):
            return problem.out(dict(zip(problem.tensors, given, strict=True)), backend, dropout=0.3)

        out = through(call, *leaves.values())
        out.sin().sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves.values())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_threads_do_not_change_the_draw(threads):
    found = []
    for n in (1, 2):
        threads(n)
        found.append(factor(saccade.Dropout(0.5, 59), 3, 2, 67, 71))
    assert torch.equal(*found)


def test_sdpa_refuses_dropout_it_cannot_reproduce():
    for dropout in (0.3, saccade.Dropout(0.3, 1)):
        with pytest.raises(ValueError, match="(?s)sdpa.*dropout"):
            saccade.attention(*problems.tensors().values(), dropout=dropout, backend="sdpa")


@looped("p", [-0.1, 1.0, 1.5, math.nan, math.inf])
def test_p_outside_its_range_is_refused(p, backend):
    with pytest.raises(ValueError, match=r"(?i)(dropout|p).*\[0, 1\)"):
        saccade.attention(*problems.tensors().values(), dropout=p, backend=backend)
    with pytest.raises(ValueError, match=r"(?i)(dropout|p).*\[0, 1\)"):
        saccade.Dropout(p, 3)


@looped("bad", ["0.1", True, None, torch.tensor(0.1), np.ones(2)])
def test_dropout_of_another_type_is_refused(bad):
    with pytest.raises(TypeError, match="dropout"):
        saccade.attention(*problems.tensors().values(), dropout=bad)


def test_dropout_is_a_value():
    assert saccade.Dropout(0.25, 3) == saccade.Dropout(0.25, 3) != saccade.Dropout(0.25, 4)
    assert hash(saccade.Dropout(0.25, 3)) == hash(saccade.Dropout(0.25, 3))
    with pytest.raises(TypeError, match="seed"):
        saccade.Dropout(0.25, 1.5)
