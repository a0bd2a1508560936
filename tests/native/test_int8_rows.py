"""Keys and values in 8 bits: what rounding gives, and the kernel that reads them as they stand.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D and Dv widths.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import saccade
from native import drawing, fuzzing
from native.test_decode import few_rows
from native.test_fuzz import rich
from saccade import Causal, Padding, Window
from saccade.nn import Int8Rows
from saccade.operator._backends import native as backend

native = pytest.importorskip("saccade._native", reason="this installation has no native build")
pytestmark = pytest.mark.usefixtures("every_other_set")


def rounded_by_hand(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers and scales of float32 rows (n, W), number by number in float64."""
    whole, scales = np.zeros(x.shape), np.full(len(x), np.nan)
    for n, row in enumerate(x.astype(np.float64)):
        if np.isfinite(row).all():
            scales[n] = max(float(np.float32(np.abs(row).max()) / np.float32(127)), 2.0**-126)
            whole[n] = np.rint((row.astype(np.float32) / np.float32(scales[n])).astype(np.float64))
    return whole, scales


@pytest.mark.parametrize("dtype", fuzzing.DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "(B, L, H, D)", "wide rows", "unaligned"])
def test_rounding(dtype, layout):
    for width in (1, 3, 16, 17, 64, 67):
        x = drawing.laid_out((2, 3, 11, width), layout, torch.Generator().manual_seed(width), dtype)
        x[0, 0, 0], x[0, 0, 1], x[0, 0, 2, 0] = 0, torch.randn(width) * 1e-44, math.nan
        x[0, 0, 3, -1], x[0, 0, 4, 0], x[0, 0, 5] = math.inf, -math.inf, torch.randn(width) * 1e-30
        x[0, 0, 6, 0] = torch.finfo(dtype).max
        whole, scale = rounded_by_hand(x.float().reshape(-1, width).numpy())
        exact = torch.from_numpy(whole * scale[:, None]).view(x.shape)
        plain = Int8Rows.of(x)
        torch.testing.assert_close(plain.floats(torch.float64), exact, rtol=0, atol=0, equal_nan=True)
        # Half a step, and the quotient's rounding: at most 127 steps times 2^-24.
        far = (exact - x.double()).abs() <= torch.from_numpy(scale).view(*x.shape[:3], 1) * (0.5 + 127 * 2**-24)
        assert far[x.isfinite().all(-1)].all() and not exact[0, 0, 0].any()
        for instructions in fuzzing.each_set():
            found = backend.rounded_rows(x)
            assert found.shape == x.shape
            torch.testing.assert_close(found.floats(torch.float64), exact, rtol=0, atol=0, equal_nan=True)
            same = found.data[~exact.isnan().any(-1)], plain.data[~exact.isnan().any(-1)]
            assert torch.equal(*same), instructions


def attended(call: fuzzing.Draw, rows: tuple[Int8Rows, Int8Rows]) -> torch.Tensor:
    leaves = {**call.leaves, "key": rows[0], "value": rows[1]}
    return call.call(leaves, "native", lse=False)[0]


@rich
@given(drawing.calls(few_rows()))
def test_any_call(call):
    call.options.pop("dropout", None)
    rows = Int8Rows.of(call.leaves["key"]), Int8Rows.of(call.leaves["value"])
    key, value = (one.floats(torch.float64) for one in rows)
    call = dataclasses.replace(call, leaves={**call.leaves, "key": key, "value": value})
    given, few = call.cotangents(False), call.sizes[1] // key.shape[1] * call.sizes[2]
    want, least = fuzzing.truth(call, False, given), fuzzing.floors(call, False, given)["out"]
    # Everything but query and output is float32 here, whatever the query is.
    allowed = max(2 * fuzzing.plain_errors(call, torch.float32, want, False, given)["out"], least)
    for instructions in fuzzing.each_set():
        with torch.no_grad():
            assert backend.streams_rows(call.leaves["query"], *rows) == (few <= 32)
            far = fuzzing.error(attended(call, rows), want["out"])
        assert far <= allowed, f"on {instructions}: error {far:.3g}, allowed {allowed:.3g}: {call}"


