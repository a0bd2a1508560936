"""What follows from the definitions alone: permutations, parts of a whole, extremes, and sizes of nothing."""

from __future__ import annotations

import math

import torch

import problems
import saccade
from looped import looped


def draw(**sizes):
    named = problems.tensors(**sizes)
    return named["query"], named["key"]


def close(got, want):
    # the same sums in another order: Lk = 13 terms of at most 1, in the dtype of the result
    torch.testing.assert_close(got, want, rtol=0, atol=64 * 13 * torch.finfo(got.dtype).eps)


def test_permuting_keys_permutes_what_they_receive(backend):
    query, key = draw()
    order = torch.randperm(13)
    one, other = (saccade.statistics(query, x, backend=backend, top=2) for x in (key, key[:, :, order]))
    close(other.received, one.received[..., order])
    close(other.entropy, one.entropy)
    assert torch.equal(order[other.largest_at], one.largest_at)
    assert torch.equal(order[other.top_keys], one.top_keys)


def test_permuting_rows_permutes_rows(backend):
    query, key = draw()
    order = torch.randperm(11)
    one, other = (saccade.statistics(x, key, backend=backend) for x in (query, query[:, :, order]))
    close(other.entropy, one.entropy[:, :, order])
    close(other.received, one.received)


def test_items_do_not_see_each_other(backend):
    query, key = draw()
    whole = saccade.statistics(query, key, saccade.Padding([7, 13]), backend=backend)
    alone = saccade.statistics(query[:1], key[:1], saccade.Padding([7]), backend=backend)
    for name in ("lse", "entropy", "largest", "distance", "received"):
        assert torch.equal(getattr(whole, name)[:1], getattr(alone, name)), name


@looped("side", ["left", "right"])
def test_padding_on_either_side_is_the_sequence_alone(side, backend):
    """A padded item has the numbers of its tokens without padding, its first key being the first token."""
    query, key = draw(rows=13)
    lengths, kept = (7, 13), torch.zeros(2, 13, dtype=torch.bool)
    for item, length in enumerate(lengths):
        kept[item, 13 - length if side == "left" else 0 :][:length] = True
    mask = saccade.Causal() & saccade.Padding(kept, queries=kept)
    got = saccade.statistics(query, key, mask, backend=backend)
    assert (got.rows_counted, got.rows_padded, got.rows_empty) == (6 * 20, 6 * 6, 0)
    for item in range(2):
        tokens = kept[item]
        alone = saccade.statistics(
            query[item : item + 1, :, tokens], key[item : item + 1, :, tokens], saccade.Causal(), backend=backend
        )
        for name in ("lse", "entropy", "largest", "distance"):
            close(getattr(got, name)[item : item + 1, :, tokens], getattr(alone, name))
        for name in alone.mass:
            close(got.mass[name][item : item + 1, :, tokens], alone.mass[name])
        close(got.received[item : item + 1, :, tokens], alone.received)
        assert (got.received[item, :, ~tokens] == 0).all()


def test_rows_that_one_of_two_paddings_names_are_padded(backend):
    query, key = draw(rows=13)
    mask = saccade.Padding([13, 13], queries=[5, 13]) & saccade.Padding([13, 13], queries=[13, 7])
    got = saccade.statistics(query, key, mask, backend=backend)
    assert (got.rows_counted, got.rows_padded, got.rows_empty) == (6 * (5 + 7), 6 * (8 + 6), 0)


def test_a_uniform_row(backend):
    query, key = draw()
    got = saccade.statistics(torch.zeros_like(query), key, backend=backend)
    close(got.entropy, torch.full_like(got.entropy, math.log(13)))
    close(got.evenness, torch.ones_like(got.evenness))
    close(got.largest, torch.full_like(got.largest, 1 / 13))
    close(got.received, torch.full_like(got.received, 11 / 13))
    assert (got.largest_at == 0).all()  # all are equal: the first


@looped("dtype", [None, torch.float32])
def test_of_equal_logits_the_first_keys_are_named(dtype, backend):
    query, key = draw(dtype=dtype)
    key[:, :, 5:] = key[:, :, 5:6]
    key[:, :, :5] = 0
    query[...] = key.sum(2).repeat_interleave(2, 1)[:, :, None]  # so that key 5 is liked best
    got = saccade.statistics(query, key, top=6, backend=backend)
    assert (got.largest_at == 5).all()
    assert torch.equal(got.top_keys, torch.arange(5, 11).expand(got.top_keys.shape))


def test_the_order_of_floats_as_integers_is_that_of_a_stable_sort():
    from saccade.operator._statistics._tiled import _greatest

    pool = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-42, -1e-42, 3e38, -3e38, -math.inf, 2.5, -2.5])
    entries = pool[torch.randint(len(pool), (7, 5, 131))]
    assert entries.dtype == torch.float32
    assert torch.equal(_greatest(entries, 37), torch.argsort(entries, dim=-1, descending=True, stable=True)[..., :37])


