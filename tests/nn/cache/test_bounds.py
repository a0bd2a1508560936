"""What a cache refuses, what it may cost, what it leaves alone, and its gradients."""

from __future__ import annotations

import pytest
import torch

from looped import looped
from nn.cache.decoding import BIASES, KINDS, Decoding, turned
from saccade import ALiBi, Causal, Documents, FromTensor, Global, Padding, Prefix, Window, attention
from saccade.nn.cache import GrowingLayer, KVCache, LayerCache, StaticLayer, WindowLayer

KEY, VALUE = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 4)


def filled(cache: LayerCache) -> LayerCache:
    with torch.no_grad():
        cache.append(KEY, VALUE, Causal())
    return cache


ROWS = {"growing": GrowingLayer, "static": lambda: StaticLayer(9), "window": lambda: WindowLayer(4, 1, 2)}
BAD = {
    "another batch": (
        lambda c: c.append(KEY[:1], VALUE[:1], None),
        r"cache: it holds keys of \(batch, heads, width\) \(2, 3, 7\) in float32 on cpu, but new ones of "
        r"\(1, 3, 7\) in float32 on cpu came: a cache serves one batch and one module",
    ),
    "other heads": (
        lambda c: c.append(KEY[:, :2], VALUE[:, :2], None),
        r"it holds keys of .* \(2, 3, 7\) .* \(2, 2, 7\)",
    ),
    "another width": (
        lambda c: c.append(KEY, VALUE[..., :3], None),
        r"it holds values of .* \(2, 3, 4\) .* \(2, 3, 3\)",
    ),
    "another dtype": (lambda c: c.append(KEY.double(), VALUE, None), "it holds keys of .* float32 .* float64"),
    "another device": (
        lambda c: c.append(KEY.to("meta"), VALUE.to("meta"), None),
        "it holds keys of .* float32 on cpu, .* float32 on meta",
    ),
    "a rank": (
        lambda c: c.append(KEY[0], VALUE, None),
        r"key: expected shape \(batch, heads, length, width\), got \(3, 5, 7\)",
    ),
    "lengths that differ": (
        lambda c: c.append(KEY[:, :, :2], VALUE, None),
        r"value: has \(batch, heads, length\) \(2, 3, 5\), expected the key's \(2, 3, 2\)",
    ),
    "padding of a batch": (
        lambda c: c.append(KEY, VALUE, None, padding=Padding([1, 2, 3])),
        "padding: made for a batch of 3, the new keys have a batch of 2",
    ),
    "padding of more": (
        lambda c: c.append(KEY, VALUE, None, padding=Padding([1, 6])),
        "padding: a length of 6, but 5 new rows came",
    ),
    "padding of other rows": (
        lambda c: c.append(KEY, VALUE, None, padding=Padding([[True] * 4, [True] * 4])),
        r"padding: booleans \(B, L\) for 4 rows, but 5 new rows came",
    ),
    "a hole": (
        lambda c: c.append(KEY, VALUE, None, padding=Padding([[True] * 5, [False, True, False, True, False]])),
        r"padding: item 1 has tokens in rows \[1, 3\], with a gap; tokens must be adjacent",
    ),
    "padding of queries": (
        lambda c: c.append(KEY, VALUE, None, padding=Padding([5, 4], queries=[5, 5])),
        "padding: its queries are the rows of its keys",
    ),
    "offset of a hole": (lambda c: c.offset(3, Padding([[True, False, True]] * 2)), "padding: item 0 .* with a gap"),
    "a placed mask": (
        lambda c: c.append(KEY[:, :, :1], VALUE[:, :, :1], Causal().at(5)),
        r"mask: with a cache it must not be placed by .at or .slice, the cache does that: Causal\(\).at\(5\)",
    ),
    "a placed bias": (
        lambda c: c.append(KEY[:, :, :1], VALUE[:, :, :1], None, ALiBi(torch.ones(3)).at(5)),
        "bias: with a cache it must not be placed by .at",
    ),
    "a short mask": (
        lambda c: c.append(KEY[:, :, :1], VALUE[:, :, :1], FromTensor(torch.ones(5, 5, dtype=torch.bool))),
        r"mask: a mask of shape \(5, 5\) for 6 queries and 6 keys",
    ),
    "short documents": (
        lambda c: c.append(KEY[:, :, :1], VALUE[:, :, :1], Documents([0] * 5)),
        "Documents: 5 ids, but queries and keys reach position 5",
    ),
    "a short bias": (
        lambda c: c.append(KEY[:, :, :1], VALUE[:, :, :1], None, torch.zeros(5, 5)),
        "bias: a tensor for 5 queries, but with the cache they reach position 5",
    ),
    "a mask of another batch": (
        lambda c: c.append(KEY[:, :, :1], VALUE[:, :, :1], Prefix([1, 2, 3])),
        "mask: made for a batch of 3, the query has a batch of 2",
    ),
    "no such item": (
        lambda c: c.reorder(torch.tensor([0, 2])),
        r"items: there is no item 2, the cache holds 2 \(0 to 1\)",
    ),
    "a negative item": (lambda c: c.reorder(torch.tensor([-1])), "items: there is no item -1"),
    "items of a rank": (lambda c: c.reorder(torch.tensor([[0]])), r"items: expected int64 \(n,\), got shape \(1, 1\)"),
    "too far back": (lambda c: c.rollback(6), "rollback: expected at most the 5 tokens there are, got 6"),
    "too far back for one": (
        lambda c: c.rollback(torch.tensor([0, 7])),
        "rollback: expected at most the 5 tokens there are, got 7",
    ),
    "back by less than nothing": (lambda c: c.rollback(-1), "rollback: must not be negative, got -1"),
    "back for another batch": (
        lambda c: c.rollback(torch.tensor([1, 1, 1])),
        r"rollback: must be an int or one for each of 2 items, got \(3,\)",
    ),
}


