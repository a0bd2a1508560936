"""Attention on shards against one process with the whole sequence: values, lse, gradients, what travels, and errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from shared_calls import (
    Case,
    attend,
    attend_unseeded,
    counted_bytes,
    expected,
    faulty_call,
    misused,
    pytorch_script,
    silent,
    sink_gradient,
    together,
    unequal_shards,
)

from saccade import (
    Blocks,
    Causal,
    Chunks,
    Dilated,
    Documents,
    Dropout,
    Global,
    Padding,
    PerHead,
    Predicate,
    Prefix,
    Window,
)

LAYOUTS = ("ring", "gathered", "ulysses")
GRIDS = {2: [(2, 1)], 3: [(1, 3)], 4: [(2, 2)] * 3}
# In bfloat16 against float64: output, weights, their gradients and the result are rounded, each by half a unit of 2^-8,
# and the output twice, since parts are rounded apart.
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2**-6}


def even(b, h, q, k):
    return (q + k) % 2 == 0


@st.composite
def masks(draw, length, keys, heads):
    """Any mask of these rows and keys, for a batch of 2."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    some = draw(st.integers(0, keys))
    ids = [torch.randint(0, 3, (2, n), generator=random).sort().values for n in dict.fromkeys((length, keys))]
    sizes = [torch.randint(0, n + 1, (2,), generator=random) for n in (keys, length)]
    return draw(
        st.sampled_from(
            [
                None,
                Causal(),
                Causal().at(-2),  # the first two rows see nothing
                Causal().at([-1, 3]),
                ~Causal(),
                Window(some, 2),
                Causal() & Documents(*ids),
                Prefix(some),
                Causal() & Padding(sizes[0]),
                Padding(sizes[0], queries=sizes[1]),
                Window(3, 0) | Causal() & Global([0, min(length, keys) // 2]),
                Causal() & Dilated(3),
                Chunks(7, 1),
                Blocks(torch.rand(heads, -(-max(length, keys) // 16), -(-keys // 16), generator=random) < 0.4, 16),
                PerHead([Causal() if head % 2 else Window(5, 5) for head in range(heads)]),
                Causal() & Predicate(even),
                torch.rand(2, heads, length, keys, generator=random) < 0.3,
            ]
        )
    )


@st.composite
def calls(draw, size):
    length, keys = draw(st.sampled_from([1, 3, 13, 97, 263])), draw(st.sampled_from([None, None, 2, 31, 211]))
    heads = draw(st.sampled_from([(6, 3), (5, 1), (2, 2)]))
    layout = draw(st.sampled_from([*LAYOUTS, *GRIDS[size]]))
    biases = [None, None, "tensor", "keys", "ALiBi", "placed ALiBi", "T5", "score", "untraced score"]
    options = draw(st.fixed_dictionaries({}, optional={"softcap": st.just(3.0), "scale": st.just(0.4)}))
    options |= draw(st.sampled_from([{}, {"dropout": Dropout(0.3, seed=5)}]))
    if layout in ("ring", "gathered"):
        biases.append("own rows")
    return Case(
        length,
        draw(masks(length, keys or length, heads[0])),
        layout,
        draw(st.sampled_from(list(CLOSE))),
        heads=heads,
        bias=draw(st.sampled_from(biases)),
        sink=draw(st.booleans()),
        options=options,
        keys=keys,
    )


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow), 4])
def test_ranks_compute_what_one_process_computes(ranks, size):
    @settings(max_examples=12)
    @given(calls(size))
    def check(case):
        assert_close(ranks(size), case)

    check()


def assert_close(group, case):
    answers = group.run(attend, case)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    got = together(answers)
    wanted = expected(case, dtype=torch.float64 if case.dtype == torch.bfloat16 else None)
    for name, of_one in wanted.items():
        empty = of_one == -torch.inf
        assert torch.equal(got[name] == -torch.inf, empty), name
        close, of_one = CLOSE[case.dtype], of_one.double().masked_fill(empty, 0)
        apart = (got[name].double().masked_fill(empty, 0) - of_one).abs()
        assert apart.numel() == 0 or apart.max() <= close * max(1, float(of_one.abs().max())), (
            name,
            float(apart.max()),
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_of_some_ranks(ranks, layout):
    """Its ranks have other numbers than the processes, which messages are addressed by."""
    case = Case(97, Causal(), layout)
    first, outside, second = ranks(3).run(attend, case, [0, 2])
    assert isinstance(outside, ValueError) and "no rank of the group" in str(outside)
    got = together([first, second])
    for name, value in expected(case).items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keys", [None, 101])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_of_the_definition(ranks, layout, keys):
    """Against the contract's own formula in float64, where the test above might share a fault with one process. The
    first rows see nothing."""
    mask = (Causal() & Documents([0] * 50 + [1] * 81, *([] if keys is None else [[0] * 40 + [1] * 61]))).at(-2)
    scoring = {"bias": "placed ALiBi", "sink": True, "options": {"softcap": 2.0, "dropout": Dropout(0.3, seed=5)}}
    case = Case(131, mask, layout, heads=(6, 2), keys=keys, **scoring)  # ranks share key heads
    got, wanted = together(ranks(3).run(attend, case)), expected(case, backend="reference")
    for name, value in wanted.items():
        torch.testing.assert_close(got[name].double(), value, rtol=1e-11, atol=1e-11)


def test_rectangles_of_few_keys_in_half_precision(ranks):
    """The kernels then take a row's sums from these keys, as if it had no others: gradients off by a tenth."""
    assert_close(ranks(3), Case(97, Causal(), "ring", torch.bfloat16, heads=(2, 2), widths=(16, 16)))


def test_a_mask_for_each_head_where_heads_are_dealt(ranks):
    """A rank's first head is not the mask's first."""
    seen = torch.rand(1, 6, 97, 97, generator=torch.Generator().manual_seed(5)) < 0.3
    assert_close(ranks(3), Case(97, seen, "ulysses"))


def test_a_float_dropout_is_drawn_once_for_all(ranks):
    """Ranks whose generators differ would drop other weights, and merge what is of no one matrix."""
    case = Case(53, None, "ring", options={"dropout": 0.5})
    answers = ranks(2).run(attend_unseeded, case)
    seeds = {answer["seed"] for answer in answers}
    assert len(seeds) == 2, "the ranks' generators must differ, or this test shows nothing"
    case.options = {"dropout": Dropout(0.5, seed=answers[0]["seed"])}
    torch.testing.assert_close(answers[0]["out"], expected(case)["out"], rtol=1e-12, atol=1e-12)


def test_padding_is_never_read(ranks):
    """NaN in keys that nobody sees, in padded queries and in their cotangents reaches nothing, on any rank."""
    case = Case(97, Padding([41, 90], queries=[41, 90]), "ring", torch.float32, poison=[41, 90])
    got, wanted = together(ranks(3).run(attend, case)), expected(case)
    for name in ("out", "d_query", "d_key", "d_value"):
        assert got[name].isfinite().all(), name
        torch.testing.assert_close(got[name].float(), wanted[name], rtol=1e-5, atol=1e-5)


def test_a_sink_hears_nothing_of_rows_that_see_no_key(ranks):
    """Their output is 0 whatever the sink is, so NaN in their upstream gradient does not count."""
    total = sum(ranks(2).run(sink_gradient, torch.nan))
    torch.testing.assert_close(total, sink_gradient(None, 0.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["ring", "gathered"])
@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        (Causal(), 1507),
        (Window(100, 0), 1507),
        (Causal() & Documents([0] * 500 + [1] * 600 + [2] * 407), 1507),
        (Prefix(300), 1507),
        (None, 1507),
        (Window(30, 50), 811),
    ],
)
def test_only_blocks_of_keys_that_are_seen_travel(ranks, mask, keys, layout):
    case = Case(1507, mask, layout, torch.float32, keys=None if keys == 1507 else keys)
    dense = torch.ones(1507, keys) if mask is None else mask.dense(1507, keys)[0, 0]
    for rank, answer in enumerate(ranks(3).run(counted_bytes, case)):
        block, mine, own = answer["block"], torch.zeros(1507), torch.zeros(keys)
        for part, spans in ((mine, answer["rows"][rank]), (own, answer["keys"][rank])):
            for start, stop in spans:
                part[start:stop] = 1
        seen = dense[mine.bool()].any(0)
        travel = sum(
            min(block, keys - at)
            for at in range(0, keys, block)
            if seen[at : at + block].any() and not own[at]  # a block has one owner
        )
        assert answer["received"] == answer["said"][rank] == travel * 2 * 3 * (7 + 5) * 4


CALL = "attention: ranks disagree"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("length", "plan: ranks disagree: length is 97 on rank 0 and 101 on rank 2"),
        ("mask", "plan: ranks disagree: mask is Causal() on rank 0 and Window(3, 0) on rank 2"),
        ("layout", "plan: ranks disagree: layout is ring on rank 0 and gathered on rank 2"),
        ("ids", "plan: rank 2 got an error: Documents: 5 ids"),
        ("heads", f"{CALL}: query (B, Hq, D) is (2, 6, 7) on rank 0 and (2, 3, 7) on rank 2"),
        ("dtype", f"{CALL}: dtype is torch.float64 on rank 0 and torch.float32 on rank 2"),
        ("scale", f"{CALL}: scale is 0.5 on rank 0 and 0.25 on rank 2"),
        ("shard", "attention: rank 2 got an error: query has 5 rows (axis 2), expected the"),
        ("gradients", f"{CALL}: gradients is"),
    ],
)
def test_ranks_that_disagree_all_say_which_and_what(ranks, fault, message):
    answers = ranks(3).run(faulty_call, fault)
    assert all(isinstance(answer, ValueError) for answer in answers), answers
    assert {str(answer) for answer in answers} == {str(answers[0])} and message in str(answers[0])


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("mask", "plan.cross: keys must be the plan of the keys' sequence, got Causal; a mask is `mask`"),
        ("grid", "keys is dealt in a grid (h, s) of (2, 1), expected (1, 2): give both plans one layout"),
        ("dealt", "attention: ranks disagree: plan is"),
        ("disagree", "plan.cross: ranks disagree: mask is Window(3, 0) on rank 0 and Window(3, 1) on rank 1"),
        ("fit", "Documents: 13 query_ids and 5 key_ids for 13 queries and 31 keys"),
        ("keys", "key has 7 rows (axis 2), expected the 1"),
        ("argument", "unexpected keyword argument 'mask': give the mask to saccade.distributed.plan"),
        ("shard", "plan is one of cross-attention"),
        ("cache", "plan is one of cross-attention"),
    ],
)
def test_what_is_no_use_of_cross_attention(ranks, use, message):
    for answer in ranks(2).run(misused, use):
        assert isinstance(answer, TypeError | ValueError) and message in str(answer), answer


