"""Block top-k attention against its definition: Python loops over blocks choose, the oracle of attention reads.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D key width, Dv value width.
"""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

import oracle
from looped import looped
from saccade import Causal, Dropout, Padding, Window, attention
from saccade.variants import BlockTopKConfig, block_topk_attention, chosen_blocks

B, HQ, HKV, L, D, DV = 2, 6, 2, 29, 5, 7
EXACT = dict(rtol=1e-12, atol=1e-12)


def made(lengths=(L, L), *, batch=B, heads=(HQ, HKV), dtype=torch.float64, grad=True):
    (rows, keys), (many, few) = lengths, heads
    shapes = (batch, many, rows, D), (batch, few, keys, D), (batch, few, keys, DV)
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


def choice(query, key, block, k, causal, scale=1.0):
    """The blocks of each query of one item, own first: lists (Hq, Lq). Queries are the last tokens."""
    heads, rows, _ = query.shape
    kv_heads, keys, _ = key.shape
    found = []
    for h in range(heads):
        of_head = key[h // (heads // kv_heads)].detach()
        means = [part.mean(0) for part in of_head.split(block)]
        for i in range(rows):
            own = (i + keys - rows) // block
            others = range(own) if causal else [b for b in range(len(means)) if b != own]
            score = {b: float(scale * (query[h, i].detach() * means[b]).sum()) for b in others}
            found.append([own, *sorted(others, key=lambda b: (-score[b], b))[: k - 1]])
    return [found[h * rows : (h + 1) * rows] for h in range(heads)]


def seen(query, key, block, k, causal, scale=1.0):
    """Who reads whom, bool (B, Hq, Lq, Lk)."""
    batch, heads, rows, _ = query.shape
    keys = key.shape[2]
    pairs = np.zeros((batch, heads, rows, keys), dtype=bool)
    for b in range(batch):
        blocks = choice(query[b], key[b], block, k, causal, scale)
        for h, i, j in np.ndindex(heads, rows, keys):
            position = i + keys - rows
            pairs[b, h, i, j] = position >= 0 and j // block in blocks[h][i] and (j <= position or not causal)
    return pairs


def agree(found, expected, inputs):
    torch.testing.assert_close(found, expected, **EXACT)
    upstream = torch.randn_like(found)
    pairs = zip(*(torch.autograd.grad(out, inputs, upstream) for out in (found, expected)), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("block", "k"), [(1, 2), (4, 1), (4, 2), (4, 3), (7, 2), (5, 5)])
def test_softmax_over_the_blocks_of_the_definition(causal, block, k):
    inputs = made()
    found = block_topk_attention(*inputs, Causal() if causal else None, block=block, k=k)
    agree(found, oracle.attend(*inputs, seen(*inputs[:2], block, k, causal)).out, inputs)


@pytest.mark.parametrize("rows", [1, 3, 11, 31])
def test_fewer_queries_are_the_last_tokens_and_more_begin_before_the_first(rows):
    inputs = made((rows, L))
    found = block_topk_attention(*inputs, Causal(), block=4, k=3)
    agree(found, oracle.attend(*inputs, seen(*inputs[:2], 4, 3, True)).out, inputs)


@pytest.mark.parametrize("step", [1, 5])
def test_decoding_is_the_parallel_form(step):
    query, key, value = made(dtype=torch.float32, grad=False)
    whole = block_topk_attention(query, key, value, Causal(), block=4, k=3)
    for start in range(0, L, step):
        stop = min(start + step, L)
        part = block_topk_attention(
            query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], Causal(), block=4, k=3
        )
        torch.testing.assert_close(part, whole[:, :, start:stop], rtol=1e-5, atol=1e-6)


@looped("causal", [False, True])
@looped("k", [8, 9, 100])
def test_as_many_blocks_as_there_are_is_dense_attention(causal, k):
    inputs = made()
    mask = Causal() if causal else None
    agree(block_topk_attention(*inputs, mask, block=4, k=k), attention(*inputs, mask), inputs)


@pytest.mark.parametrize("causal", [False, True])
def test_as_many_blocks_as_a_short_item_has_is_dense_attention(causal):
    # By the general way: the batch has more blocks than k, this item has not.
    inputs = made(grad=False)
    mask = Padding([L, 11]) & Causal() if causal else Padding([L, 11])
    found = block_topk_attention(*inputs, mask, block=4, k=3)
    torch.testing.assert_close(found[1], attention(*inputs, mask)[1], **EXACT)
    assert (found[0] - attention(*inputs, mask)[0]).abs().max() > 0.1