def test_a_cache_of_many_chunks_whatever_the_threads():
    """Items of very different lengths, one of them empty, behind which there is NaN; beams read by a group of rows."""
    draw = torch.Generator().manual_seed(3)
    cache = torch.full((3, 2, 5021, 16), math.nan)
    lengths = torch.tensor([5021, 0, 777])
    for b, length in enumerate(lengths.tolist()):
        cache[b, :, :length] = torch.randn(2, length, 16, generator=draw)
    query, rows = torch.randn(3, 4, 2, 16, generator=draw), Int8Rows.of(cache)
    mask = (Causal() & Padding(lengths) & Window(3000, 0)).at(lengths - 2)
    exact = rows.floats(torch.float64).nan_to_num()
    want = saccade.attention(query.double(), exact, exact, mask, backend="reference")
    before = torch.get_num_threads()
    for _ in fuzzing.each_set():
        found = []
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                found.append(saccade.attention(query, rows, rows, mask, backend="native"))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(*found) and not found[0][1].any()
        # Sums of 16 products, and of 5021 weights times values, of order 1: as in plain float32.
        torch.testing.assert_close(found[0].double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", fuzzing.DTYPES, ids=str)
def test_rows_that_share_a_key_head(dtype):
    """Queries and weights of very different size: as whole numbers they need all of the 24 bits of a float."""
    for rows, width, value_width, keys in ((3, 5, 16, 1), (4, 64, 64, 67), (7, 80, 48, 700), (32, 33, 80, 130)):
        draw = torch.Generator().manual_seed(rows)
        sizes = 10.0 ** -torch.arange(width).remainder(4)
        query = (torch.randn(2, 2 * rows, 1, width, generator=draw) * sizes).to(dtype)
        key, value = (torch.randn(2, 2, keys, wide, generator=draw) for wide in (width, value_width))
        value[:, :, ::9] *= 300
        key, value = Int8Rows.of(key), Int8Rows.of(value)
        exact = [one.floats(torch.float64) for one in (key, value)]
        want = saccade.attention(query.double(), *exact, backend="reference")
        for _ in fuzzing.each_set():
            got = saccade.attention(query, key, value).double()
            # Half a unit of each of up to 80 terms, and the same of 64 weights times values of up to 1000.
            torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=3e-4 / 16)


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_nan_where_it_is_seen_and_nothing_elsewhere(side, bad):
    key, value = torch.randn(2, 1, 2, 700, 19)
    (key if side == "key" else value)[0, 1, 300, 7] = bad
    query = torch.randn(1, 4, 1, 19)
    for _ in fuzzing.each_set():
        out = saccade.attention(query, Int8Rows.of(key), Int8Rows.of(value))
        assert out[:, 2:].isnan().all() and out[:, :2].isfinite().all()
        for mask in (~Window(0, 0).at(300), Causal() & Window(350, 0)):
            out = saccade.attention(query, Int8Rows.of(key), Int8Rows.of(value), mask)
            assert out.isfinite().all()


def test_score_functions():
    """What a score of -inf hides may be NaN; reading outside of a tensor is the error that it is with floats."""
    table = torch.randn(4, 11)
    query, key, value = torch.randn(1, 4, 2, 33), *torch.randn(2, 1, 2, 701, 33)
    value[0, 0, 300] = math.nan
    rows = Int8Rows.of(key), Int8Rows.of(value)
    exact = [one.floats(torch.float64).nan_to_num() for one in rows]
    bias = table[:, (torch.arange(701) * 3) % 11][None, :, None].double()
    bias[..., 300] = -math.inf
    want = saccade.attention(query.double(), *exact, bias=bias, backend="reference")

    def hiding(s, b, h, q, k):
        return torch.where(k == 300, -math.inf, s + table[h, (3 * k) % 11])

    for _ in fuzzing.each_set():
        out = saccade.attention(query, *rows, bias=saccade.Score(hiding))
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
        with pytest.raises(IndexError, match="index"):
            saccade.attention(query, *rows, bias=saccade.Score(lambda s, b, h, q, k: s + table[h, k]))


@rich
@given(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.booleans())
def test_everything_else_reads_floats(dtype, lse):
    """Long queries, an lse, weights, dropout, float64: exactly the call with `floats` in its place."""
    query = torch.randn(2, 4, 37, 9).to(dtype)
    rows = Int8Rows.of(torch.randn(2, 2, 67, 9)), Int8Rows.of(torch.randn(2, 2, 67, 5))
    floats = [one.floats(dtype) for one in rows]
    assert torch.equal(saccade.attention(query, *rows, Causal()), saccade.attention(query, *floats, Causal()))
    few = query[:, :, :1]
    dropped = [saccade.attention(few, *pair, dropout=saccade.Dropout(0.5, 7)) for pair in (rows, floats)]
    assert torch.equal(*dropped)
    pairs = [saccade.attention_with_lse(few, *pair) for pair in (rows, floats)]
    assert torch.equal(pairs[0][0], pairs[1][0]) and torch.equal(pairs[0][1], pairs[1][1])


def test_gradients_of_the_query_are_those_with_floats():
    query, rows = torch.randn(1, 2, 1, 8, requires_grad=True), Int8Rows.of(torch.randn(1, 2, 99, 8))
    ours = torch.autograd.grad(saccade.attention(query, rows, rows).sum(), query)[0]
    floats = rows.floats(torch.float32)
    assert torch.equal(ours, torch.autograd.grad(saccade.attention(query, floats, floats).sum(), query)[0])


def test_watchers_see_the_floats_that_were_used():
    query, rows, seen = torch.randn(1, 2, 1, 8), Int8Rows.of(torch.randn(1, 2, 99, 8)), []
    from saccade.operator import _observers

    with _observers.observed_by(seen.append):
        out = saccade.attention(query, rows, rows)
    floats = rows.floats(torch.float32)
    assert torch.equal(seen[0].key, floats) and torch.equal(seen[0].value, floats)
    assert torch.equal(out, saccade.attention(query, floats, floats)) and torch.equal(seen[0].out, out)


def test_errors_are_those_of_floats():
    rows = Int8Rows.of(torch.randn(1, 2, 99, 8))
    for query, message in (
        (torch.randn(1, 3, 1, 8), "query has 3 heads"),
        (torch.randn(2, 2, 1, 8), "key has batch .* 1, expected query's 2"),
        (torch.randn(1, 2, 1, 7), "key has width .* 8, expected query's 7"),
        (torch.randn(2, 1, 8), "query must be 4-D"),
    ):
        with pytest.raises(ValueError, match=message):
            saccade.attention(query, rows, rows)