@looped("kind", ROWS)
@looped("bad", BAD)
def test_bad_input_is_named_and_costs_nothing(kind, bad):
    cache, (attempt, message) = filled(ROWS[kind]()), BAD[bad]
    before = cache._key.clone()
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        attempt(cache)
    assert cache.length == 5 and torch.equal(cache._key, before)


@looped(
    ("attempt", "message"),
    [
        (lambda c: c.append(KEY, VALUE, None, padding=KEY), "padding: expected a Padding of the new rows, got Tensor"),
        (lambda c: c.reorder([0]), r"items: expected int64 \(n,\).*, got list"),
        (lambda c: c.reorder(torch.ones(2)), r"items: expected int64 \(n,\).*, got torch.float32"),
        (lambda c: c.rollback(1.5), r"rollback: must be an int or int64 \(B,\), got 1.5"),
        (lambda c: c.rollback(torch.ones(2)), r"rollback: must be an int or int64 \(B,\), got torch.float32"),
        (lambda c: KVCache([c, 3]), "layers: number 1 must be a LayerCache, got int"),
        (lambda c: StaticLayer(1.0), "capacity must be an int"),
        (lambda c: WindowLayer(True), "window must be an int"),
    ],
)
def test_types(attempt, message):
    with pytest.raises(TypeError, match=message):
        attempt(filled(GrowingLayer()))


@looped(
    ("attempt", "message"),
    [
        (lambda: StaticLayer(0), "capacity must be at least 1, got 0"),
        (lambda: WindowLayer(0), "window must be at least 1, got 0"),
        (lambda: WindowLayer(2, -1), "sinks must be at least 0, got -1"),
        (lambda: WindowLayer(2, slack=-1), "slack must be at least 0, got -1"),
        (lambda: KVCache([GrowingLayer()] * 2), "one object came twice"),
        (lambda: KVCache([GrowingLayer(), WindowLayer(2)]).mask, "hide different pairs"),
        (lambda: filled(StaticLayer(4)), "cache: 0 tokens and 5 new ones do not fit its capacity of 4"),
        (lambda: Decoding(StaticLayer(4)).step([2, 5, 1]), "cache: 0 tokens and 5 new ones do not fit"),
        (lambda: StaticLayer(9).append(KEY.requires_grad_(), VALUE, None), "StaticLayer: writes in place and keeps no"),
        (lambda: WindowLayer(9).append(KEY.requires_grad_(), VALUE, None), "WindowLayer: writes in place and keeps no"),
    ],
)
def test_values(attempt, message):
    try:
        with pytest.raises(ValueError, match=message):
            attempt()
    finally:
        KEY.requires_grad_(False)


def test_masks_of_the_cache():
    assert KVCache.growing(2).mask is None and KVCache.static(2, 5).mask is None and KVCache([]).mask is None
    assert KVCache.window(2, 4).mask == Window(3, 0)
    assert KVCache.window(2, 4, sinks=2).mask == Window(3, 0) | Global([0, 1])


@pytest.mark.parametrize("kind", ["window", "window slack", "sinks", "sinks slack"])
def test_a_ring_takes_the_same_memory_always(kind):
    run = Decoding(KINDS[kind]())
    cache = run.cache
    sizes = set()
    for count in [1, 9, 1, 1, 14, 1]:
        run.step([count] * 3)
        sizes.add((cache.nbytes, cache._key.untyped_storage().nbytes(), cache._key.data_ptr()))
    slots = cache.sinks + cache.window + cache.slack
    assert {size[0] for size in sizes} == {3 * slots * 2 * (6 + 5) * 8} and len(sizes) == 1


