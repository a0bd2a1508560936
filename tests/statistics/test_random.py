"""Random calls of any mask, bias, option, dtype and memory layout against dense float64, and what must hold of each."""

from __future__ import annotations

import math

import hypothesis
import pytest
import torch

import dense_statistics
import saccade
from native import drawing
from problems import NATIVE

BACKENDS = ["chunked", NATIVE]
WORK = 2**19  # the judge's B Hq Lq Lk, times the widths


def observed(draw, backend, **more):
    leaves = draw.leaves
    bias = leaves.get("bias")
    if "slopes" in leaves:
        bias = saccade.ALiBi(leaves["slopes"])
    elif "table" in leaves:
        bias = saccade.RelativeBias(leaves["table"], **draw.relative)
    options = {name: option for name, option in draw.options.items() if name != "dropout"}
    return saccade.statistics(
        leaves["query"],
        leaves["key"],
        draw.mask,
        value=leaves["value"],
        bias=bias,
        sink=leaves.get("sink"),
        backend=backend,
        **options,
        **more,
    )


def judged(draw):
    leaves = {name: leaf.double() for name, leaf in draw.leaves.items()}
    batch, heads, rows, keys = draw.sizes
    seen = torch.ones(batch, heads, rows, keys, dtype=torch.bool)
    if draw.mask is not None:
        seen = draw.mask.dense(rows, keys).expand(seen.shape)
    dense = draw.dense(leaves)
    if dense is not None:
        dense = dense.expand(seen.shape)
        seen = seen & (dense != -math.inf)
    options = {name: option for name, option in draw.options.items() if name != "dropout"}
    judge = dense_statistics.Dense(
        leaves["query"], leaves["key"], seen, bias=dense, sink=leaves.get("sink"), standing=draw.offset, **options
    )
    off = dense_statistics.bound(judge, leaves["query"], leaves["key"], torch.float32, options.get("scale"))
    return judge, off


def check(draw, backend):
    judge, off = judged(draw)
    batch, _, rows, keys = judge.p.shape
    group = torch.rand(batch, keys, generator=torch.Generator().manual_seed(draw.seed)) < 0.3
    top = min(keys, 3)
    got = observed(draw, backend, groups={"some": group, "others": ~group}, top=top)
    reach = max([0, *map(abs, draw.offset)]) if isinstance(draw.offset, list) else abs(draw.offset or 0)

    def near(found, want, atol):
        torch.testing.assert_close(found.double(), want.double().expand(found.shape), rtol=0, atol=atol)

    assert torch.equal(got.counted, judge.counted)
    assert torch.equal(got.keys_seen.expand(judge.counted.shape), judge.keys_seen)
    near(torch.where(judge.counted, got.lse, 0), torch.where(judge.counted, judge.lse, 0), off)
    near(got.entropy, judge.entropy, off * (math.log(max(keys, 1)) + 2))
    near(got.largest, judge.largest if keys else torch.zeros(1), off)
    near(got.distance, judge.distance, off * (keys + rows + reach))
    near(got.received, judge.received, off * rows)
    for step, name in ((0, "self"), (-1, "previous"), (1, "next")):
        near(got.mass[name], judge.beside(step), off)
    if keys:
        near(got.mass["first"], judge.first, off)
    near(got.mass["sink"], judge.sink, off)
    near(got.mass["some"], judge.on(group[:, None, None]), off)
    near(got.top_weights, torch.sort(judge.p, dim=-1, descending=True).values[..., :top], off)
    holds(got, judge, off)


def holds(got, judge, off):
    """What is true of the numbers among themselves, whatever the call."""
    keys, rows = judge.p.shape[-1], judge.p.shape[2]
    whole = judge.counted.double()
    # groups that partition the keys, and the sink, are all there is
    parts = got.mass["some"].double() + got.mass["others"] + got.mass["sink"]
    torch.testing.assert_close(parts, whole, rtol=0, atol=3 * off)
    received = got.received.sum(-1).double()
    torch.testing.assert_close(received, (whole - got.mass["sink"]).sum(-1), rtol=0, atol=2 * off * max(1, rows))
    share = 1 - got.mass["sink"].double()
    # H = P log(1 / P) + P H(p / P), and H(p / P) <= log n
    most = share * torch.log(got.keys_seen.clamp(min=1).double()) - torch.special.xlogy(share, share)
    assert (got.entropy <= most + off * (math.log(max(keys, 1)) + 2)).all()
    assert (got.entropy >= 0).all()
    assert ((got.evenness >= 0) & (got.evenness <= 1)).all()
    assert (got.largest_at.ge(0) == judge.counted).all()
    if got.top_keys.shape[-1]:
        assert torch.equal(got.top_keys[..., 0], got.largest_at)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@hypothesis.given(draw=drawing.calls(work=WORK))
def test_any_call(backend, draw):
    check(draw, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@hypothesis.given(draw=drawing.small_calls())
def test_any_mask_expression(backend, draw):
    check(draw, backend)


@hypothesis.given(draw=drawing.small_calls())
def test_the_specification(draw):
    check(draw, "reference")
