"""A BlockMask is the mask that PyTorch's compiled kernels make of it: full blocks, and mask_mod in other listed."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from flex_functions import HQ, LK, LQ, B, mask_functions
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask, or_masks

from saccade import attention
from saccade.operator import _block_masks
from saccade.operator._block_masks import mask_of_blocks

CPU = torch.device("cpu")
FUNCTIONS = mask_functions()


def mask_of(block_mask, batch=B, heads=HQ, lengths=(LQ, LK)):
    return mask_of_blocks(block_mask, batch, heads, lengths, CPU)


def dense(mask, batch=B, heads=HQ, lengths=(LQ, LK)):
    shape = batch, heads, *lengths
    return torch.ones(shape, dtype=torch.bool) if mask is None else mask.dense(*lengths).expand(shape)


def by_kernels(mask, batch=B, heads=HQ, lengths=(LQ, LK)):
    """Which weights are not 0."""
    query, key = torch.zeros(batch, heads, lengths[0], 8), torch.zeros(batch, heads, lengths[1], 8)
    return attention(query, key, torch.eye(lengths[1]).expand(batch, heads, -1, -1), mask) > 0


def by_hand(block_mask, batch=B, heads=HQ, lengths=(LQ, LK)):
    """The definition, block by block."""
    shown = torch.zeros(batch, heads, *lengths, dtype=torch.bool)
    asked = create_mask(block_mask.mask_mod, batch, heads, *lengths, device="cpu")
    rows, keys = block_mask.BLOCK_SIZE

    def each(num, indices):
        items, many, down, _ = indices.shape
        for b, h, block in np.ndindex(batch, heads, down):
            at = b % items, h % many, block
            for key_block in indices[at][: int(num[at])].tolist():
                yield b, h, slice(block * rows, block * rows + rows), slice(key_block * keys, key_block * keys + keys)

    for place in each(block_mask.kv_num_blocks, block_mask.kv_indices):
        shown[place] |= asked[place]
    if block_mask.full_kv_num_blocks is not None:
        for place in each(block_mask.full_kv_num_blocks, block_mask.full_kv_indices):
            shown[place] = True
    return shown


def listed(layout):
    """kv_num_blocks and kv_indices of booleans (B, H, nq, nk), indices in a mixed order."""
    order = torch.argsort(layout.int() + torch.rand(layout.shape) / 2, dim=-1, descending=True)
    return layout.sum(-1).int(), order.int()


def random_blocks(batch, heads, size, mask_mod, full=True):
    shape = batch, heads, -(-LQ // size[0]), -(-LK // size[1])
    kinds = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(3))
    parts = [*listed(kinds == 1), *(listed(kinds == 2) if full else (None, None))]
    return BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=(LQ, LK))


@pytest.mark.parametrize("size", [8, 128, (16, 8)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_blocks_made_of_a_function_say_what_the_function_says(name, size):
    block_mask = create_block_mask(FUNCTIONS[name], B, HQ, LQ, LK, device="cpu", BLOCK_SIZE=size)
    mask = mask_of(block_mask)
    assert torch.equal(dense(mask), create_mask(FUNCTIONS[name], B, HQ, LQ, LK, device="cpu"))
    assert "Block" not in repr(mask)  # the blocks add nothing, and are not looked at again


@pytest.mark.parametrize(
    ("batch", "heads", "size"),
    [
        *((B, HQ, size) for size in ((8, 8), (16, 8), (5, 7), (64, 64), (1, 3))),
        *((batch, heads, (5, 7)) for batch, heads in ((1, 1), (1, HQ), (B, 1))),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["causal", "padding", None])
def test_blocks_that_say_more_than_their_function(name, batch, heads, size):
    block_mask = random_blocks(batch, heads, size, FUNCTIONS.get(name))
    mask, expected = mask_of(block_mask), by_hand(block_mask)
    assert torch.equal(dense(mask), expected)
    assert torch.equal(by_kernels(mask), expected)


def test_large_blocks_are_told_to_the_kernels_without_a_look_at_pairs():
    layout = torch.tensor([[[[1, 0, 1], [0, 1, 0]]], [[[0, 1, 1], [1, 0, 0]]]], dtype=torch.bool)
    block_mask = BlockMask.from_kv_blocks(*listed(layout), BLOCK_SIZE=(64, 128), seq_lengths=(101, 331))
    mask = mask_of(block_mask, 2, 1, (101, 331))
    expected = layout.repeat_interleave(64, 2)[:, :, :101].repeat_interleave(128, 3)[..., :331]
    assert torch.equal(dense(mask, 2, 1, (101, 331)), expected)
    assert torch.equal(by_kernels(mask, 2, 1, (101, 331)), expected)


def test_functions_that_are_combined():
    causal, window, padding = (FUNCTIONS[name] for name in ("causal", "window", "padding"))
    for function in (and_masks(causal, padding), or_masks(and_masks(causal, padding), window), and_masks(), or_masks()):
        mask = mask_of(create_block_mask(function, B, None, LQ, LK, device="cpu", BLOCK_SIZE=8))
        assert torch.equal(dense(mask), create_mask(function, B, HQ, LQ, LK, device="cpu"))


def test_no_function_and_no_empty_block_is_no_mask():
    assert mask_of(create_block_mask(lambda b, h, q, k: q >= 0, None, None, LQ, LK, device="cpu")) is None
    ones = torch.ones(1, 1, -(-LQ // 8), dtype=torch.int32)
    every = torch.arange(-(-LK // 8), dtype=torch.int32).expand(1, 1, ones.shape[2], -1)
    block_mask = BlockMask.from_kv_blocks(ones * every.shape[3], every, BLOCK_SIZE=8, seq_lengths=(LQ, LK))
    assert mask_of(block_mask) is None


def test_slices_and_crops():
    by_head = create_block_mask(FUNCTIONS["by head"], B, HQ, LQ, LK, device="cpu", BLOCK_SIZE=8)
    head = by_head[:, 2]
    with pytest.raises(RuntimeError, match="Cannot use mask_mod from a sliced BlockMask"):
        mask_of(head, heads=1)
    head.mask_mod = lambda b, h, q, k: (q - k).abs() <= 4
    assert torch.equal(dense(mask_of(head, heads=1), heads=1), dense(mask_of(by_head))[:, 2:3])
    cropped = by_head._adjust(23, 29)
    assert torch.equal(
        dense(mask_of(cropped, lengths=(23, 29)), lengths=(23, 29)), dense(mask_of(by_head))[..., :23, :29]
    )


def test_one_block_larger_than_any_problem_holds_for_all_lengths():
    block_mask = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32),
        torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        BLOCK_SIZE=1 << 30,
        mask_mod=FUNCTIONS["window"],
        seq_lengths=(1, 1),
    )
    for lengths in ((LQ, LK), (23, 29), (LK, LK)):
        expected = create_mask(FUNCTIONS["window"], B, HQ, *lengths, device="cpu")
        assert torch.equal(dense(mask_of(block_mask, lengths=lengths), lengths=lengths), expected)


def test_rows_of_a_slice_that_decodes():
    """As in decoding: the block row of position 19, its function moved to where the query stands."""
    whole = create_block_mask(FUNCTIONS["window"], None, None, LK, LK, device="cpu", BLOCK_SIZE=8)
    row = whole[:, :, 19 // 8]
    row.seq_lengths, row.mask_mod = (1, LK), lambda b, h, q, k: FUNCTIONS["window"](b, h, q + 19, k)
    expected = create_mask(FUNCTIONS["window"], 1, 1, LK, LK, device="cpu")[:, :, 19:20]
    assert torch.equal(dense(mask_of(row, 1, 1, (1, LK)), 1, 1, (1, LK)), expected)


@pytest.mark.parametrize("traceable", [True, False])
def test_a_mask_is_made_again_when_something_of_it_changes(traceable):
    ids = torch.arange(LK) // 7

    def same(b, h, q, k):
        if not traceable:
            torch.utils._pytree.tree_map(int, ())  # foreign code
            assert isinstance(q, torch.Tensor) and repr(q)
        return ids[q] == ids[k]

    block_mask = create_block_mask(same, None, None, LQ, LK, device="cpu", BLOCK_SIZE=8)
    block_mask.kv_num_blocks.fill_(6)  # every block is listed, so that only the function counts
    block_mask.kv_indices.copy_(torch.arange(6, dtype=torch.int32))
    block_mask.full_kv_num_blocks.zero_()
    first = mask_of(block_mask)
    assert mask_of(block_mask) is first
    ids.copy_(torch.arange(LK) % 3)
    second = mask_of(block_mask)
    assert torch.equal(dense(second), dense(None) & ((torch.arange(LQ)[:, None] - torch.arange(LK)) % 3 == 0))
    block_mask.kv_num_blocks.fill_(1)
    third = mask_of(block_mask)
    assert torch.equal(dense(third), by_hand(block_mask))
    block_mask.mask_mod = FUNCTIONS["causal"]
    assert torch.equal(dense(mask_of(block_mask)), by_hand(block_mask))


def test_nothing_is_kept_of_a_block_mask_that_is_gone():
    block_mask = create_block_mask(FUNCTIONS["causal"], None, None, LQ, LK, device="cpu")
    mask_of(block_mask)
    gone, before = weakref.ref(block_mask), len(_block_masks._KNOWN)
    del block_mask
    gc.collect()
    assert gone() is None and len(_block_masks._KNOWN) == before - 1


SOME = create_block_mask(FUNCTIONS["by head"], B, HQ, LQ, LK, device="cpu", BLOCK_SIZE=8)


def listing(wrong):
    indices = torch.zeros(1, 1, 5, 6, dtype=torch.int32) + wrong
    return BlockMask.from_kv_blocks(
        torch.ones(1, 1, 5, dtype=torch.int32), indices, BLOCK_SIZE=8, seq_lengths=(LQ, LK), compute_q_blocks=False
    )


BAD = [
    (SOME, (B, HQ, (LQ + 1, LK)), f"made for {LQ} queries and {LK} keys, got {LQ + 1} and {LK}.*_adjust"),
    (SOME, (3, HQ, (LQ, LK)), f"made for {B} batch items, the query has 3"),
    (SOME, (B, 3, (LQ, LK)), f"made for {HQ} heads, the query has 3"),
    (listing(-1), (B, HQ, (LQ, LK)), "kv_indices has a negative index, -1"),
]


@pytest.mark.parametrize(("block_mask", "sizes", "message"), BAD, ids=lambda value: None)
def test_bad_block_masks(block_mask, sizes, message):
    with pytest.raises(ValueError, match=f"block_mask.*{message}"):
        mask_of_blocks(block_mask, *sizes, CPU)


@pytest.mark.parametrize("length", [LK - 1, 0])
def test_a_mask_function_that_reads_outside_of_its_tensor(length):
    ones = torch.ones(length)
    indices = torch.arange(-(-LK // 8), dtype=torch.int32).expand(1, 1, -(-LQ // 8), -1)
    block_mask = BlockMask.from_kv_blocks(
        torch.full((1, 1, indices.shape[2]), indices.shape[3], dtype=torch.int32),
        indices,
        BLOCK_SIZE=8,
        mask_mod=lambda b, h, q, k: ones[k] > 0,
        seq_lengths=(LQ, LK),
    )
    with pytest.raises(IndexError, match=f"index {LK - 1} is out of bounds|index .* shape .0,."):
        by_kernels(mask_of(block_mask))


def test_too_few_rows_of_blocks():
    few = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 2, dtype=torch.int32),
        torch.zeros(1, 1, 2, 6, dtype=torch.int32),
        BLOCK_SIZE=8,
        seq_lengths=(LQ, LK),
    )
    with pytest.raises(ValueError, match=f"lists 2 rows of blocks of 8 queries, expected enough for {LQ}"):
        mask_of(few)
