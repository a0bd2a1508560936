"""The sums of blocks in a cache: those of the keys that it holds, whatever was appended, taken back and reordered."""

from __future__ import annotations

import pytest
import torch

from saccade import Causal, Padding
from saccade.nn import AttentionConfig, BlockSumsLayer, MultiHeadAttention
from saccade.variants import BlockTopKConfig

BLOCK, WIDTH, HEADS = 3, 12, 2


def looked_up(cache):
    """Sums block by block of the keys that are held, in float64; 0 where there are none."""
    lengths = [int(n) for n in torch.as_tensor(cache.length).expand(cache._key.shape[0])]
    blocks = -(-max(lengths) // BLOCK)
    found = torch.zeros(len(lengths), cache._key.shape[1], blocks, cache._key.shape[3], dtype=torch.float64)
    for item, length in enumerate(lengths):
        for place in range(length):
            found[item, :, place // BLOCK] += cache._key[item, :, place].detach().double()
    return found


@pytest.mark.parametrize("grad", [False, True])
def test_sums_are_those_of_the_keys_held(grad):
    cache = BlockSumsLayer(BLOCK)

    def append(rows, counts):
        new = torch.randn(3, 2, rows, 5)
        cache.append(new, new, Causal(), None, Padding(counts))

    moves = [
        lambda: append(7, [7, 7, 7]),
        lambda: append(5, [5, 2, 4]),
        lambda: cache.rollback(torch.tensor([5, 0, 3])),  # within a block and beyond one
        lambda: append(4, [1, 4, 2]),
        lambda: cache.reorder(torch.tensor([2, 0, 2])),
        lambda: append(1, [1, 1, 1]),
        lambda: cache.rollback(8),
        lambda: append(6, [6, 6, 6]),
    ]
    with torch.set_grad_enabled(grad):
        for move in moves:
            move()
            torch.testing.assert_close(cache.sums(), looked_up(cache), rtol=1e-12, atol=1e-12)
    cache.reset()
    assert cache.nbytes == 0


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_decoding_with_them_is_the_parallel_form(kv_heads):
    config = AttentionConfig(WIDTH, HEADS, kv_heads=kv_heads, mechanism=BlockTopKConfig(BLOCK, 2))
    module, x = MultiHeadAttention(config).double(), torch.randn(3, 29, WIDTH, dtype=torch.float64)
    cache = module.cache()
    assert isinstance(cache, BlockSumsLayer) and cache.block == BLOCK
    with torch.no_grad():
        whole = module(x, Causal())
        for start, stop, back in (
            (0, 8, 0),
            (8, 9, 0),
            (9, 10, 4),
            (6, 13, 0),
            *((n, n + 1, 0) for n in range(13, 29)),
        ):
            out = module(x[:, start:stop], Causal(), cache=cache)
            torch.testing.assert_close(out, whole[:, start:stop])
            cache.rollback(back)


def test_beams_and_unequal_lengths_choose_as_each_alone():
    module = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, mechanism=BlockTopKConfig(BLOCK, 2))).double()
    x, cache = torch.randn(3, 17, WIDTH, dtype=torch.float64), module.cache()
    lengths, items = [13, 10, 16], torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        module(x[:, :16], Causal(), cache=cache, padding=Padding(lengths))
        cache.reorder(items)
        out = module(x[items, 16:], Causal(), cache=cache)
        for row, item in enumerate(items.tolist()):
            alone = torch.cat((x[item, : lengths[item]], x[item, 16:]))[None]
            torch.testing.assert_close(out[row], module(alone, Causal())[0, -1:])


def test_the_last_token_alone_has_the_gradients_of_the_parallel_form():
    module = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, kv_heads=1, mechanism=BlockTopKConfig(BLOCK, 3))).double()
    x, cotangent = torch.randn(2, 23, WIDTH, dtype=torch.float64), torch.randn(2, WIDTH, dtype=torch.float64)
    cache = module.cache()
    found = torch.cat([module(part, Causal(), cache=cache) for part in x.split([22, 1], 1)], 1)[:, -1]
    wanted = module(x, Causal())[:, -1]
    for one, other in zip(
        *(torch.autograd.grad(out, list(module.parameters()), cotangent) for out in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(one, other)
