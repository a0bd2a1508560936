"""Pooled weights of one head: the kernels and the tiles of plain PyTorch against a dense map that is pooled."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import saccade
from saccade.operator import _pooled
from saccade.operator._backends.native import _pooled as native
from saccade.operator._checks import make_call
from slowly import slow_but

B, HQ, HKV, D = 2, 6, 3, 19


def problem(name: str, rows: int, keys: int, dtype=torch.float32):
    torch.manual_seed(0)
    query, key = torch.randn(B, HQ, rows, D, dtype=dtype) * 2, torch.randn(B, HKV, keys, D, dtype=dtype)
    lengths = torch.tensor([keys - 5, keys // 2])
    given = {
        "none": {},
        "causal": {"mask": saccade.Causal()},
        "padded window": {"mask": saccade.Causal() & saccade.Window(29, 0) & saccade.Padding(lengths)},
        "some heads": {"mask": saccade.PerHead([saccade.Causal(), saccade.Window(7, 7)] * 3)},
        "predicate": {"mask": saccade.Predicate(lambda b, h, q, k: (q * 7 + k) % 3 > 0)},
        "bias": {"bias": torch.randn(B, HQ, rows, keys).masked_fill(torch.rand(rows, keys) < 0.2, -torch.inf)},
        "alibi": {"bias": saccade.ALiBi(torch.rand(HQ)), "mask": saccade.Causal()},
        "sink and softcap": {"sink": torch.randn(HQ), "softcap": 3.0, "mask": saccade.Causal(), "scale": 0.7},
        "empty rows": {"mask": saccade.Padding(torch.tensor([0, keys]))},
    }[name]
    return query, key, given


NAMES = "none, causal, padded window, some heads, predicate, bias, alibi, sink and softcap, empty rows".split(", ")


def checked(query, key, given):
    nothing = dict.fromkeys(("mask", "bias", "scale", "softcap", "sink"))
    return make_call(query, key, key, **{**nothing, **given}, dropout=0.0, needs_lse=True)


def as_double(given):
    return {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def dense(query, key, given, place):
    """Weights in float64, logits and what is visible, of one head, by the definition."""
    item, head = place
    given = as_double(given)
    mask, bias = given.get("mask"), given.get("bias")
    rows, keys = query.shape[2], key.shape[2]
    weights = saccade.attention_weights(query.double(), key.double(), **given)[item, head]
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if mask is not None:
        visible = mask.dense(rows, keys).expand(B, HQ, rows, keys)[item, head]
    if isinstance(bias, torch.Tensor):
        visible = visible & (bias[item, head] != -torch.inf)
    return weights, visible


def pool(weights, visible, rows, bins):
    """(sums, largest, counts) of bins."""
    assert weights.shape[0] == len(rows)

    def over(numbers, reduce):
        numbers = numbers.numpy()
        for axis, size in enumerate(bins):
            numbers = reduce.reduceat(numbers, range(0, numbers.shape[axis], size), axis)
        return torch.from_numpy(numbers)

    largest = over(torch.where(visible, weights, -torch.inf), np.maximum)
    return over(weights * visible, np.add), largest, over(visible.double(), np.add)


@pytest.mark.parametrize(
    ("way", "bins"),
    slow_but(
        [("native", (1, 1)), ("native", (3, 4)), ("native", (32, 64)), ("tiles", (3, 4))],
        ("native", (3, 4)),
        ("tiles", (3, 4)),
    ),
)
@pytest.mark.parametrize("name", NAMES)
def test_pools_what_the_dense_map_has(name, bins, way, monkeypatch):
    if way == "tiles":
        monkeypatch.setattr(_pooled.native, "refuses", lambda *given: "tiles are wanted")
    query, key, given = problem(name, 211, 257)
    call = checked(query, key, given)
    assert (native.refuses(call, range(64, 257), bins) is None) == (way == "native")
    place, rows, keys = (1, 4), range(64, 211), range(64, 257)
    weights, visible = dense(query, key, given, place)
    lse = saccade.statistics(query.double(), key.double(), **as_double(given), received=False).lse[place]
    torch.testing.assert_close(_pooled.row_lse(call, place, range(0, 211)), lse, atol=1e-5, rtol=0)
    want = pool(weights[64:, 64:], visible[64:, 64:], rows, bins)
    some = torch.tensor([1, 63, 64, 65, 199, 210, 0, 100])
    listed = pool(weights[some][:, 64:], visible[some][:, 64:], some, (2, bins[1]))
    for known in (lse, None):
        for found, wanted in (
            (_pooled.pooled(call, place, rows, keys, bins, known), want),
            (_pooled.pooled(call, place, some, keys, (2, bins[1]), known), listed),
        ):
            assert torch.equal(found.counts.double(), wanted[2])
            # A weight is exp of a difference of logits up to 32, so it errs by some 2 ** -19 of itself.
            tolerance = 2.0**-18 * wanted[0].clamp(min=1e-6) + 1e-9
            assert ((found.sums.double() - wanted[0]).abs() <= tolerance).all()
            assert torch.equal(found.largest == -torch.inf, wanted[2] == 0)
            seen = wanted[2] > 0
            assert ((found.largest.double() - wanted[1])[seen].abs() <= 2.0**-18 * wanted[1][seen] + 1e-9).all()


@pytest.mark.parametrize("name", ["causal", "alibi", "sink and softcap"])
def test_pools_logits(name):
    query, key, given = problem(name, 101, 103)
    call = checked(query, key, given)
    weights, visible = dense(query, key, given, (0, 5))
    found = _pooled.pooled(call, (0, 5), range(0, 101), range(0, 103), (1, 1), logits=True)
    lse = saccade.statistics(query.double(), key.double(), received=False, **given).lse[0, 5][:, None]
    logits = weights.log() + lse
    seen = visible & (weights > 0)
    torch.testing.assert_close(found.largest[seen].double(), logits[seen], atol=2e-5, rtol=2e-5)
    assert torch.equal(found.counts > 0, visible)


def test_halves_are_pooled_in_single_precision():
    query, key, given = problem("causal", 97, 97, torch.bfloat16)
    call = checked(query, key, given)
    weights, _ = dense(query, key, given, (1, 3))
    found = _pooled.pooled(call, (1, 3), range(0, 97), range(0, 97), (1, 1))
    assert found.sums.dtype == torch.float32
    torch.testing.assert_close(found.sums.double(), weights, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["causal", "padded window", "bias", "sink and softcap"])
def test_precise_weights_are_so_however_large_the_logits(name):
    query, key, given = problem(name, 101, 103)
    query *= 60
    call = checked(query, key, given)
    weights, visible = dense(query, key, given, (1, 4))
    lse = _pooled.row_lse(call, (1, 4), range(101), precise=True)
    for known in (lse, None):
        found = _pooled.pooled(call, (1, 4), range(101), range(103), (1, 1), known, precise=True)
        assert torch.equal(found.counts > 0, visible)
        # float32 terms of the denominator, and weights that are rounded to float32
        assert ((found.sums.double() - weights).abs() <= 2.0**-22 * weights + 1e-12).all()


@pytest.mark.parametrize("way", ["native", "tiles"])
def test_an_lse_of_thousands_shifts_no_weight(way, monkeypatch):
    """Logits that are float32 numbers exactly, so that only the way from them to weights can err."""
    if way == "tiles":
        monkeypatch.setattr(_pooled.native, "refuses", lambda *given: "tiles are wanted")
    torch.manual_seed(1)
    query = torch.zeros(1, 1, 67, D)
    key = torch.zeros(1, 1, 71, D)
    query[..., 0] = 1
    key[..., 0] = 4096 + torch.randint(-2048, 2048, (71,)) / 256
    call = checked(query, key, {"scale": 1.0, "sink": torch.tensor([4095.3])})
    weights = saccade.attention_weights(query.double(), key.double(), scale=1.0, sink=call.sink.double())[0, 0]
    lse = _pooled.row_lse(call, (0, 0), range(67))
    for known in (lse, None):
        found = _pooled.pooled(call, (0, 0), range(67), range(71), (1, 1), known)
        assert ((found.sums.double() - weights).abs() <= 2.0**-21 * weights + 1e-12).all()


@pytest.mark.parametrize("way", ["native", "tiles"])
def test_a_nan_spoils_the_bins_of_its_rows_and_no_other(way, monkeypatch):
    if way == "tiles":
        monkeypatch.setattr(_pooled.native, "refuses", lambda *given: "tiles are wanted")
    query, key, given = problem("causal", 101, 101)
    query[1, 4, 13] = torch.nan  # all of a row
    key[1, 2, 97, 3] = torch.nan  # one key, which rows 97 to 100 see
    call = checked(query, key, given)
    lse = _pooled.row_lse(call, (1, 4), range(101))
    spoiled = torch.tensor([13, 97, 98, 99, 100])
    assert torch.equal(lse.isnan().nonzero()[:, 0], spoiled)
    visible = torch.ones(101, 101, dtype=torch.bool).tril()
    for known in (lse, None):
        found = _pooled.pooled(call, (1, 4), range(101), range(101), (1, 1), known)
        want = torch.zeros(101, 101, dtype=torch.bool)
        want[spoiled] = visible[spoiled]
        assert torch.equal(found.sums.isnan(), want) and torch.equal(found.largest.isnan(), want)
        bins = _pooled.pooled(call, (1, 4), range(101), range(101), (8, 32), known)
        assert torch.equal(bins.largest.isnan(), pool(want.double(), visible, range(101), (8, 32))[1] > 0)
