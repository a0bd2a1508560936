"""Decoding against a cache on shards, against one process with the whole cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from shared_calls import Case, generate
from test_attention import even

from saccade import Causal, Chunks, Documents, Global, PerHead, Predicate, Window, distributed

CLOSE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2**-6}
LONGEST = 400


@st.composite
def calls(draw):
    length, heads = draw(st.sampled_from([1, 3, 97, 263])), draw(st.sampled_from([(6, 3), (5, 1), (2, 2)]))
    ids = torch.tensor([0] * (length // 2) + [1] * (LONGEST - length // 2))
    return Case(
        length,
        draw(
            st.sampled_from(
                [
                    None,
                    Causal(),
                    Window(5, 0),
                    Window(90, 0) | Causal() & Global([0, 2]),
                    Causal() & Documents(ids),
                    Chunks(7, 1) & Causal(),
                    Causal() & Predicate(even),
                    PerHead([Causal() if head % 2 else Window(5, 5) for head in range(heads[0])]),
                ]
            )
        ),
        draw(st.sampled_from(["ring", "ulysses"])),
        draw(st.sampled_from(list(CLOSE))),
        heads=heads,
        bias=draw(st.sampled_from([None, None, "tensor", "ALiBi", "T5", "score", "untraced score"])),
        sink=draw(st.booleans()),
        options=draw(st.fixed_dictionaries({}, optional={"softcap": st.just(3.0), "scale": st.just(0.4)})),
    )


steps = st.lists(st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=9)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_decode_as_one_process_does(ranks, size):
    @settings(max_examples=10)
    @given(calls(), steps, st.sampled_from([1, 3, 256]))
    def check(case, steps, block):
        assert_same(ranks(size), case, steps, block)

    check()


def assert_same(group, case, steps, block):
    wanted, _ = generate(None, case, steps, block)
    answers = group.run(generate, case, steps, block)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    for n, out in enumerate(wanted):
        assert all(answer[0][n].equal(answers[0][0][n]) for answer in answers)
        close = CLOSE[case.dtype]
        torch.testing.assert_close(answers[0][0][n], out, rtol=close, atol=close)
    return answers[0][1]


def test_tokens_go_to_the_rank_with_the_fewest(ranks):
    assert assert_same(ranks(3), Case(97, Causal()), [(1, 0)] * 20, 1) == (39, 39, 39)
    assert sorted(assert_same(ranks(3), Case(97, Causal()), [(1, 0)] * 20, 256)) == [32, 33, 52]


def test_tokens_of_the_prompt_are_taken_back(ranks):
    """Some ranks then hold fewer tokens than the plan gave them."""
    case = Case(97, Window(70, 0), bias="ALiBi", sink=True)
    held = assert_same(ranks(3), case, [(2, 0), (3, 60), (1, 0), (2, 0)], 1)
    assert sum(held) == 97 + 2 + 3 - 60 + 1 + 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("width", "it holds keys of (batch, heads, width) (2, 3, 7) in float64 on cpu, but new ones of (2, 3, 5)"),
        ("rows", "query and key have 1 and 2 rows (axis 2), expected those of new tokens"),
        ("tokens", "decode: ranks disagree: tokens is 97 on rank 0 and 96 on rank 1"),
        ("counts", "decode: ranks disagree: new tokens is 1 on rank 0 and 2 on rank 1"),
        ("placed", "bias: with a cache it must not be placed by .at"),
        ("rollback", "rollback: expected at most the 97 tokens there are, got 98"),
    ],
)
def test_calls_that_do_not_fit(ranks, fault, message):
    answers = ranks(2).run(faulty_step, fault)
    assert all(isinstance(answer, ValueError) and message in str(answer) for answer in answers), answers


def faulty_step(rank, fault):
    case = Case(97, bias="placed ALiBi" if fault == "placed" else None)
    given, plan = case.tensors(), distributed.plan(None, 97)
    cache = distributed.ShardedCache(*(plan.shard(given[name]) for name in ("key", "value")), plan=plan)
    if fault == "rollback":
        cache.rollback(98)
    if fault == "tokens" and rank == 1:
        cache.rollback(1)
    count = 1 + (fault == "counts" and rank == 1)
    query, key, value = (given[name][:, :, :count] for name in ("query", "key", "value"))
    if fault == "width":
        query, key = query[..., :5], key[..., :5]
    if fault == "rows":
        key, value = (given[name][:, :, :2] for name in ("key", "value"))
    bias = case.bias_of(case.parameters().get("bias"))
    return distributed.decode(query, key, value, cache=cache, bias=bias)
