"""Masks are values: nothing that happens later changes one."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import func
from torch._subclasses.fake_tensor import FakeTensorMode

from looped import looped
from saccade import attention
from saccade.operator import _masks as masks
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
    Prefix,
    RandomBlocks,
    Strided,
    Window,
    keys_seen,
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


@looped("number", range(len(sources())))
def test_editing_the_source_changes_nothing(number):
    make, source = sources()[number]
    mask, twin = make(source), make(source.clone())
    before = mask.dense(7, 7)
    kinds = [mask.kind((i, i + 1), (j, j + 1), 7, 7) for i in range(7) for j in range(7)]
    source.copy_(~source if source.dtype == torch.bool else torch.zeros_like(source))
    assert torch.equal(mask.dense(7, 7), before)
    assert [mask.kind((i, i + 1), (j, j + 1), 7, 7) for i in range(7) for j in range(7)] == kinds
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


def test_masks_that_differ_in_one_argument_are_unequal():
    # What is remembered for a mask (a cache's last answer, a layer's chance) is found by equality.
    different = [
        *(Window(1, 2), Window(1, 3), Window(2, 2), Prefix(3), Prefix(4), Strided(3), Strided(4)),
        *(Fixed(5, 2), Fixed(5, 3), Fixed(7, 2), Dilated(2), Dilated(3), Columns(5, 2), Columns(5, 3), Columns(7, 2)),
        *(Chunks(5), Chunks(7), Chunks(5, 1), Chunks(5, 0, 1), Global([1]), Global([2])),
        *(RandomBlocks(1, 2, 3), RandomBlocks(2, 2, 3), RandomBlocks(1, 3, 3), RandomBlocks(1, 2, 4)),
        RandomBlocks(1, 2, 3, symmetric=True),
        *(Documents([0, 1]), Documents([0, 2]), Documents([0, 1], [0, 1]), Documents([0, 1], [0, 2])),
        *(Blocks([[True, False]], 2), Blocks([[True, False]], 3), Blocks([[True, True]], 2)),
        *(Edges([0], [1]), Edges([0], [2]), Edges([1], [1]), PerHead([Causal()]), PerHead([Causal(), Causal()])),
        *(Padding([2]), Padding([3]), Padding([2], queries=[2]), Padding([2], queries=[3])),
    ]
    assert len(set(different)) == len(different)


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
    lists.check(2, 1, 5, 7, torch.device("meta"))
    assert (Causal() & Padding(torch.tensor([3, 4])))._device() == torch.device("cpu")


def test_moving():
    mask = PerHead([Causal() & Padding(torch.tensor([3, 4])), ~FromTensor(torch.ones(5, 7, dtype=torch.bool))]).at(2)
    assert mask.to("cpu") == mask
    away = mask.to("meta")
    assert away._device() == torch.device("meta") and mask._device() == torch.device("cpu")
    away.check(2, 2, 5, 7, torch.device("meta"))


BUILDERS = {
    "padding": lambda: Padding([3, 7], queries=np.array([7, 2])),
    "marked padding": lambda: Padding(torch.arange(7) < torch.tensor([[3], [7]])),
    "documents": lambda: Documents([0, 0, 1, 1, 1, 2, 2]),
    "cumulative": lambda: Causal() & Documents.from_cu_seqlens(torch.tensor([0, 3, 7])),
    "placed": lambda: Causal().at([1, 2]) & Padding([3, 7]),
    "prefix": lambda: Prefix(torch.tensor([2, 5])),
    "global": lambda: Window(1, 1) | Global([5, 0]) | Global([[True] + [False] * 6]),
    "edges": lambda: Edges([0, 2, 6], torch.tensor([1, 0, 6])),
    "blocks": lambda: Blocks([[True, False], [True, True]], 4),
    "tensor": lambda: FromTensor(torch.ones(7, 7, dtype=torch.bool).tril(1)),
    "heads": lambda: PerHead([Causal(), Padding([3, 7]).to("cpu")]),
}
every_mask = looped("build", BUILDERS.values())


def made_within(build, transform):
    """The mask that `build` makes while torch.func or a mode is at work; it is also asked for its meaning there."""
    made = []

    def function(x):
        made.append(build())
        made[0].dense(7, 7)
        return x.sum()

    transform(function)(torch.randn(3))
    return made[0]


TRANSFORMS = {
    "grad": func.grad,
    "vmap of grad": lambda f: func.vmap(func.grad(f)),
    "jvp": lambda f: lambda x: func.jvp(f, (x,), (x,)),
    "hessian": func.hessian,
}


@every_mask
@looped("transform", TRANSFORMS.values())
def test_a_mask_outlives_the_transform_it_is_made_in(build, transform):
    mask = made_within(build, transform)
    assert mask == build() and pickle.loads(pickle.dumps(mask)) == mask
    assert torch.equal(mask.dense(7, 7), build().dense(7, 7))
    assert keys_seen(mask, 7, 7) is None or torch.equal(keys_seen(mask, 7, 7), keys_seen(build(), 7, 7))


@every_mask
def test_a_mask_made_in_inference_mode_trains(build):
    with torch.inference_mode():
        mask = build()
        attention(*torch.randn(3, 2, 2, 7, 16), mask)
    tensors = [torch.randn(2, 2, 7, 16).requires_grad_() for _ in range(3)]
    found, wanted = (
        torch.autograd.grad(attention(*tensors, m, backend="auto").square().sum(), tensors) for m in (mask, build())
    )
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    assert not any(tensor.is_inference() for tensor in _tensors_of(mask))


@looped("name", sorted(set(BUILDERS) - {"marked padding", "cumulative", "prefix", "edges", "tensor"}))
def test_lists_among_fake_tensors(name):
    with FakeTensorMode():
        mask = BUILDERS[name]()
    assert mask == BUILDERS[name]() and torch.equal(mask.dense(7, 7), BUILDERS[name]().dense(7, 7))


def test_lists_under_a_default_device():
    with torch.device("meta"):
        mask = Padding([3, 5]) & Documents([]) & Global([1]) & Edges([1], [2])
    assert {tensor.device.type for tensor in _tensors_of(mask)} == {"cpu"}


@looped("make", [Padding, Prefix, Documents, Causal().at, lambda t: Edges(t, t)])
def test_values_that_differ_by_call_of_vmap_are_refused(make):
    with pytest.raises(ValueError, match=r"torch\.vmap runs over it, and a mask needs its values"):
        func.vmap(lambda t: (make(t), t)[1])(torch.tensor([[3, 5], [1, 2]]))


def test_arguments_of_grad_can_be_read():
    """torch.func.grad wraps every argument, also those it does not differentiate."""
    lengths, bits = torch.tensor([3, 5]), torch.ones(5, 5, dtype=torch.bool).tril()
    made = []

    def loss(x, lengths, bits):
        made.extend((Padding(lengths), FromTensor(bits)))
        return x.sum()

    func.grad(loss)(torch.randn(2), lengths, bits)
    assert made == [Padding(lengths), FromTensor(bits)]


def test_what_padding_remembers_stays_with_it():
    padding = Padding([3, 7], queries=[0, 7])
    first = padding.sides(7, 7, torch.device("cpu"))
    assert padding.sides(7, 7, torch.device("cpu")) is first
    with torch.inference_mode():
        inside = padding.sides(7, 11, torch.device("cpu"))
    assert not inside.rows.is_inference() and not inside.keys.is_inference()
    assert inside.keys.shape == (2, 1, 11) and padding.sides(7, 7, torch.device("cpu")) is not first
    for other in (pickle.loads(pickle.dumps(padding)), copy.copy(padding), padding.replaced(queries=None)):
        assert other._remembered("sides", (7, 7)) is None
    assert padding.replaced(queries=None).sides(7, 7, torch.device("cpu")).rows is None
    assert padding.sides(7, 7, torch.device("meta")).keys.device.type == "meta"


def _tensors_of(mask):
    own = [mask.tensor] if isinstance(mask, FromTensor) else [table.values for table in mask.tables()]
    return [*own, *(tensor for part in mask._children() for tensor in _tensors_of(part))]


def test_every_name_is_exported():
    patterns = {Blocks, Causal, Documents, Edges, FromTensor, Global, Padding, PerHead, Prefix, RandomBlocks, Window}
    patterns |= {masks.Chunks, masks.Columns, masks.Dilated, masks.Fixed, masks.Strided, masks.Predicate, masks.Mask}
    assert {pattern.__name__ for pattern in patterns} <= set(masks.__all__)
