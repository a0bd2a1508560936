"""Tiles are told empty, full or partial from intervals alone, and told precisely where that decides the work."""

from __future__ import annotations

from collections import Counter

import torch

from looped import looped
from masks.mask_sets import kind_of, tiles
from saccade.operator._masks import (
    Blocks,
    Causal,
    Chunks,
    Columns,
    Dilated,
    Documents,
    Edges,
    FromTensor,
    Global,
    Mask,
    Padding,
    PerHead,
    Prefix,
    RandomBlocks,
    Strided,
    Window,
)

EXACT = [
    Causal(),
    ~Causal(),
    Causal().at(3),
    Causal().at([0, 2, 7]),
    Causal().slice((2, 20), (3, 23), lengths=(23, 29)),
    Window(5, 2),
    Window(None, 3),
    Window(4, None).at(-3),
    Prefix(7),
    Prefix([3, 11]),
    Strided(1),
    Strided(5),
    Dilated(1),
    Dilated(3),
    Chunks(4),
    Chunks(3, 1, 2),
    Columns(5, 2),
    Columns(3, 3),
    Global([0, 1, 2, 3, 17]),
    Global(torch.rand(1, 40, generator=torch.Generator().manual_seed(0)) < 0.2),
    Edges([1, 2, 2, 2, 9, 28, 3], [4, 0, 1, 2, 8, 22, 22]),
    Blocks(torch.rand(2, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.5, 4),
    RandomBlocks(3, 3, 2),
    RandomBlocks(4, 2, 1, symmetric=True),
    Padding([5, 23, 11]),
    Padding(torch.rand(3, 23, generator=torch.Generator().manual_seed(0)) < 0.7),
    Documents([0] * 5 + [4] * 7 + [2] * 17),
    Documents([[0] * 5 + [1] * 24, [3] * 11 + [4] * 18]),
    Padding([5, 23]).slice((1, 19), (2, 22)),
]


@looped("mask", EXACT)
@looped("size", [(1, 1), (3, 2), (7, 5)])
def test_exact_kinds(mask, size):
    """Interval arithmetic alone says what looking at every pair says."""
    Lq, Lk = mask._required_lengths() or (19, 23)
    bits = mask.dense(Lq, Lk)
    for rows in tiles(Lq, size[0]):
        for keys in tiles(Lk, size[1]):
            assert mask.kind(rows, keys, Lq, Lk) == kind_of(bits[..., slice(*rows), slice(*keys)]), (rows, keys)


def count(mask: Mask, length: int, size: int) -> Counter:
    spans = tiles(length, size)
    return Counter(mask.kind(rows, keys, length, length) for rows in spans for keys in spans)


def test_how_much_of_a_causal_mask_is_looked_at():
    assert count(Causal(), 8192, 128) == {"full": 64 * 63 // 2, "partial": 64, "empty": 64 * 63 // 2}


def test_a_window_is_a_band_of_tiles():
    kinds = count(Causal() & Window(256, 0), 8192, 128)
    assert kinds["empty"] >= 64 * 64 - 3 * 64 and kinds["full"] == 63


def test_documents_are_blocks_on_the_diagonal():
    mask = Documents.from_cu_seqlens([0, 1024, 4096, 5000, 8192])
    kinds = count(mask, 8192, 128)
    assert kinds["partial"] <= 4 * 64 and kinds["full"] >= (7 * 7 + 23 * 23 + 24 * 24)
    # The order and the names of documents do not matter, nor do further restrictions.
    renamed = Documents([7] * 1024 + [3] * 3072 + [9] * 904 + [1] * 3192)
    assert count(renamed, 8192, 128) == kinds
    assert count(Causal() & renamed, 8192, 128)["empty"] > kinds["empty"]


def test_padding_is_a_clip_of_each_item():
    mask = Causal() & Padding([300, 1000])
    assert mask.kind((512, 640), (896, 1024), 1024, 1024) == "empty"
    assert mask.kind((512, 640), (0, 256), 1024, 1024) == "full"
    assert mask.kind((512, 640), (256, 512), 1024, 1024) == "partial"
    assert mask.kind((512, 640), (384, 512), 1024, 1024, item=0) == "empty"
    assert mask.kind((512, 640), (384, 512), 1024, 1024, item=1) == "full"


def test_padding_with_queries_drops_rows():
    mask = Padding([300, 1000], queries=[300, 700])
    assert mask.kind((700, 800), (0, 100), 1024, 1024) == "empty"
    assert mask.kind((0, 100), (0, 300), 1024, 1024) == "full"


def test_a_cache_with_a_length_of_its_own_for_each_item():
    mask = Causal().at([10, 4000])
    assert mask.kind((0, 1), (4001, 4096), 1, 4096) == "empty"
    assert mask.kind((0, 1), (0, 11), 1, 4096) == "full"
    assert mask.kind((0, 1), (11, 4000), 1, 4096) == "partial"
    assert mask.kind((0, 1), (11, 4000), 1, 4096, item=1) == "full"
    pairs = (Causal() & Padding([11, 4001])).at([10, 4000])
    assert pairs.kind((0, 1), (11, 4000), 1, 4096, item=0) == "empty"


def test_heads_agree_or_the_tile_is_partial():
    mask = PerHead([Window(16, 0), Causal(), Window(16, 0)])
    assert mask.kind((512, 640), (0, 128), 1024, 1024) == "partial"
    assert mask.kind((512, 640), (0, 128), 1024, 1024, head=1) == "full"
    assert mask.kind((512, 640), (0, 128), 1024, 1024, head=2) == "empty"
    assert mask.kind((512, 640), (640, 768), 1024, 1024) == "empty"


def test_a_tensor_is_summarised_in_blocks():
    bits = torch.zeros(1, 1, 512, 512, dtype=torch.bool)
    bits[..., 128:256, 64:200] = True
    mask = FromTensor(bits)
    assert mask.kind((0, 128), (0, 512), 512, 512) == "empty"
    assert mask.kind((128, 256), (64, 192), 512, 512) == "full"
    assert mask.kind((128, 256), (64, 256), 512, 512) == "partial"


def test_operators():
    left, right = Window(100, None), Window(None, 100)
    everything, nothing = Window(None, None), ~Window(None, None)
    where = ((500, 600), (520, 530), 1024, 1024)
    assert (left & right).kind(*where) == "full"
    assert (everything & nothing & Causal()).kind(*where) == "empty"
    assert (nothing | Causal()).kind(*where) == "partial"
    assert (everything | Causal()).kind(*where) == "full"
    assert (~(Causal() & nothing)).kind(*where) == "full"
