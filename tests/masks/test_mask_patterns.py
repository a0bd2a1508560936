"""What the named patterns promise beyond their formulas."""

from __future__ import annotations

import pytest
import torch

from looped import looped
from saccade.operator._masks import (
    Causal,
    Chunks,
    Columns,
    Dilated,
    Documents,
    Edges,
    Fixed,
    FromTensor,
    Global,
    Mask,
    Padding,
    PerHead,
    Predicate,
    Prefix,
    RandomBlocks,
    Strided,
    Window,
    as_mask,
)


def drawn(mask: Mask, Lq: int, Lk: int) -> list[str]:
    return ["".join("1" if bit else "." for bit in row) for row in mask.dense(Lq, Lk)[0, 0].tolist()]


def test_drawings_of_the_docstrings():
    assert drawn(Causal(), 2, 5) == ["1111.", "11111"]
    assert drawn(Causal(), 4, 2) == ["..", "..", "1.", "11"]
    assert drawn(Causal(), 2, 4) == ["111.", "1111"]
    assert drawn(Causal().at(0), 2, 4) == ["1...", "11.."]
    assert drawn(Causal().at(1), 2, 4) == ["11..", "111."]
    assert drawn(Window(1, 0), 3, 5) == [".11..", "..11.", "...11"]
    assert drawn(Prefix(2), 4, 4) == ["11..", "11..", "111.", "1111"]
    assert drawn(Padding([2], queries=[1]), 3, 3) == ["11.", "...", "..."]
    assert drawn(Documents([0, 0, 1]), 3, 3) == ["11.", "11.", "..1"]
    assert drawn(Causal() & Documents([0, 0, 1]), 3, 3) == ["1..", "11.", "..1"]
    assert drawn(Global([1]), 3, 3) == [".1.", "111", ".1."]
    assert drawn(Window(4, 2) & Dilated(2), 6, 6) == ["1.1...", ".1.1..", "1.1.1.", ".1.1.1", "1.1.1.", ".1.1.1"]
    assert drawn(Chunks(2), 3, 5) == ["..11.", "..11.", "....1"]
    assert drawn(Chunks(2, 1), 3, 5) == ["1111.", "1111.", "..111"]
    assert drawn(Columns(3), 2, 7) == ["..1..1.", "..1..1."]
    assert drawn(Edges([0, 2, 2], [1, 0, 2]), 3, 3) == [".1.", "...", "1.1"]


@looped(
    "mask",
    [
        Causal(),
        Window(3, 0),
        Prefix(5) & Causal(),
        Strided(4),
        Fixed(4, 2),
        Causal() & Dilated(3),
        Causal() & Chunks(4, 1),
        Causal() & Columns(4, 2),
        RandomBlocks(7, 2, 2),
        Causal() & RandomBlocks(7, 3, 1, symmetric=True),
        Causal() & Documents([0] * 5 + [1] * 30),
        Causal() & Global([0, 3]),
        Causal() & Edges([9, 12, 15], [2, 11, 4]),
        Causal() & (Window(2, 2) | Global([1]) | RandomBlocks(1, 2, 1)),
    ],
)
def test_decoding_token_by_token_sees_what_training_saw(mask):
    whole = mask.dense(17, 17)
    for length in range(1, 18):
        assert torch.equal(mask.dense(1, length), whole[..., length - 1 : length, :length])
        assert torch.equal(mask.at([length - 1]).dense(1, 17), whole[..., length - 1 : length, :])
    assert torch.equal(mask.dense(5, 17), whole[..., 12:, :])


@looped("mask", [Strided(5), Strided(1), Fixed(5, 1), Fixed(5, 3), Fixed(1, 1)])
def test_two_hops_reach_every_earlier_position(mask):
    once = mask.dense(53, 53)[0, 0].float()
    assert torch.equal(once @ once > 0, Causal().dense(53, 53)[0, 0])


def test_sparse_transformer_rows_are_short():
    assert Strided(16).dense(256, 256).sum(-1).max() <= 2 * 16 + 1
    assert Fixed(16, 1).dense(256, 256).sum(-1).max() <= 2 * 16


