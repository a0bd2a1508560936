"""The rule as FlexAttention uses it: on scalars, under vmap, traced without a break."""

from __future__ import annotations

import pytest
import torch

from looped import looped
from saccade.operator._masks import (
    Blocks,
    Causal,
    Chunks,
    Columns,
    Dilated,
    Documents,
    Edges,
    Fixed,
    FromTensor,
    Global,
    Padding,
    PerHead,
    Predicate,
    Prefix,
    RandomBlocks,
    Strided,
    Window,
)

BATCH, HEADS, LENGTH = 2, 3, 41


def masks():
    bits = torch.rand(BATCH, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.4
    nodes = torch.randint(LENGTH, (2, 99), generator=torch.Generator().manual_seed(0))
    return [
        Padding([17, 41], torch.tensor([3, 37])),
        Padding(bits[:, 0, 0]) & Causal(),
        Documents.from_cu_seqlens([0, 23, 41]) | Window(2, 3),
        Documents(torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) // 7),
        PerHead([Strided(8), Fixed(8, 2), Prefix([3, 29])]),
        PerHead([Dilated(3), Chunks(8, 1), Columns(8, 2) & Causal()]),
        Global([3, 31, 2**53]) | Edges([1, 7, 2**53], [5, 40, 3]),
        Global([3, 31]) & ~RandomBlocks(3, 4, 2, symmetric=True),
        Blocks(bits[0, :, :9, :9], 5) & Edges(*nodes),
        FromTensor(bits[:, :1]),
        Predicate(lambda b, h, q, k: k <= q + h, heads=HEADS).at([0, 2]),
        (Causal() & Window(9, None)).slice((13, 54), (7, 48), lengths=(59, 61)),
    ]


def every_pair(mask):
    """The rule, one pair at a time, as a function of four ranges."""

    def rule(b, h, row, key):
        return mask._attends(b, h, row, key, LENGTH, LENGTH)

    for axis in (3, 2, 1, 0):
        rule = torch.vmap(rule, tuple(0 if n == axis else None for n in range(4)))
    return rule


RANGES = [torch.arange(n) for n in (BATCH, HEADS, LENGTH, LENGTH)]


@looped("mask", masks())
def test_vmap(mask):
    expected = mask.dense(LENGTH, LENGTH).expand(BATCH, HEADS, LENGTH, LENGTH)
    assert torch.equal(every_pair(mask)(*RANGES), expected)


@pytest.mark.slow
@pytest.mark.parametrize("mask", masks(), ids=repr)
def test_one_graph(mask):
    torch._dynamo.reset()
    traced = torch.compile(every_pair(mask), fullgraph=True, backend="eager")
    expected = mask.dense(LENGTH, LENGTH).expand(BATCH, HEADS, LENGTH, LENGTH)
    assert torch.equal(traced(*RANGES), expected)
