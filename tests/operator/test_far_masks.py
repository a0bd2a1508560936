"""Masks that name positions far away, and calls that stand there: right, and at no cost for the distance."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings, strategies as st

from looped import looped
from masks.mask_sets import table
from saccade import Causal, Columns, Dilated, Edges, Fixed, FromTensor, Global, RandomBlocks, Strided, Window, attention
from saccade.operator._backends.native._lowering import is_structured, lower

BATCH, LQ, LK = 3, 5, 11
BACKENDS = ("native", "chunked")
BASES = (0, 2**20 - 3, 10**9, 2**53 - 64)
positions = st.sampled_from(BASES).flatmap(lambda base: st.integers(base, base + LK + 2))


def problem():
    generator = torch.Generator().manual_seed(0)
    sizes = ((BATCH, 1, length, 4) for length in (LQ, LK, LK))
    return [torch.randn(size, generator=generator, requires_grad=True) for size in sizes]


def answers(backend, mask):
    tensors = problem()
    out = attention(*tensors, mask=mask, backend=backend)
    return [out, *torch.autograd.grad(out.square().sum(), tensors)]


def check(mask, expected):
    """The mask's bits, and outputs and gradients against the rule of a tensor."""
    assert torch.equal(mask.dense(LQ, LK).expand_as(expected), expected), repr(mask)
    exact = answers("reference", FromTensor(expected))
    for backend in BACKENDS:
        for mine, theirs in zip(answers(backend, mask), exact, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=f"{backend}: {mask!r}")


@pytest.mark.slow
@settings(max_examples=25)
@given(
    tokens=st.sets(positions, max_size=8),
    edges=st.sets(st.tuples(positions, positions), max_size=30),
    offset=st.sampled_from(BASES) | st.lists(st.sampled_from(BASES), min_size=BATCH, max_size=BATCH),
    key=st.sampled_from(BASES) | st.none(),
    causal=st.booleans(),
)
def test_tokens_and_edges_far_away(tokens, edges, offset, key, causal):
    mask = Global(sorted(tokens)) | Edges([q for q, _ in edges], [k for _, k in edges])
    mask = mask & Causal() if causal else mask
    first = key or 0

    def meaning(b, h, i, p, j):
        at, j = (offset[b] if isinstance(offset, list) else offset) + i, j + first
        return (at in tokens or j in tokens or (at, j) in edges) and (j <= at or not causal)

    mask = mask.at(offset)
    if key is not None:
        mask = mask.slice((0, LQ), (key, key + LK))
    check(mask, table(meaning, LQ, LK, BATCH, 1))


@looped("far", [2**20, 2**30 + 1, 2**52 + 3])
@looped("whole", ["slice", "slice of at"])
def test_patterns_of_remainders_in_a_slice_far_away(whole, far):
    shown = {
        Strided(3): lambda p, j: p - j >= 0 and (p - j <= 3 or (p - j) % 3 == 0),
        Fixed(4, 2): lambda p, j: j <= p and (j // 4 == p // 4 or j % 4 >= 2),
        Dilated(3): lambda p, j: (j - p) % 3 == 0,
        Columns(5, 2): lambda p, j: j % 5 >= 3,
    }
    for mask, meaning in shown.items():
        rows, keys = (far, far + LQ), (far - 4, far - 4 + LK)
        lengths = (far + 50, far + 51)
        cut = mask.slice(rows, keys, lengths=lengths) if whole == "slice" else mask.at(1).slice(rows, keys)
        check(cut, table(lambda b, h, i, p, j: meaning(far + 1 + i, far - 4 + j), LQ, LK, BATCH, 1))  # noqa: B023


@pytest.mark.parametrize("symmetric", [False, True])
def test_random_blocks_in_a_slice_far_away(symmetric):
    far = 2**40
    # Nearly all of the blocks before a block are drawn, as far as its parts reach.
    mask = RandomBlocks(7, 2**38, 3, symmetric=symmetric) | RandomBlocks(7, 1, 40, symmetric=symmetric)
    cut = mask.at(0).slice((far, far + LQ), (far - 3, far - 3 + LK))
    rows, keys = (torch.arange(start, start + size) for start, size in ((far, LQ), (far - 3, LK)))
    check(cut, mask.at(0)._grid(rows, keys, 2**41, 2**41).expand(BATCH, 1, LQ, LK))


@pytest.mark.parametrize("offset", [0, 10**9, [0, 10**9, 2**53 - 64]], ids=repr)
def test_tables_are_those_of_the_call(offset):
    far = (10**9, 2**53 - 60, 2**53)
    for mask in (Global([3, *far]), Edges([2, *far], [1, 5, *far[1:]])):
        placed = mask.at(offset)
        made = [one.values for one in mask.tables()] + lower(placed, LQ, LK).tensors
        assert sum(one.numel() for one in made) <= 4 * len(far) + BATCH * (LQ + LK) + 4 * LQ * BATCH, repr(placed)
        assert not is_structured(placed)
        assert pickle.loads(pickle.dumps(placed)) == placed == mask.to("cpu").at(offset)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # TorchDynamo's own
@pytest.mark.parametrize(
    "mask", [Global([2**21]), Edges([2**21, 3], [5, 2]), Window(3, 3) | Global([5, 2**21])], ids=repr
)
def test_one_graph_takes_far_positions(mask):
    query = torch.randn(1, 2, LQ, 5)
    compiled = torch.compile(lambda query: attention(query, query, query, mask), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(query), attention(query, query, query, mask, backend="reference"))


def test_graphs_hold_what_is_alike_for_all_lengths():
    assert is_structured(Global([3, 2**20 - 1]).at(10**9) & Edges([1, 2**20 - 1], [2**53, 0]).at(10**9))
    assert is_structured(Causal().at(0).slice((10**9, 10**9 + LQ), (10**9, 10**9 + LK)))
    assert not is_structured(Strided(3).at(0).slice((10**9, 10**9 + LQ), (10**9, 10**9 + LK)))
