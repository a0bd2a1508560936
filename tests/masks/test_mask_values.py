"""Masks are values: nothing that happens later changes one."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from saccade import _masks as masks
from saccade._masks import (
    Blocks,
    Causal,
    Documents,
    Edges,
    FromTensor,
    Global,
    Padding,
    PerHead,
    Prefix,
    RandomBlocks,
    Window,
)


def sources():
    flags = torch.rand(2, 7, generator=torch.Generator().manual_seed(1)) < 0.5
    return [
        (Padding, torch.tensor([3, 7])),
        (Padding, flags.clone()),
        (lambda t: Padding([7, 7], queries=t), torch.tensor([3, 7])),
        (Documents, torch.tensor([0, 0, 1, 1, 2, 2, 2])),
        (lambda t: Documents(torch.zeros(7, dtype=torch.int64), t), torch.tensor([0, 0, 1, 1, 2, 2, 2])),
        (Documents.from_cu_seqlens, torch.tensor([0, 3, 7])),
        (Prefix, torch.tensor([3, 5])),
        (Global, torch.tensor([3, 5])),
        (Global, flags.clone()),
        (lambda t: Edges(t, torch.tensor([0, 1, 2])), torch.tensor([3, 5, 6])),
        (lambda t: Blocks(t, 4), torch.tensor([[True, False], [True, True]])),
        (FromTensor, torch.rand(7, 7, generator=torch.Generator().manual_seed(1)) < 0.5),
        (lambda t: Causal().at(t), torch.tensor([0, 2])),
    ]


@pytest.mark.parametrize("number", range(len(sources())))
def test_editing_the_source_changes_nothing(number):
    make, source = sources()[number]
    mask, twin = make(source), make(source.clone())
    before = mask.dense(7, 7)
    kinds = [mask._kind((i, i + 1), (j, j + 1), 7, 7) for i in range(7) for j in range(7)]
    source.copy_(~source if source.dtype == torch.bool else torch.zeros_like(source))
    assert torch.equal(mask.dense(7, 7), before)
    assert [mask._kind((i, i + 1), (j, j + 1), 7, 7) for i in range(7) for j in range(7)] == kinds
    assert mask == twin and hash(mask) == hash(twin)
    assert mask != make(source) or torch.equal(make(source).dense(7, 7), before)


def test_arrays_are_copied_too():
    lengths = np.array([3, 7])
    mask = Padding(lengths)
    lengths[:] = 0
    assert mask == Padding([3, 7])


def test_attributes_cannot_be_set():
    for mask in (Causal(), Window(1, 2), Causal() & Window(1, 2), ~Causal(), Causal().at(3)):
        with pytest.raises(AttributeError, match="immutable"):
            mask.left = 5
        with pytest.raises(AttributeError, match="immutable"):
            del mask.left


def test_equality_is_by_value():
    assert Causal() == Causal() and Causal() != Window(None, 0) and Causal() != "Causal()"
    assert Window(1, 2) != Window(2, 1)
    assert Padding([3, 4]) == Padding(torch.tensor([3, 4], dtype=torch.int32)) == Padding(np.array([3, 4]))
    assert Padding([1]) != Padding([[True]]) and Padding([3]) != Padding([3], queries=[3])
    assert Edges([2, 0, 0], [1, 1, 1]) == Edges([0, 2], [1, 1])
    assert Global([3, 1, 3]) == Global([1, 3])
    assert (Causal() & Window(1, 1)) & Padding([3]) == Causal() & (Window(1, 1) & Padding([3]))
    assert Causal() & Window(1, 1) != Causal() | Window(1, 1)
    assert ~~Causal() == Causal()
    assert Causal().at(2) != Causal().at(3) and Causal().at(2) != Causal().at([2])
    assert FromTensor(torch.ones(3, 5, dtype=torch.bool)) != FromTensor(torch.ones(1, 1, 3, 5, dtype=torch.bool))
    assert len({Causal(), Causal(), Window(1, 1), Window(1, 1), RandomBlocks(1, 2, 3), PerHead([Causal()])}) == 4


def test_reprs_can_be_read_back():
    mask = (Causal() & (Window(3, None) | ~Global([0, 5])) & Padding([3, 4], queries=[1, 2])).at([1, 2])
    assert repr(mask) == (
        "(Causal() & (Window(3, None) | ~Global([0, 5])) & Padding([3, 4], queries=[1, 2])).at([1, 2])"
    )
    assert eval(repr(mask), vars(masks)) == mask
    assert repr(Documents(torch.arange(100))) == "Documents(<100 int>)"
    assert repr(~(Causal() | Window(1, 1))) == "~(Causal() | Window(1, 1))"
    assert repr(Causal().slice(slice(1, 3), range(2, 5), lengths=(7, 7))) == (
        "Causal().slice((1, 3), (2, 5), lengths=(7, 7))"
    )


def test_copies():
    mask = Causal() & Documents([0, 0, 1]) & FromTensor(torch.ones(3, 3, dtype=torch.bool))
    for twin in (copy.copy(mask), copy.deepcopy(mask)):
        assert twin == mask and torch.equal(twin.dense(3, 3), mask.dense(3, 3))


def test_what_is_made_from_lists_belongs_to_no_device():
    """Lists go wherever the query is; tensors are where the user put them."""
    lists = Causal() & Padding([3, 4]) & Global([1]) & Edges([1], [2]) & Documents([0] * 9)
    assert lists._device() is None
    lists &= Documents.from_cu_seqlens([0, 3, 9]) & Prefix([1, 2]) & Blocks([[True]], 9)
    assert lists._device() is None and lists.at([1, 2])._device() is None
    lists._check(2, 1, 5, 7, torch.device("meta"))
    assert (Causal() & Padding(torch.tensor([3, 4])))._device() == torch.device("cpu")


def test_moving():
    mask = PerHead([Causal() & Padding(torch.tensor([3, 4])), ~FromTensor(torch.ones(5, 7, dtype=torch.bool))]).at(2)
    assert mask.to("cpu") == mask
    away = mask.to("meta")
    assert away._device() == torch.device("meta") and mask._device() == torch.device("cpu")
    away._check(2, 2, 5, 7, torch.device("meta"))


def test_every_name_is_exported():
    patterns = {Blocks, Causal, Documents, Edges, FromTensor, Global, Padding, PerHead, Prefix, RandomBlocks, Window}
    patterns |= {masks.Fixed, masks.Strided, masks.Predicate, masks.Mask}
    assert {pattern.__name__ for pattern in patterns} <= set(masks.__all__)
