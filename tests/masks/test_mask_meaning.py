"""Every mask, alone and composed, against plain Python about one pair at a time."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings, strategies as st

from masks.mask_sets import (
    BATCH,
    HEADS,
    LEAVES,
    Multiples,
    composition,
    full,
    kind_of,
    placed,
    problems,
    spans,
    table,
    tiles,
)
from saccade.operator import _masks as masks


@pytest.mark.parametrize("name", sorted(LEAVES))
@settings(max_examples=15)
@given(data=st.data())
def test_each_class_is_its_set(name, data):
    Lq, Lk = data.draw(st.integers(0, 13)), data.draw(st.integers(0, 13))
    case = placed(data.draw, LEAVES[name](data.draw, Lq, Lk), Lq)
    assert torch.equal(full(case.mask, Lq, Lk), table(case.meaning, Lq, Lk))


@given(problem=problems(depth=2))
def test_compositions_are_their_sets(problem):
    case, Lq, Lk = problem
    assert torch.equal(full(case.mask, Lq, Lk), table(case.meaning, Lq, Lk)), repr(case.mask)


@given(problem=problems(depth=2), data=st.data())
def test_a_tile_is_that_part_of_the_whole(problem, data):
    (mask, _), Lq, Lk = problem
    rows, keys = data.draw(spans(Lq)), data.draw(spans(Lk))
    expected = full(mask, Lq, Lk)[..., slice(*rows), slice(*keys)]
    tile = mask.tile(rows, keys, Lq, Lk)
    assert tile.kind == kind_of(expected)
    if tile.kind == "partial":
        assert torch.equal(tile.bits.expand_as(expected), expected)
    else:
        assert tile.bits is None


@given(problem=problems(depth=2, least=1), size=st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_a_kind_never_lies(problem, size):
    (mask, _), Lq, Lk = problem
    bits = full(mask, Lq, Lk)
    for rows in tiles(Lq, size[0]):
        for keys in tiles(Lk, size[1]):
            part = bits[..., slice(*rows), slice(*keys)]
            assert mask.kind(rows, keys, Lq, Lk) in (kind_of(part), "partial")
            for item in range(BATCH):
                assert mask.kind(rows, keys, Lq, Lk, item=item) in (kind_of(part[item]), "partial")
                for head in range(HEADS):
                    kind = mask.kind(rows, keys, Lq, Lk, item=item, head=head)
                    assert kind in (kind_of(part[item, head]), "partial")


@given(problem=problems(depth=2, least=1), data=st.data())
def test_the_rule_on_single_pairs_and_the_bits_in_any_order_agree(problem, data):
    (mask, _), Lq, Lk = problem
    bits = full(mask, Lq, Lk)
    rows = torch.tensor(data.draw(st.permutations(range(Lq))))
    keys = torch.tensor(data.draw(st.permutations(range(Lk))))
    shuffled = mask._grid(rows, keys, Lq, Lk)
    assert shuffled.shape[2:] == (Lq, Lk) and shuffled.shape[0] in (1, BATCH) and shuffled.shape[1] in (1, HEADS)
    assert torch.equal(shuffled.expand_as(bits), bits[:, :, rows][..., keys])
    at = [data.draw(st.integers(0, n - 1)) for n in bits.shape]
    assert bool(mask._attends(*(torch.tensor(n) for n in at), Lq, Lk)) == bool(bits[tuple(at)])
    flat = [torch.randint(n, (17,), generator=torch.Generator().manual_seed(0)) for n in bits.shape]
    assert torch.equal(mask._attends(*flat, Lq, Lk).expand(17), bits[tuple(flat)])


@given(problem=problems(depth=2), data=st.data())
def test_a_slice_and_a_slice_of_it_are_parts_of_the_whole(problem, data):
    (mask, _), Lq, Lk = problem
    bits = full(mask, Lq, Lk)
    rows, keys = data.draw(spans(Lq)), data.draw(spans(Lk))
    cut = mask.slice(rows, keys, lengths=(Lq, Lk))
    expected = bits[..., slice(*rows), slice(*keys)]
    n, m = expected.shape[2:]
    assert torch.equal(full(cut, n, m), expected)
    assert cut._origin() == (rows[0], keys[0])
    inner_rows, inner_keys = data.draw(spans(n)), data.draw(spans(m))
    again = cut.slice(slice(*inner_rows), range(*inner_keys))
    expected = expected[..., slice(*inner_rows), slice(*inner_keys)]
    assert torch.equal(full(again, *expected.shape[2:]), expected)
    assert again._origin() == (rows[0] + inner_rows[0], keys[0] + inner_keys[0])
    n, m = expected.shape[2:]
    assert again.kind((0, n), (0, m), n, m) in (kind_of(expected), "partial")


@given(problem=problems(depth=2, least=1), data=st.data())
def test_slices_taken_alike_combine_like_the_whole(problem, data):
    (mask, _), Lq, Lk = problem
    rows, keys = data.draw(spans(Lq)), data.draw(spans(Lk))
    padding = masks.Padding([Lk, Lk // 2, 0])
    apart = mask.slice(rows, keys, lengths=(Lq, Lk)) & padding.slice(rows, keys)
    n, m = rows[1] - rows[0], keys[1] - keys[0]
    bits = full(mask, Lq, Lk) & padding.dense(Lq, Lk)
    assert torch.equal(full(apart, n, m), bits[..., slice(*rows), slice(*keys)])


@pytest.mark.parametrize("sizes", [{}, {"_DIRECT": 0, "_ROWS": 3, "_KEYS": 5}], ids=["at once", "in small tiles"])
@given(problem=problems(depth=2))
def test_seen_keys(sizes, problem):
    (mask, _), Lq, Lk = problem
    bits = full(mask, Lq, Lk)
    with patch.multiple("saccade.operator._masks._visible_keys", **sizes) if sizes else nullcontext():
        found = masks.keys_seen(mask, Lq, Lk)
    assert bits.any(2).all() if found is None else torch.equal(found.expand(BATCH, HEADS, Lk), bits.any(2))


@given(data=st.data(), sizes=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), min_size=1, max_size=2))
def test_the_sides_of_padding(data, sizes):
    """The rows and keys that take part are those of the dense mask, for the lengths asked last and for others."""
    Lq, Lk = (min(side) for side in zip(*sizes, strict=True))
    kept = st.lists(st.integers(0, Lk), min_size=BATCH, max_size=BATCH)
    real = st.lists(st.integers(0, Lq), min_size=1, max_size=1)
    mask = masks.Padding(data.draw(kept), data.draw(st.none() | real))
    for rows, keys in (*sizes, *sizes):
        seen = mask.sides(rows, keys, torch.device("cpu"))
        bits = mask.dense(rows, keys).expand(BATCH, 1, rows, keys)
        assert torch.equal(seen.keys.expand(BATCH, 1, keys), bits.any(2))
        assert bits.any(3).all() if seen.rows is None else torch.equal(seen.rows.expand(BATCH, 1, rows), bits.any(3))


@given(data=st.data())
def test_values(data):
    """Equality, hashing, copies, and what neither depends on the object's identity."""
    case = placed(data.draw, composition(data.draw, 11, 7, depth=2), 11)
    twin = pickle.loads(pickle.dumps(case.mask))
    assert twin == case.mask and hash(twin) == hash(case.mask) and repr(twin) == repr(case.mask)
    assert torch.equal(full(twin, 11, 7), full(case.mask, 11, 7))
    assert case.mask != ~case.mask and ~~case.mask == case.mask
    if "<" not in repr(case.mask):
        assert eval(repr(case.mask), {**vars(masks), "Multiples": Multiples}) == case.mask