def test_a_static_buffer_stays_where_it_is():
    run = Decoding(StaticLayer(29))
    run.step([3, 1, 2])
    where = run.cache._key.data_ptr(), run.cache._counts.data_ptr()
    for _ in range(2):
        run.step([7, 2, 1], side="left")
        run.reorder([2, 0, 0])
        run.rollback(1)
    run.cache.reset()
    Decoding(run.cache, seed=3).step([29, 1, 5])
    assert (run.cache._key.data_ptr(), run.cache._counts.data_ptr()) == where
    assert run.cache.nbytes == 3 * 30 * 2 * (6 + 5) * 8  # one slot more, for padding


def test_a_growing_buffer_doubles_and_is_not_copied_in_between():
    cache, places, views = GrowingLayer(), [], []
    key = torch.randn(2, 3, 100, 7)
    with torch.no_grad():
        for at in range(100):
            seen = cache.append(key[:, :, at : at + 1], key[:, :, at : at + 1], None)
            places.append(seen.key.data_ptr())
            views.append(seen.key)
    assert cache.nbytes == 2 * 2 * 3 * 128 * 7 * 4
    assert len(set(places)) == 4  # 16, 32, 64 and 128 slots
    for length, view in enumerate(views, 1):
        torch.testing.assert_close(view, key[:, :, :length], rtol=0, atol=0)


def test_a_long_prompt_does_not_form_a_square_in_a_ring():
    key = torch.randn(1, 1, 3000, 4)
    cache = WindowLayer(7, sinks=2)
    with torch.no_grad():
        for _ in range(2):  # into an empty ring, and into a full one
            seen = cache.append(key, key, Causal())
            assert seen.key.shape[2] <= 3000 + 8
            assert sum(table.values.numel() for table in tables(seen.mask)) <= 3 * 3008


def tables(mask):
    return [*mask.tables(), *(table for part in mask._children() for table in tables(part))]


@looped("kind", KINDS)
def test_inference_mode_and_no_grad_may_take_turns(kind):
    run = Decoding(KINDS[kind]())
    with torch.inference_mode():
        run.step([4, 4, 4])
        run.reorder([2, 0, 1])
    run.step([1, 1, 1])
    with torch.inference_mode():
        run.step([1, 0, 2], side="left")


@looped("side", ["right", "left", None])
@looped("bias", BIASES)
def test_gradients_of_the_growing_cache(side, bias):
    batch, chunks = 3, [4, 1, 3]
    counts = [[4, 4, 4], [1, 1, 1], [3, 3, 3]] if side is None else [[2, 4, 1], [1, 1, 0], [3, 1, 2]]
    sizes, make = ((4, 6), (2, 6), (2, 5)), BIASES[bias][0]
    given = [torch.randn(batch, heads, 8, width, dtype=torch.float64).requires_grad_() for heads, width in sizes]
    cache, ours, picked = GrowingLayer(), 0.0, [[] for _ in range(batch)]
    cotangent = torch.randn(batch, 4, 8, 5, dtype=torch.float64)
    for at, rows, real in zip([0, 4, 5], chunks, counts, strict=True):
        padding, left = None, [0] * batch
        if side is not None:
            left = [rows - n if side == "left" else 0 for n in real]
            row = torch.arange(rows)
            padding = Padding(torch.stack([(row >= a) & (row < a + n) for a, n in zip(left, real, strict=True)]))
        query, key, value = (x[:, :, at : at + rows] for x in given)
        offset = cache.offset(rows, padding)
        start = torch.full((batch,), offset) if isinstance(offset, int) else offset
        place = (start[:, None] + torch.arange(rows))[:, None]
        seen = cache.append(turned(key, place), value, Causal(), make(), padding)
        out = attention(turned(query, place), seen.key, seen.value, seen.mask, bias=seen.bias)
        ours = ours + (out * cotangent[:, :, at : at + rows]).sum()
        for b in range(batch):
            picked[b] += range(at + left[b], at + left[b] + real[b])
    parallel = 0.0
    for b, rows in enumerate(picked):
        query, key, value, weight = (x[b : b + 1, :, rows] for x in (*given, cotangent))
        place = torch.arange(len(rows))
        out = attention(turned(query, place), turned(key, place), value, Causal(), bias=cropped(make(), len(rows)))
        parallel = parallel + (out * weight).sum()
    torch.testing.assert_close(ours, parallel, rtol=1e-12, atol=1e-12)
    for mine, other in zip(torch.autograd.grad(ours, given), torch.autograd.grad(parallel, given), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)
        assert mine.any()


def cropped(bias, length):
    return bias[..., :length, :length] if isinstance(bias, torch.Tensor) else bias


def test_a_step_that_records_follows_one_that_does_not():
    cache, key = GrowingLayer(), torch.randn(1, 1, 3, 2)
    with torch.no_grad():
        held = cache.append(key, key, None).key
    new = torch.randn(1, 1, 1, 2, requires_grad=True)
    seen = cache.append(new, new, None)
    with torch.no_grad():
        cache.append(key, key, None)
    (seen.key**2).sum().backward()  # the graph's tensors have not been written to
    torch.testing.assert_close(new.grad, 2 * new)
    torch.testing.assert_close(held, key)