@looped("causal", [False, True])
@looped("side", ["left", "right", "holes", "nothing"])
def test_padding_is_not_there(causal, side):
    inputs = made()
    real = torch.ones(B, L, dtype=torch.bool)
    kinds = {"left": torch.arange(L) >= 6, "right": torch.arange(L) < 21, "holes": torch.rand(L) < 0.7}
    real[1] = kinds.get(side, torch.zeros(L, dtype=torch.bool))
    with torch.no_grad():
        for tensor in inputs:
            tensor[1, :, ~real[1]] = math.nan
    mask = Padding(real, queries=real)
    mask = mask & Causal() if causal else mask
    found = block_topk_attention(*inputs, mask, block=4, k=2)
    grads = torch.autograd.grad(found.sum(), inputs)
    assert (found[1, :, ~real[1]] == 0).all()
    alone = [tensor[1:, :, real[1]].detach().requires_grad_() for tensor in inputs]
    expected = block_topk_attention(*alone, Causal() if causal else None, block=4, k=2)
    torch.testing.assert_close(found[1:, :, real[1]], expected, **EXACT)
    for mine, theirs in zip(grads, torch.autograd.grad(expected.sum(), alone), strict=True):
        torch.testing.assert_close(mine[1:, :, real[1]], theirs, **EXACT)
        assert (mine[1, :, ~real[1]] == 0).all()


def test_a_query_on_padding_stands_where_the_last_real_token_is():
    inputs = made(batch=1, grad=False)
    real = torch.arange(L) < 21
    found = block_topk_attention(*inputs, Causal() & Padding(real[None]), block=4, k=2)
    query, key, value = inputs
    for row in range(21, L):
        alone = block_topk_attention(
            query[:, :, row : row + 1], key[:, :, :21], value[:, :, :21], Causal(), block=4, k=2
        )
        torch.testing.assert_close(found[:, :, row : row + 1], alone, **EXACT)


