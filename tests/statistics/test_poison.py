"""NaN and Inf: what nobody sees leaks nowhere, what somebody sees is counted and its first place is named."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
from torch import Tensor

import oracle
import problems
import saccade
from looped import looped

POISON = (math.nan, math.inf, -math.inf)


def same(left, right, name=""):
    if isinstance(left, dict):
        assert set(left) == set(right)
        for key in left:
            same(left[key], right[key], f"{name}.{key}")
    elif isinstance(left, Tensor):
        assert torch.equal(left, right), name
    else:
        assert left == right, name


def assert_same(left, right):
    for field in fields(left):
        same(getattr(left, field.name), getattr(right, field.name), field.name)


def observed(tensors, mask, backend, **more):
    return saccade.statistics(
        tensors["query"],
        tensors["key"],
        mask,
        value=tensors["value"],
        top=3,
        backend=backend,
        histograms=("query", "key", "value"),
        **more,
    )


@looped("poison", POISON)
def test_padding_is_not_read(poison, backend):
    lengths, real = torch.tensor([7, 13]), torch.tensor([5, 11])
    mask = saccade.Padding(lengths, queries=real)
    clean, spoiled = problems.tensors(), problems.tensors()
    for tensors, filler in ((clean, 3.0), (spoiled, poison)):
        tensors["query"][0, :, 5:] = filler
        for name in ("key", "value"):
            tensors[name][0, :, 7:] = filler
    assert_same(observed(spoiled, mask, backend), observed(clean, mask, backend))


@looped("poison", POISON)
def test_a_key_reaches_only_rows_that_see_it(poison, backend):
    named = problems.tensors(rows=13)
    before = observed(named, saccade.Causal(), backend)
    named["key"][1, 2, 7, 3] = poison
    after = observed(named, saccade.Causal(), backend)
    heads, spoiled = slice(4, 6), slice(7, None)  # of key head 2; the rows that see key 7
    assert after.counted.all()
    # An infinite key may give -inf, which is a weight of 0: only a NaN is sure to spoil the row.
    bad = torch.isnan(after.lse)
    assert bad[1, heads, spoiled].all() if math.isnan(poison) else bad[1, heads, spoiled].any()
    assert int(bad.sum()) == int(bad[1, heads, spoiled].sum())
    rows = {name: (getattr(before, name), getattr(after, name)) for name in ("lse", "entropy", "largest", "distance")}
    rows |= {f"mass.{name}": (before.mass[name], after.mass[name]) for name in ("self", "previous", "next", "first")}
    for name, (clean, found) in rows.items():
        assert torch.equal(clean[0], found[0]) and torch.equal(clean[1, :4], found[1, :4]), name
        assert torch.equal(clean[1, heads, :7], found[1, heads, :7]), name
        # the next key is hidden from each row: what a row does not see weighs nothing, whatever else it sees
        assert torch.equal(torch.isnan(found), bad & (name != "mass.next")), name
    assert (after.largest_at[bad] == 7).all()
    assert torch.equal(torch.isnan(after.top_weights).all(-1), bad)
    assert (after.top_keys[bad] == -1).all()


def test_bad_logits_are_counted_and_the_first_is_named(backend):
    named = problems.tensors(rows=13)
    named["key"][1, 2, 7, 3] = math.nan
    got = observed(named, saccade.Causal(), backend)
    seen = 2 * 13 * 14 // 2  # pairs of one head
    want = [0.0] * 4 + [6 / seen] * 2  # rows 7 ... 12 of item 1
    torch.testing.assert_close(got.heads["logits"]["nonfinite"].double(), torch.tensor(want).double())
    weights = [0.0] * 4 + [sum(range(8, 14)) / seen] * 2  # each weight of those rows
    torch.testing.assert_close(got.heads["weights"]["nonfinite"].double(), torch.tensor(weights).double())
    for what in ("logits", "weights"):
        assert got.heads[what]["nonfinite_at"].tolist() == [[-1] * 4] * 4 + [[1, 4, 7, 7], [1, 5, 7, 7]]
        for name in ("min", "max"):
            assert torch.isfinite(got.heads[what][name]).all()
    assert got.heads["key"]["nonfinite_at"].tolist() == [[-1] * 4, [-1] * 4, [1, 2, 7, 3]]
    torch.testing.assert_close(got.heads["key"]["nonfinite"][2].item(), 1 / (2 * 13 * 5))
    assert (got.heads["query"]["nonfinite"] == 0).all() and (got.heads["value"]["nonfinite"] == 0).all()


@looped("poison", POISON)
def test_bad_vectors_are_counted_and_left_out_of_ranges(poison, backend):
    named = problems.tensors()
    named["query"][1, 3, 5, 2] = named["query"][1, 3, 5, 4] = named["query"][0, 3, 9, 1] = poison
    got = observed(named, None, backend).heads["query"]
    assert got["nonfinite_at"].tolist() == [[-1] * 4] * 3 + [[0, 3, 9, 1]] + [[-1] * 4] * 2
    assert got["nonfinite"].tolist() == pytest.approx([0, 0, 0, 3 / (2 * 11 * 5), 0, 0])
    head = named["query"][:, 3].reshape(-1)
    assert got["min"][3] == head[head.isfinite()].min() and got["max"][3] == head[head.isfinite()].max()
    fine = torch.ones(2, 11, dtype=torch.bool)
    fine[1, 5] = fine[0, 9] = False
    norms = named["query"][:, 3][fine].norm(dim=-1)
    torch.testing.assert_close(got["norm"][3], norms.mean())
    assert got["counts"][3].sum() == 2 * 11 * 5 - 3


def test_logits_that_overflow_are_counted(backend):
    named = problems.tensors(dtype=torch.float32, kv_heads=1, heads=1)
    named["query"][0, 0, 3] = 1e25
    named["key"][0, 0, 6] = 1e25  # 5e50 * scale: beyond float32, with finite vectors
    got = observed(named, None, backend)
    assert got.heads["query"]["nonfinite"].item() == 0
    assert got.heads["logits"]["nonfinite_at"].tolist() == [[0, 0, 3, 6]]
    assert got.heads["logits"]["nonfinite"].item() == pytest.approx(1 / (2 * 11 * 13))
    assert torch.isnan(got.entropy[0, 0, 3]) and torch.isfinite(got.entropy[1]).all()


def test_a_hidden_bias_keeps_poison_out(backend):
    named = problems.tensors()
    bias = torch.zeros(11, 13, dtype=named["query"].dtype)
    bias[:, 4] = -math.inf
    clean = observed(named, None, backend, bias=bias)
    named["key"][:, :, 4] = math.nan
    named["value"][:, :, 4] = math.nan
    assert_same(observed(named, None, backend, bias=bias), clean)
    assert (clean.keys_seen.expand(clean.counted.shape) == 12).all()


def test_a_visible_minus_infinity_is_a_weight_of_zero(backend):
    """Products that overflow downwards: what is far below the others weighs nothing, and is still counted."""
    named = problems.tensors(dtype=torch.float32, kv_heads=1, heads=1)
    named["query"][0, 0, 3] = 1e25
    named["key"][0, 0, 6] = -1e25
    got = observed(named, None, backend)
    assert got.heads["logits"]["nonfinite_at"].tolist() == [[0, 0, 3, 6]]
    assert torch.isfinite(got.entropy[0, 0, 3])
    assert got.heads["weights"]["nonfinite"].item() == 0
    assert got.heads["weights"]["min"].item() == 0


def test_a_bucket_of_minus_infinity_hides_its_keys(backend):
    named = problems.tensors()
    table = torch.randn(8, 6, dtype=named["query"].dtype, generator=torch.Generator().manual_seed(1))
    table[2, 3:] = -math.inf
    bias = saccade.RelativeBias(table, bidirectional=True, max_distance=11)
    dense = oracle.relative_bias(table, 11, 13, True, 11).to(table.dtype)
    got, want = (observed(named, None, backend, bias=x) for x in (bias, dense))
    assert torch.equal(got.keys_seen.expand(2, 6, 11), (dense != -math.inf).sum(-1).expand(2, 6, 11))
    assert (got.heads["logits"]["nonfinite"] == 0).all() and torch.isfinite(got.heads["logits"]["min"]).all()
    torch.testing.assert_close(got.heads["weights"]["min"], want.heads["weights"]["min"])
    torch.testing.assert_close(got.entropy, want.entropy)
    torch.testing.assert_close(got.mass["first"], want.mass["first"])


def test_a_spoiled_row_has_no_mass_on_any_group(backend):
    named = problems.tensors(rows=13)
    named["key"][1, 2, 7, 3] = math.nan
    marks = {"with it": torch.arange(13) == 7, "without": torch.arange(13) == 2, "none": torch.zeros(13, dtype=bool)}
    got = observed(named, saccade.Causal(), backend, groups=marks)
    for name in marks:
        assert torch.equal(torch.isnan(got.mass[name]), torch.isnan(got.lse)), name
