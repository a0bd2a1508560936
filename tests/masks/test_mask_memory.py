"""Only FromTensor and Predicate ever form Lq x Lk; everything else stays with the tile."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.operator._masks import (
    Blocks,
    Causal,
    Chunks,
    Columns,
    Dilated,
    Documents,
    Edges,
    Fixed,
    Global,
    Padding,
    PerHead,
    Prefix,
    RandomBlocks,
    Strided,
    Window,
    keys_seen,
)

LENGTH, SIDE, BATCH, HEADS = 131072, 128, 2, 3


class Largest(TorchDispatchMode):
    """Remembers the most elements that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@functools.cache
def masks():
    layout = torch.rand(1024, 1024, generator=torch.Generator().manual_seed(0)) < 0.1
    ends = torch.arange(0, LENGTH + 1, 1009)
    ends[-1] = LENGTH
    return {
        "longformer": Causal() & (Window(512, 0) | Global([0, 70000])),
        "bigbird": Window(256, 256) | Global([0]) | RandomBlocks(0, SIDE, 3),
        "documents": Causal() & Documents.from_cu_seqlens(ends) & Padding([LENGTH, 100003]),
        "remainders": PerHead([Window(400, 0) & Dilated(3), Chunks(362, 1) & Causal(), Columns(362, 8) & Causal()]),
        "sparse transformer": PerHead([Strided(362), Fixed(362, 8), Prefix(1000)]),
        "blocks": Blocks(layout, SIDE) & ~Window(5, 5),
        "edges": Edges(torch.arange(LENGTH), torch.arange(LENGTH).flip(0)) | Window(0, 0),
        "cache": (Causal() & Padding([90000, 70001])).at([3, 70000 - SIDE]),
    }


@pytest.mark.parametrize("name", sorted(masks()))
def test_tiles_of_a_large_mask(name):
    mask = masks()[name]
    starts = [0, 1009, 69888, LENGTH - SIDE]
    with Largest() as largest:
        tiles = [mask.tile((row, row + SIDE), (key, key + SIDE), LENGTH, LENGTH) for row in starts for key in starts]
        cut = mask.slice((1009, 1009 + SIDE), (0, LENGTH), lengths=(LENGTH, LENGTH))
        tiles.append(cut.tile((0, SIDE), (1009, 1009 + SIDE), SIDE, LENGTH))
    assert any(tile.kind != "empty" for tile in tiles)
    assert largest.numel <= max(BATCH * HEADS * SIDE * SIDE, LENGTH)


@pytest.mark.parametrize("name", sorted(masks()))
def test_a_picture_of_a_large_mask(name):
    with Largest() as largest:
        text = masks()[name].picture(LENGTH, LENGTH, to="text")
    assert len(text.splitlines()) < 50 and "░" in text
    assert largest.numel <= 64 * LENGTH


def test_seen_keys_of_a_large_mask():
    mask = Causal() & Window(512, 0) & Padding([LENGTH, 100003], queries=[LENGTH, 100003])
    with Largest() as largest:
        keys = keys_seen(mask, LENGTH, LENGTH)
    assert torch.equal(keys[:, 0], torch.arange(LENGTH) < torch.tensor([[LENGTH], [100003]]))
    assert largest.numel <= BATCH * LENGTH


@pytest.mark.slow
def test_seen_keys_tile_by_tile():
    """Sizes that need more than one tile, for masks without a quick answer."""
    for mask in (
        ~Window(700, 5000) & Padding([3001, 2003]),
        Window(3, 3).at(-1500),
        Causal() & Padding([3001, 1999], queries=[1500, 2999]),
        Edges([0, 2999], [2003, 17]),
    ):
        found, expected = keys_seen(mask, 2999, 3001), mask.dense(2999, 3001).any(2)
        assert found is not None and torch.equal(found.expand_as(expected), expected), mask
