"""What masks say of themselves is what they do, and each class has one program, in Python and in C++."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import saccade
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
    Prefix,
    RandomBlocks,
    Strided,
    Window,
    mask_classes,
)
from saccade.operator._masks._data import OwnedTensor, Subset
from saccade.operator._masks._program import Opcode

L = 23
BLOCKS = (torch.arange(30).view(5, 6) % 4 > 0)[:, :5]
MASKS = [
    Causal(),
    Window(3, 2),
    Window(None, 2),
    Window(5, None),
    Prefix(7),
    Strided(5),
    Fixed(5, 2),
    Dilated(3),
    Chunks(4, 1, 0),
    Columns(4, 2),
    Global([2, 11]),
    Padding([19]),
    Padding([19], queries=[17]),
    Documents([0] * 9 + [1] * 14),
    Documents([0] * 9 + [1] * 14, [1] * 14 + [0] * 9),
    Blocks(BLOCKS, size=5),
    RandomBlocks(1, 4, 2),
    Edges([0, 3, 7], [2, 3, 1]),
    FromTensor(torch.arange(L * L).view(L, L) % 5 > 1),
]
MADE = [
    *MASKS,
    *(~mask for mask in MASKS),
    Causal() & Dilated(3),
    Window(2, 0) | Strided(7),
    Prefix(7) | Global([3]),
    Causal() | Columns(4, 2),
    Causal() & Padding([19]),
    PerHead([Causal(), Dilated(2)]),
    PerHead([Causal(), Padding([19])]),
    Causal().at(2),
    Padding([19]).slice((2, 20), (1, 22), lengths=(L, L)),
]


def dense(mask, lengths=(L, L)):
    return mask.dense(*(mask._required_lengths() or lengths))


def plain(value):
    """What a constructor takes: the tensor of a table."""
    value = value.table if isinstance(value, Subset) else value
    return value.values if isinstance(value, OwnedTensor) else value


def moved(mask, by, rows=9, keys=9):
    """The mask of rows and keys that both stand `by` later."""
    return mask.slice((by, by + rows), (by, by + keys), lengths=(L, L)).dense(rows, keys)


@looped("mask", [m for m in MADE if m.placement() in ("open", None)])
def test_masks_of_distances_are_those_that_are_the_same_wherever_both_stand(mask):
    same = all(torch.equal(moved(mask, by), moved(mask, 0)) for by in range(1, 12))
    # A mask that happens to be the same here may yet hold data about rows.
    assert same if mask._throughout("by_distance") else not same or mask.tables()


@looped("mask", MADE)
def test_what_else_they_say_is_so(mask):
    seen = dense(mask)
    if mask.sees_itself and seen.shape[-1] == seen.shape[-2] == L:
        assert seen.diagonal(dim1=-2, dim2=-1).all()
    if mask.widens:
        assert (seen[..., 1:, :] >= seen[..., :-1, :]).all()
    if mask.by_key:
        assert torch.equal(seen, seen[..., :1, :].expand_as(seen))
    if mask._throughout("endless"):
        assert dense(mask, (5, 1009)).shape[-2:] == (5, 1009)
        mask.at(10**9).tile((0, 3), (0, 5), 3, 5)


@pytest.mark.parametrize(
    ("trait", "masks"),
    [
        ("sees_itself", [Causal(), Window(3, 2), Prefix(7), Strided(5), Fixed(5, 2), Dilated(3), Chunks(4, 1, 0)]),
        ("widens", [Causal(), Window(None, 2), Prefix(7), Padding([19])]),
    ],
)
def test_what_saves_work_is_said_where_it_is_so(trait, masks):
    assert all(getattr(mask, trait) for mask in masks)


def test_every_class_with_a_program_is_known_by_its_fields():
    assert {type(mask).__name__ for mask in MADE} <= {*mask_classes()}
    for mask in MASKS:
        if not isinstance(mask, FromTensor | Edges | Global):
            again = type(mask)._from_fields(**{name: plain(getattr(mask, name)) for name in mask.fields})
            assert repr(again) == repr(mask)
            assert torch.equal(dense(again), dense(mask))


class Every(Causal):
    """What a subclass means is its own affair."""

    def allows(self, b, h, row, position, key):
        return key == key

    def region_kind(self, region):
        return "full"


def test_a_subclass_has_no_program_but_its_own():
    from saccade.operator._backends.native._lowering import is_structured, lower

    assert not is_structured(Every())
    assert lower(Every(), 3, 5).program[0] == Opcode.TILES
    assert lower(Causal(), 3, 5).program[0] == Opcode.WINDOW
    assert "Every" not in mask_classes()


def test_operations_have_the_same_numbers_in_python_and_in_cpp():
    header = (Path(__file__).parents[2] / "native" / "mask_program.h").read_text(encoding="utf-8")
    theirs = {name.upper(): int(number) for name, number in re.findall(r"^    (\w+) = (\d+),", header, re.MULTILINE)}
    assert theirs == {operation.name: operation.value for operation in Opcode}


def test_what_a_mask_of_ones_own_defines_under_an_old_name_counts():
    """Ignored, `children` would leave a part without its tensors, and `required_lengths` let other lengths pass."""
    with pytest.warns(DeprecationWarning, match="Old.required_lengths: define it as _required_lengths"):

        class Old(Causal):
            def required_lengths(self):
                return (5, 7)

    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 7, 8)
    with pytest.raises(ValueError, match=r"a slice of \(5, 7\)"):
        saccade.attention(query, key, key, Old())
