"""Statistics and weights of a call on shards against one process with the whole sequence."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings, strategies as st
from shared_calls import Case, measure
from test_attention import masks

from saccade import Statistics


@st.composite
def cases(draw, size):
    length, keys = draw(st.sampled_from([3, 13, 97])), draw(st.sampled_from([None, None, 31]))
    heads = draw(st.sampled_from([(6, 3), (5, 1), (2, 2), (6, 6)]))
    return Case(
        length,
        draw(masks(length, keys or length, heads[0])),
        draw(st.sampled_from(["ring", "ulysses", (1, size)])),
        draw(st.sampled_from([torch.float32, torch.float64])),
        heads=heads,
        bias=draw(st.sampled_from([None, "tensor", "ALiBi", "score"])),
        sink=draw(st.booleans()),
        options=draw(st.fixed_dictionaries({}, optional={"softcap": st.just(3.0), "scale": st.just(0.4)})),
        keys=keys,
    )


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_measure_what_one_process_measures(ranks, size):
    @settings(max_examples=8)
    @given(cases(size), st.data())
    def check(case, data):
        length = case.keys or case.length
        groups = {"third": torch.arange(length) % 3 == 0}
        rows, keys = (st.lists(st.integers(-n, n - 1), max_size=4) for n in (case.length, length))
        heads = st.lists(st.integers(0, case.heads[0] - 1), max_size=4)
        chosen = {"rows": data.draw(rows), "keys": data.draw(st.none() | keys), "heads": data.draw(st.none() | heads)}
        assert_same(ranks(size), case, chosen, groups=groups, top=3, histograms=["logits", "key"])

    check()


def assert_same(group, case, chosen, **options):
    numbers, weights = measure(None, case, chosen, **options)
    for answer in group.run(measure_with, case, chosen, options):
        if isinstance(answer, Exception):
            raise answer
        assert_close(answer[0], numbers)
        torch.testing.assert_close(answer[1], weights, rtol=1e-5, atol=1e-6)


def measure_with(rank, case, chosen, options):
    return measure(rank, case, chosen, **options)


def assert_close(got, wanted, name="statistics"):
    if isinstance(wanted, Statistics):
        for field in fields(Statistics):
            assert_close(getattr(got, field.name), getattr(wanted, field.name), field.name)
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), name
        for key in wanted:
            assert_close(got[key], wanted[key], f"{name}.{key}")
    elif isinstance(wanted, torch.Tensor):
        shape = torch.broadcast_shapes(got.shape, wanted.shape)
        torch.testing.assert_close(got.expand(shape), wanted.expand(shape), rtol=1e-5, atol=1e-5, equal_nan=True)
    else:
        assert got == wanted, name


def test_the_first_key_is_that_of_all_heads(ranks):
    """A rank whose heads see only later keys would take another key for the first one."""
    seen = torch.ones(1, 4, 13, 13).tril().bool()
    seen[:, 2:, :, :5] = False
    assert_same(ranks(2), Case(13, seen, heads=(4, 4)), {"rows": 3, "heads": [3, 0, 0]})


def test_a_key_counts_where_any_head_of_its_group_sees_it(ranks):
    """With one key head, a rank that has some of its query heads alone would measure the keys that these see."""
    seen = torch.ones(1, 4, 13, 13).tril().bool()
    seen[:, :2, :, 5:] = False
    assert_same(ranks(2), Case(13, seen, heads=(4, 1)), {"rows": 3})


def test_ranks_that_ask_for_other_rows(ranks):
    answers = ranks(2).run(asking_apart, Case(13))
    assert all(isinstance(answer, ValueError) for answer in answers), answers
    assert "attention_weights: ranks disagree: arguments is ([0], None, [0, 1, 2, 3, 4, 5]) on rank 0" in str(
        answers[0]
    )


def asking_apart(rank, case):
    return measure(rank, case, {"rows": rank})