@looped("causal", [False, True])
@looped("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_of_equal_blocks_the_first_are_chosen(causal, dtype):
    query = torch.randn(1, HQ, 28, 64, dtype=dtype)
    key = torch.randn(1, HKV, 4, 64, dtype=dtype).repeat(1, 1, 7, 1)
    found = chosen_blocks(query, key, Causal() if causal else None, block=4, k=3)
    for i in range(28):
        own = i // 4
        first = [b for b in range(own if causal else 7) if b != own][:2]
        assert (found[:, :, i] == torch.tensor([own, *first, *[-1] * (2 - len(first))])).all()


@looped("causal", [False, True])
@looped("scale", [None, -0.5])
def test_the_chosen_blocks(causal, scale):
    query, key, _ = made(grad=False)
    found = chosen_blocks(query, key, Causal() if causal else None, block=4, k=3, scale=scale)
    assert found.shape == (B, HQ, L, 3) and found.dtype == torch.int64
    for b in range(B):
        expected = choice(query[b], key[b], 4, 3, causal, 1.0 if scale is None else scale)
        for h, i in np.ndindex(HQ, L):
            assert found[b, h, i].tolist() == expected[h][i] + [-1] * (3 - len(expected[h][i]))


def test_chosen_blocks_of_padding_and_of_nothing():
    query, key, _ = made(grad=False)
    found = chosen_blocks(query, key, Padding([L, 5], queries=[L, 5]), block=4, k=3)
    assert (found[1, :, 5:] == -1).all()
    assert (found[1, :, :4] == torch.tensor([0, 1, -1])).all() and (found[1, :, 4] == torch.tensor([1, 0, -1])).all()
    none = chosen_blocks(query[:, :, :0], key[:, :, :0], block=4, k=3)
    assert none.shape == (B, HQ, 0, 3)


@looped("first", [1, 14, 28])
@looped("other", [math.nan, 1e4])
def test_nothing_later_is_seen_nor_looked_at(first, other):
    inputs = made(grad=False)
    changed = [torch.cat((x[:, :, :first], torch.full_like(x[:, :, first:], other)), 2) for x in inputs]
    found, after = (block_topk_attention(*x, Causal(), block=4, k=3) for x in (inputs, changed))
    torch.testing.assert_close(after[:, :, :first], found[:, :, :first], **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_item_does_not_depend_on_its_batch_mates(dtype):
    inputs = made(batch=5, dtype=dtype, grad=False)
    whole = block_topk_attention(*inputs, Causal(), block=4, k=3)
    for item in range(5):
        alone = block_topk_attention(*(x[item : item + 1] for x in inputs), Causal(), block=4, k=3)
        assert torch.equal(whole[item : item + 1], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_precision(dtype):
    inputs = made(dtype=dtype, grad=False)
    found = block_topk_attention(*inputs, Causal(), block=4, k=3)
    wide = [x.double() for x in inputs]
    exact = oracle.attend(*wide, seen(*wide[:2], 4, 3, True))
    # The parts are rounded, and then their sum: each part's weight times half a unit of at most max |v|, twice.
    bound = torch.finfo(dtype).eps * wide[2].abs().max() + (1e-5 if dtype == torch.float32 else 0)
    assert found.dtype == dtype and ((found.double() - exact.out).abs() <= bound).all()


def test_scale_softcap_and_sink():
    inputs, sink = made(), torch.randn(HQ, dtype=torch.float64, requires_grad=True)
    found = block_topk_attention(*inputs, Causal(), block=4, k=3, scale=0.9, softcap=1.5, sink=sink)
    pairs = seen(*inputs[:2], 4, 3, True, 0.9)
    agree(found, oracle.attend(*inputs, pairs, scale=0.9, softcap=1.5, sink=sink).out, (*inputs, sink))


def test_dropout_drops_in_all_blocks_and_keeps_the_mean():
    query, key, _ = made(batch=1, grad=False)
    value = torch.eye(L, dtype=torch.float64).expand(1, HKV, L, L)
    plain = block_topk_attention(query, key, value, Causal(), block=4, k=3)
    p, trials = 0.3, 100
    drawn = torch.stack(
        [
            block_topk_attention(query, key, value, Causal(), block=4, k=3, dropout=Dropout(p, seed))
            for seed in range(trials)
        ]
    )
    ones = drawn / plain.where(plain > 0, 1.0)
    assert ((ones[:, plain > 0] - 1 / (1 - p)).abs().minimum(ones[:, plain > 0].abs()) < 1e-9).all()
    error = math.sqrt(p / (1 - p) / trials)
    assert ((ones.mean(0) - 1)[plain > 0].abs() < 6 * error).all()
    assert torch.equal(drawn[3], block_topk_attention(query, key, value, Causal(), block=4, k=3, dropout=Dropout(p, 3)))


@pytest.mark.slow
def test_the_own_block_and_the_others_drop_by_numbers_of_their_own():
    """Token 1 reads key 0 in the first of the sorted pairs, token 0 reads key 0 in its own first row: with one seed for
    both, one is dropped whenever the other is."""
    query = key = torch.zeros(1, 1, 3, 2)
    value = torch.tensor([1.0, 0.0, 0.0]).view(1, 1, 3, 1)
    trials, agreed = 400, 0
    for seed in range(trials):
        out = block_topk_attention(query, key, value, Causal(), block=1, k=2, dropout=Dropout(0.5, seed))
        agreed += bool((out[0, 0, 0, 0] > 0) == (out[0, 0, 1, 0] > 0))
    assert abs(agreed / trials - 0.5) < 5 * 0.5 / math.sqrt(trials)


def test_the_second_derivative():
    inputs = made((7, 7), batch=1, heads=(2, 1))
    pairs = seen(*inputs[:2], 2, 2, True)
    outs = block_topk_attention(*inputs, Causal(), block=2, k=2), oracle.attend(*inputs, pairs).out
    found, dense = (torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)[0] for out in outs)
    agree(found, dense, inputs)


@pytest.mark.parametrize("norm", [0.0, 1e-30, 1e18])
def test_extreme_norms_stay_finite(norm):
    inputs = made(dtype=torch.float32, grad=False)
    inputs = [(norm * inputs[0]).requires_grad_(), (norm * inputs[1]).requires_grad_(), inputs[2]]
    out = block_topk_attention(*inputs, Causal(), block=4, k=3)
    out.sum().backward()
    assert out.isfinite().all() and inputs[0].grad.isfinite().all() and inputs[1].grad.isfinite().all()


@looped(("batch", "rows", "keys"), [(0, 5, 5), (2, 0, 0), (2, 0, 9), (2, 3, 0), (2, 1, 1)])
def test_few_tokens_or_none(batch, rows, keys):
    inputs = made((rows, keys), batch=batch)
    out = block_topk_attention(*inputs, Causal(), block=4, k=2)
    out.sum().backward()
    assert out.shape == (batch, HQ, rows, DV) and inputs[2].grad.shape == inputs[2].shape
    if not keys:
        assert (out == 0).all()


def test_memory_grows_with_tokens_and_not_with_pairs():
    kept, sizes = [], []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    for length in (512, 1024):
        kept.clear()
        inputs = made((length, length), batch=1, dtype=torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            block_topk_attention(*inputs, Causal(), block=32, k=3)
        sizes.append(sum(kept))
    assert sizes[1] <= 2.01 * sizes[0]


@looped(
    ("numbers", "error", "words"),
    [
        ({"block": 0, "k": 3}, ValueError, "block must be at least 1, got 0"),
        ({"block": 4, "k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"block": 4.0, "k": 3}, TypeError, "block must be an int"),
        ({"block": 4, "k": True}, TypeError, "k must be an int, got True"),
    ],
)
def test_numbers_that_make_no_sense(numbers, error, words):
    for call in (lambda: block_topk_attention(*made(), **numbers), lambda: BlockTopKConfig(**numbers)):
        with pytest.raises(error, match=re.escape(words)):
            call()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"block_topk_attention takes Causal\(\), Padding"):
        block_topk_attention(*made(), Window(3, 3), block=4, k=2)
    with pytest.raises(
        ValueError, match=r"key has length \(axis 2\) 29, expected query's 5: a query has its own block"
    ):
        block_topk_attention(*made((5, L)), block=4, k=2)
