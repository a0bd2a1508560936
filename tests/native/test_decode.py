"""Decoding: few query rows against many keys, on both sides of where its kernel is chosen; more cases are test_fuzz's.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D and Dv widths.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

import saccade
from native import drawing, fuzzing
from native.drawing import Sizes
from native.fuzzing import Draw
from native.test_fuzz import rich
from saccade import Causal, Padding, Window
from slowly import slow_but

native = pytest.importorskip("saccade._native", reason="this installation has no native build")
pytestmark = pytest.mark.usefixtures("every_other_set")


@st.composite
def few_rows(draw) -> Sizes:
    """Rows of a group around the largest number that is decoded, keys around the fewest and its chunks of 512."""
    rows, group = draw(st.integers(1, 9)), draw(st.sampled_from([1, 1, 2, 3, 4, 8, 9]))
    keys = draw(st.sampled_from([253, 255, 256, 257, 300, 511, 512, 513, 1021, 1024, 1025, 1540]))
    width, value_width = draw(drawing.widths), draw(drawing.widths)
    batch, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    while batch * kv_heads * group * rows * keys * (width + value_width) > 2**21:
        if batch * kv_heads > 1:
            batch, kv_heads = 1, 1
        elif rows > 1:
            rows = 1
        elif group > 2:
            group = 2
        else:
            width, value_width = (width + 1) // 2, (value_width + 1) // 2
    return Sizes(batch, kv_heads * group, kv_heads, rows, keys, width, value_width)


@rich
@given(drawing.calls(few_rows()), st.booleans())
def test_any_call(call, lse):
    fuzzing.check(call, lse)


@rich
@given(drawing.calls(few_rows().filter(lambda s: native.decodes(s.rows, s.heads // s.kv_heads, s.keys))))
def test_results_do_not_depend_on_gradients(call):
    """Nobody asks for an lse then, and none is kept."""
    for _ in fuzzing.each_set():
        (alone,) = call.call(call.leaves, "native", lse=False)
        assert torch.equal(alone, fuzzing.ours(call)["out"])


def test_the_threshold():
    assert native.decodes(8, 1, 64) and native.decodes(1, 8, 64) and native.decodes(2, 4, 1000)
    assert not native.decodes(9, 1, 64) and not native.decodes(3, 3, 64) and not native.decodes(1, 1, 63)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", slow_but(fuzzing.DTYPES, torch.float32), ids=str
)  # fewer chunks in halves: test_any_call
def test_a_cache_of_many_chunks(dtype):
    """131 071 keys in memory of a longer cache, items of very different lengths, one of them empty.

    A few chunks of the other dtypes: test_any_call.
    """
    draw = torch.Generator().manual_seed(3)
    cache = torch.full((3, 131072, 2, 16), math.nan, dtype=dtype)
    lengths = torch.tensor([131071, 0, 777])
    for b, length in enumerate(lengths.tolist()):
        cache[b, :length] = torch.randn(length, 2, 16, generator=draw)
    key = cache.transpose(1, 2)[:, :, :131071]
    query = torch.randn(3, 4, 2, 16, generator=draw).to(dtype)
    mask = (Causal() & Padding(lengths)).at(lengths - 2)
    judges = {}
    for b in (0, 2):
        n = int(lengths[b])
        one = Draw({"query": query[b : b + 1], "key": key[b : b + 1, :, :n], "value": key[b : b + 1, :, :n]}, Causal())
        exact = fuzzing.formula(one, {k: t.double() for k, t in one.leaves.items()}, torch.arange(n))
        plain = fuzzing.formula(one, one.leaves, torch.arange(n))
        least = fuzzing.floors(one, True, one.cotangents())
        judges[b] = [
            (name, want, max(2 * fuzzing.error(theirs, want), least[name]))
            for name, want, theirs in zip(("out", "lse"), exact, plain, strict=False)
        ]
    for _ in fuzzing.each_set():
        out, lse = saccade.attention_with_lse(query, key, key, mask, backend="native")
        assert (out[1] == 0).all() and (lse[1] == -math.inf).all()
        for b, judged in judges.items():
            for got, (name, want, allowed) in zip((out, lse), judged, strict=False):
                assert fuzzing.error(got[b : b + 1], want) <= allowed, name


@pytest.mark.parametrize("dtype", fuzzing.DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_rows_are_those_of_longer_queries(rows, dtype):
    """The same rows among 61, which are not decoded: within the same error of the truth."""
    draw = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(2, 2, n, 33, generator=draw).to(dtype) for n in (61, 1021, 1021))
    last = query[:, :, -rows:]
    assert native.decodes(rows, 1, 1021) and not native.decodes(61, 1, 1021)
    for mask in (Causal(), Window(700, 0), None):
        call = Draw({"query": last, "key": key, "value": value}, mask)
        want = fuzzing.formula(call, {k: t.double() for k, t in call.leaves.items()}, torch.arange(1021))[0]
        plain = fuzzing.error(fuzzing.formula(call, call.leaves, torch.arange(1021))[0], want)
        allowed = max(2 * plain, fuzzing.floors(call, False, call.cotangents(False))["out"])
        for instructions in fuzzing.each_set():
            whole = saccade.attention(query, key, value, mask, backend="native")[:, :, -rows:]
            few = saccade.attention(last, key, value, mask, backend="native")
            assert fuzzing.error(few, want) <= allowed and fuzzing.error(whole, want) <= allowed, instructions
