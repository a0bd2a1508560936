"""The sampler's promises, as properties of whole epochs."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader

from looped import looped
from saccade.batching import LengthGrouped, pad

lengths_of = st.lists(st.integers(0, 60), min_size=5, max_size=90)
limits = st.sampled_from([{"batch": 1}, {"batch": 7}, {"tokens": 64}, {"tokens": 211}])
options_of = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 3),
        "shuffle": st.booleans(),
        "pool": st.sampled_from([1, 3, 50]),
        "multiple_of": st.sampled_from([1, 8]),
        "longest_first": st.booleans(),
    }
)


def of_all_ranks(lengths, world, **options):
    return [LengthGrouped(lengths, rank=rank, world=world, report=None, **options) for rank in range(world)]


def padded_tokens(lengths, batch, multiple_of=1):
    return len(batch) * -(-max(lengths[i] for i in batch) // multiple_of) * multiple_of


@given(lengths=lengths_of, limit=limits, options=options_of, epoch=st.integers(0, 2))
def test_every_index_exactly_once_and_within_the_limits(lengths, limit, options, epoch):
    sampler = LengthGrouped(lengths, **limit, **options, report=None)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert len(sampler) == len(batches)
    assert all(batches)
    for batch in batches:
        assert len(batch) <= limit.get("batch", len(lengths))
        assert padded_tokens(lengths, batch, options["multiple_of"]) <= limit.get("tokens", 1 << 30)


@given(lengths=lengths_of, limit=limits, options=options_of, world=st.integers(2, 5))
def test_ranks_share_the_batches_evenly(lengths, limit, options, world):
    shares = [sampler.batches(1) for sampler in of_all_ranks(lengths, world, **limit, **options)]
    assert len({len(share) for share in shares}) == 1
    batches = [batch for share in shares for batch in share]
    counts = np.bincount([i for batch in batches for i in batch], minlength=len(lengths))
    assert counts.min() == 1
    # Items come twice only where even batches of one item are too few.
    repeated = int(counts.sum()) - len(lengths)
    assert repeated < world
    assert repeated == 0 or (counts.max() == 2 and all(len(batch) == 1 for batch in batches))
    assert all(padded_tokens(lengths, b, options["multiple_of"]) <= limit.get("tokens", 1 << 30) for b in batches)


@given(lengths=lengths_of, options=options_of, world=st.integers(1, 5))
def test_drop_last_leaves_out_what_does_not_fill_a_batch(lengths, options, world):
    shares = [s.batches(0) for s in of_all_ranks(lengths, world, batch=1, drop_last=True, **options)]
    indices = [i for share in shares for batch in share for i in batch]
    assert len(set(indices)) == len(indices) == len(lengths) // world * world
    if len(lengths) >= 3 * world:
        shares = [s.batches(0) for s in of_all_ranks(lengths, world, batch=3, drop_last=True, **options)]
        assert {len(batch) for share in shares for batch in share} == {3}
        assert {len(share) for share in shares} == {len(lengths) // (3 * world)}
        indices = [i for share in shares for batch in share for i in batch]
        assert len(set(indices)) == len(indices)


@given(lengths=lengths_of, options=options_of, world=st.integers(1, 5))
def test_drop_last_with_a_budget_leaves_out_whole_batches(lengths, options, world):
    every = len(LengthGrouped(lengths, tokens=211, report=None, **options))
    shares = [s.batches(0) for s in of_all_ranks(lengths, world, tokens=211, drop_last=True, **options)]
    indices = [i for share in shares for batch in share for i in batch]
    assert len(set(indices)) == len(indices)
    assert {len(share) for share in shares} == {max(every // world, 1)}


def test_what_is_dropped_is_left_to_chance():
    sampler = LengthGrouped(range(1, 12), 5, drop_last=True, report=None)
    dropped = [set(range(11)) - {i for batch in sampler.batches(e) for i in batch} for e in range(60)]
    assert all(len(one) == 1 for one in dropped)
    assert len(set.union(*dropped)) > 5


@given(lengths=lengths_of, limit=limits, options=options_of)
def test_an_epoch_is_a_function_of_arguments_and_number(lengths, limit, options):
    one, other = (LengthGrouped(lengths, **limit, **options, report=None) for _ in range(2))
    later = [other.batches(2), other.batches(0)]
    torch.manual_seed(7), np.random.seed(7)
    assert [one.batches(2), pickle.loads(pickle.dumps(one)).batches(0)] == later
    one.set_epoch(2)
    assert list(one) == list(one) == later[0]
    in_tensors = LengthGrouped(torch.tensor(lengths), **limit, **options, report=None)
    assert in_tensors.batches(0) == later[1]


def test_epochs_and_seeds_differ():
    lengths = [n % 17 for n in range(200)]
    drawn = [LengthGrouped(lengths, 7, seed=s, report=None).batches(e) for s in range(3) for e in range(3)]
    assert all(drawn[a] != drawn[b] for a in range(9) for b in range(a))


def test_without_shuffling_the_order_is_by_length():
    lengths = [5, 3, 11, 3, 7]
    sampler = LengthGrouped(lengths, 2, shuffle=False, report=None)
    assert sampler.batches(0) == sampler.batches(3) == [[1, 3], [0, 4], [2]]
    assert LengthGrouped(lengths, 2, shuffle=False, longest_first=True, report=None).batches(0)[0] == [2]


@given(lengths=lengths_of, limit=limits, world=st.integers(1, 4))
def test_the_longest_item_comes_first_if_asked(lengths, limit, world):
    samplers = of_all_ranks(lengths, world, longest_first=True, **limit)
    assert max(lengths[i] for sampler in samplers for i in sampler.batches(1)[0]) == max(lengths)


def test_ranks_work_on_like_lengths_at_the_same_time():
    lengths = torch.randint(1, 1000, (960,)).tolist()
    shares = [sampler.batches(0) for sampler in of_all_ranks(lengths, 4, batch=8)]
    longest = np.array([[max(lengths[i] for i in batch) for batch in share] for share in shares])
    within, between = np.ptp(longest, axis=0).mean(), longest.mean(axis=0).std()
    # 30 batches from short to long: four neighbours span about a tenth of what there is.
    assert within < between / 2


def test_the_report_counts_padding():
    told = []
    # Grouped: 2 * 4, 2 * 10, of 8 + 18 tokens. Which batches chance makes is the sampler's own business.
    sampler = LengthGrouped([4, 10, 4, 8], 2, seed=3, report=told.append)
    share = sampler.padding()
    assert share.grouped == 1 - 26 / 28
    assert share.batches == 2
    assert share.random_order in (1 - 26 / 28, 1 - 26 / 36, 1 - 26 / (2 * 10 + 2 * 8))
    assert told == [f"padding 7.1 % of tokens (random order: {share.random_order * 100:.1f} %), 2 batches"]
    rounded = LengthGrouped([4, 10, 4, 8], 2, multiple_of=8, report=None).padding()
    assert rounded.grouped == 1 - 26 / (2 * 8 + 2 * 16)


def test_random_order_is_what_a_plain_sampler_would_pad():
    random = np.random.default_rng(5)
    lengths = np.exp(random.normal(4, 0.7, 4000)).astype(int) + 1
    share = LengthGrouped(lengths.tolist(), 16, report=None).padding()
    plain = [random.permutation(4000).reshape(-1, 16) for _ in range(20)]
    shares = [1 - lengths.sum() / sum(16 * lengths[batch].max() for batch in order) for order in plain]
    assert abs(share.random_order - np.mean(shares)) < 5 * np.std(shares)
    assert share.grouped < share.random_order / 4


def test_only_the_first_rank_reports_and_none_is_silent(capsys):
    LengthGrouped([3] * 8, 2)
    assert capsys.readouterr().out == "padding 0.0 % of tokens (random order: 0.0 %), 4 batches\n"
    LengthGrouped([3] * 8, 2, rank=1, world=2)
    LengthGrouped([3] * 8, 2, report=None)
    assert capsys.readouterr().out == ""


def test_in_a_data_loader():
    data = [torch.full((n,), n) for n in (3, 1, 2, 5, 4, 1, 2, 7)]
    lengths = [len(item) for item in data]
    loader = DataLoader(data, batch_sampler=LengthGrouped(lengths, tokens=10, report=None), collate_fn=pad)
    seen = []
    for x, padding in loader:
        assert x.numel() <= 10
        seen += [int(row[0]) for row in x]
        assert padding.keys.table.host.tolist() == [int(row[0]) for row in x]
    assert sorted(seen) == sorted(lengths)


@looped(
    ("lengths", "options", "error", "words"),
    [
        ([3], {}, ValueError, "batch, tokens: exactly one must be given, got batch=None and tokens=None"),
        ([3], {"batch": 2, "tokens": 3}, ValueError, "exactly one must be given, got batch=2 and tokens=3"),
        ([], {"batch": 2}, ValueError, "lengths: got none; at least one item is needed"),
        (7, {"batch": 2}, TypeError, "lengths: must be integers (N,), one for each item, got 7 (int)"),
        ([1.5], {"batch": 2}, TypeError, "lengths must be an int or ints (B,)"),
        ([3, -2], {"batch": 2}, ValueError, "lengths must be at least 0, got -2"),
        (
            [3, 9, 11],
            {"tokens": 10},
            ValueError,
            "tokens: item 2 has 11 tokens, the budget is 10; raise it, or cut or leave out longer items",
        ),
        (
            [3, 9],
            {"tokens": 10, "multiple_of": 8},
            ValueError,
            "tokens: item 1 has 16 tokens (rounded up to a multiple of 8), the budget is 10",
        ),
        ([3], {"batch": 0}, ValueError, "batch must be at least 1, got 0"),
        ([3], {"tokens": 2.5}, TypeError, "tokens must be an int, got 2.5 (float)"),
        ([3], {"batch": 1, "seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ([3], {"batch": 1, "pool": 0}, ValueError, "pool must be at least 1, got 0"),
        ([3], {"batch": 1, "rank": 1}, ValueError, "rank: must be below world=1, got 1"),
        ([3], {"batch": 1, "world": 2}, ValueError, "world: 2 processes cannot share 1 items"),
        (
            [3] * 5,
            {"batch": 3, "world": 2, "drop_last": True},
            ValueError,
            "drop_last: 5 items are fewer than one batch of 3 on each of 2 ranks",
        ),
    ],
)
def test_what_does_not_fit_is_refused(lengths, options, error, words):
    with pytest.raises(error, match=re.escape(words)):
        LengthGrouped(lengths, **options)


def test_epochs_count_from_zero():
    sampler = LengthGrouped([3], 1, report=None)
    with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
        sampler.set_epoch(-1)
    with pytest.raises(TypeError, match=re.escape("epoch must be an int, got 0.5 (float)")):
        sampler.batches(0.5)