def test_more_asked_for_than_there_is(backend):
    query, key = draw()
    got = saccade.statistics(query, key, saccade.Padding([3, 13]), top=17, backend=backend)
    assert got.top_keys.shape == (2, 6, 11, 17)
    assert (got.top_keys[0, ..., 3:] == -1).all() and (got.top_weights[0, ..., 3:] == 0).all()
    assert (got.top_keys[1, ..., :13] >= 0).all() and (got.top_keys[1, ..., 13:] == -1).all()
    close(got.top_weights.sum(-1), torch.ones_like(got.entropy))


def test_large_logits_lose_nothing(backend):
    """Logits up to 60000: lse - sum p s would lose the entropy of the two on top to cancellation."""
    query, key = draw(heads=1, kv_heads=1)
    query[...], key[...] = 0, 0
    query[..., 0], key[..., 0] = 100, 100 * torch.arange(13).div(2, rounding_mode="floor")  # 0 0 1 1 ... 5 5 6
    alone = saccade.statistics(query, key, scale=1.0, backend=backend)
    close(alone.entropy, torch.zeros_like(alone.entropy))
    pair = saccade.statistics(query, key[:, :, :12], scale=1.0, backend=backend)
    close(pair.entropy, torch.full_like(pair.entropy, math.log(2)))
    close(pair.largest, torch.full_like(pair.largest, 0.5))
    assert (pair.largest_at == 10).all()


def test_a_sink_that_takes_nearly_all(backend):
    query, key = draw()
    sink = torch.full((6,), 50.0, dtype=query.dtype)
    got = saccade.statistics(query, key, sink=sink, backend=backend)
    close(got.mass["sink"], torch.ones_like(got.lse))
    torch.testing.assert_close(got.lse, torch.full_like(got.lse, 50.0))
    # what the keys share among themselves is what it was without the sink
    without = saccade.statistics(query, key, backend=backend)
    tiny = torch.finfo(got.lse.dtype).eps
    torch.testing.assert_close(got.largest / without.largest, torch.exp(without.lse - 50), rtol=2000 * tiny, atol=0)


def test_a_sink_leaves_empty_rows_empty(backend):
    query, key = draw()
    sink = torch.randn(6, dtype=query.dtype)
    got = saccade.statistics(query, key, saccade.Padding([0, 13]), sink=sink, received=True, top=2, backend=backend)
    assert not got.counted[0].any() and got.counted[1].all()
    assert (got.lse[0] == -math.inf).all()
    for name, rows in {"entropy": got.entropy, "distance": got.distance, **got.mass}.items():
        assert (rows[0] == 0).all(), name
    assert (got.received[0] == 0).all() and (got.largest_at[0] == -1).all() and (got.top_keys[0] == -1).all()
    assert (got.rows_counted, got.rows_empty, got.rows_padded) == (66, 66, 0)


@looped("sizes", [{"batch": 0}, {"rows": 0}, {"keys": 0}, {"rows": 0, "keys": 0}])
def test_nothing(sizes, backend):
    named = problems.tensors(**sizes)
    got = saccade.statistics(
        named["query"],
        named["key"],
        value=named["value"],
        top=2,
        histograms=True,
        backend=backend,
        groups={"some": torch.ones(named["key"].shape[2], dtype=torch.bool)},
    )
    rows = named["query"].shape[:3]
    assert got.shape == (*rows, named["key"].shape[2])
    assert got.entropy.shape == got.counted.shape == got.mass["some"].shape == rows
    assert got.top_keys.shape == (*rows, 2)
    assert got.received.shape == (*rows[:2], named["key"].shape[2]) and (got.received == 0).all()
    assert got.rows_counted == 0 and got.rows_empty == math.prod(rows)
    assert got.heads["logits"]["counts"].sum() == 0 == got.heads["weights"]["counts"].sum()
    assert math.isnan(got.mean("entropy")[0])
    assert got.summary()["mean"]["entropy"] == [None] * 6
    assert "6 heads" in repr(got)


def test_one_head_one_query_one_key(backend):
    named = problems.tensors(1, 1, 1, 1, 1, 5)
    got = saccade.statistics(named["query"], named["key"], top=1, backend=backend)
    want = {"entropy": 0, "evenness": 0, "largest": 1, "largest_at": 0, "distance": 0, "received": 1, "top_keys": 0}
    assert {name: getattr(got, name).item() for name in want} == want
    assert {name: mass.item() for name, mass in got.mass.items()} == {
        "self": 1,
        "previous": 0,
        "next": 0,
        "first": 1,
        "sink": 0,
    }


def test_distances_far_out(backend):
    """Places beyond 2^24, which float32 does not tell apart, are subtracted as integers."""
    query, key = draw()
    far = 2**24 + 1
    got = saccade.statistics(
        torch.zeros_like(query), key[:, :, :2], saccade.Window(None, None).at(far), backend=backend
    )
    want = far + torch.arange(11, dtype=torch.float64) - 0.5
    torch.testing.assert_close(got.distance.double(), want.expand(2, 6, 11), rtol=1e-7, atol=0)