@pytest.mark.parametrize("symmetric", [False, True])
def test_random_blocks_depend_on_seed_and_row_block_only(symmetric):
    mask = RandomBlocks(5, size=4, count=3, symmetric=symmetric)
    long = mask.dense(236, 236)
    for length in (4, 59, 103):
        assert torch.equal(mask.dense(length, length), long[..., :length, :length])
    assert not torch.equal(RandomBlocks(6, size=4, count=3).dense(236, 236), RandomBlocks(5, 4, 3).dense(236, 236))


@pytest.mark.slow
def test_random_blocks_are_whole_distinct_and_spread():
    size, count, blocks = 3, 4, 61
    bits = RandomBlocks(0, size, count).dense(size * blocks, size * blocks)[0, 0]
    by_block = bits.view(blocks, size, blocks, size)
    grid = by_block[:, 0, :, 0]
    assert torch.equal(by_block, grid[:, None, :, None].expand_as(by_block))
    assert grid.sum(1).tolist() == [min(count, row) for row in range(blocks)]
    assert not grid.triu().any()
    assert torch.equal(
        RandomBlocks(0, size, count, symmetric=True).dense(size * blocks, size * blocks)[0, 0], bits | bits.T
    )
    # Over many seeds every earlier block is drawn about as often: 400 draws of one in 15, five deviations.
    total = sum(RandomBlocks(seed, 1, count).dense(61, 61)[0, 0, 60].int() for seed in range(400))
    expected = 400 * count / 60
    assert (total[:60] - expected).abs().max() < 5 * expected**0.5


def test_documents_from_cumulative_lengths():
    assert Documents.from_cu_seqlens(torch.tensor([0, 2, 2, 5])) == Documents(torch.tensor([0, 0, 2, 2, 2]))
    crossed = Documents.from_cu_seqlens([0, 1, 3], [0, 2, 5])
    assert drawn(crossed, 3, 5) == ["11...", "..111", "..111"]


def test_documents_go_by_position_with_a_cache():
    mask = Causal() & Documents([0, 0, 1, 1, 1, 2, 2])
    assert drawn(mask, 2, 5) == ["..11.", "..111"]


def test_per_head_may_differ_by_item():
    mask = PerHead([Causal() & Padding([2, 3]), Window(0, 0)])
    bits = mask.dense(3, 3)
    assert bits.shape == (2, 2, 3, 3)
    assert torch.equal(bits[:, 0], (Causal() & Padding([2, 3])).dense(3, 3)[:, 0])
    assert torch.equal(bits[1, 1], torch.eye(3, dtype=torch.bool))


def test_predicate_gets_positions():
    def earlier(b, h, q, k):
        return k <= q

    for Lq, Lk in ((3, 7), (7, 3), (5, 5)):
        assert torch.equal(Predicate(earlier).dense(Lq, Lk), Causal().dense(Lq, Lk))
    lengths = torch.tensor([2, 5, 3])
    padding = Predicate(lambda b, h, q, k: k < lengths[b], batch=3)
    assert torch.equal(padding.dense(4, 5), Padding(lengths).dense(4, 5))
    everything = Predicate(lambda b, h, q, k: torch.tensor(True))
    assert everything.dense(2, 3).shape == (1, 1, 2, 3) and everything.dense(2, 3).all()


def test_tensors_are_wrapped_and_masks_pass():
    bits = torch.rand(5, 7) < 0.5
    assert as_mask(None) is None
    assert as_mask(mask := Causal()) is mask
    assert as_mask(bits) == FromTensor(bits) and torch.equal(as_mask(bits).dense(5, 7)[0, 0], bits)


def test_an_expanded_tensor_is_stored_once():
    bits = (torch.rand(1, 1, 5, 7) < 0.5).expand(3, 2, 5, 7)
    mask = FromTensor(bits)
    assert mask.tensor.numel() == 35 and mask._batch_and_heads() == (3, 2)
    assert torch.equal(mask.dense(5, 7).expand(3, 2, 5, 7), bits)
    with pytest.raises(ValueError, match="batch of 3"):
        mask.check(2, 2, 5, 7, None)


def test_a_batch_of_none():
    for mask in (Padding([]), Padding(torch.zeros(0, 7, dtype=torch.bool)), Causal().at([]), Prefix([])):
        assert mask.dense(5, 7).shape == (0, 1, 5, 7)
        assert mask.kind((0, 5), (0, 7), 5, 7) in ("empty", "full", "partial")
        mask.check(0, 3, 5, 7, torch.device("cpu"))