def test_unequal_shards_are_no_messages_and_ranks_have_their_numbers_of_all(ranks):
    """gloo would end the process, or fill a tensor in part."""
    _, *answers = ranks(3).run(unequal_shards, 3)
    expected = "unshard: ranks disagree: shape without it is (1, 1, 5) on rank 1 and (1, 1, 4) on rank 2"
    assert [str(answer) for answer in answers] == [expected] * 2 and isinstance(answers[0], ValueError)


@pytest.mark.parametrize(
    ("options", "bias", "message"),
    [({}, "own rows", "bias has only this rank's rows")],
)
def test_a_layout_that_cannot_do_a_call_says_why(ranks, options, bias, message):
    answers = ranks(2).run(attend, Case(97, None, "ulysses", bias=bias, options=options))
    assert all(isinstance(answer, ValueError) and message in str(answer) for answer in answers), answers


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(2, 3), (3, 2)])
def test_a_grid_whose_sides_differ(ranks, grid):
    assert_close(
        ranks(6), Case(263, Causal(), grid, heads=(5, 1), bias="tensor", options={"dropout": Dropout(0.3, seed=5)})
    )


@pytest.mark.slow
def test_pytorchs_script_passes_where_its_own_context_parallel_does_not(tmp_path):
    """On CPUs PyTorch has none for causal masks; the same rows, and gradients of all inputs, are those of its SDPA."""
    from ranks import Ranks

    group = Ranks(2, tmp_path)  # of its own: PyTorch's leaves functions of a rank replaced
    answers = group.run(pytorch_script)
    group.close()
    leaves = [x.requires_grad_() for x in answers[0][3]]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    out.square().sum().backward()
    for problem, shared, _, _ in answers:
        assert "sharding strategy" in problem
        torch.testing.assert_close(shared, out, rtol=1e-12, atol=1e-12)
    for leaf, *shares in zip(leaves, *(answer[2] for answer in answers), strict=True):
        torch.testing.assert_close(sum(shares), leaf.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_rank_that_never_calls_is_reported(tmp_path):
    from ranks import Ranks

    group = Ranks(2, tmp_path, seconds=4)
    answer, _ = group.run(silent)
    group.close()
    assert isinstance(answer, RuntimeError)
    assert "attention: rank 1 did not answer within 4 s, the timeout" in str(answer)
