"""Statistics by the kernels, on every instruction set, against dense float64 (statistics_oracle.py)."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from looped import looped
from native import drawing
from native.fuzzing import DTYPES, Draw, each_set
from native.statistics_oracle import Question, apart, ask, assert_equal, dense
from saccade import Causal, Padding, Window
from saccade.operator._backends.native import _statistics
from saccade.operator._checks import make_call
from slowly import alternate, slow_but

pytest.importorskip("saccade._native", reason="this installation has no native build")

rich = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
)


@st.composite
def questions(draw, calls) -> Question:
    call = draw(calls)
    call.options.pop("dropout", None)
    batch, _, rows, keys = call.sizes
    generator = torch.Generator().manual_seed(call.seed)
    far = st.integers(-rows - 3, keys + 3) | st.just(keys - rows)
    placement = draw(far | st.lists(far, min_size=batch, max_size=batch)) if batch else 0
    first = torch.randint(-1, max(keys, 1), (batch,), generator=generator).clamp(max=keys - 1)
    items = draw(st.sampled_from([1, batch]))
    groups = torch.rand(draw(st.integers(0, 3)), items, keys, generator=generator) < draw(st.sampled_from([0.03, 0.5]))
    return Question(call, placement, first, groups, draw(st.sampled_from([0, 1, 3, 8, 17, 32])))


def check(question: Question) -> None:
    of = dense(question.draw)
    for instructions in each_set():
        assert_equal(question, ask(question), of, instructions)


@rich
@given(questions(drawing.small_calls()))
def test_any_mask_expression(question):
    check(question)


@rich
@given(questions(drawing.calls()))
def test_over_blocks_and_tails(question):
    check(question)


@pytest.mark.slow
@settings(rich, max_examples=100)
@given(questions(drawing.calls(work=2**23)))
def test_over_more_blocks(question):
    check(question)


# --- chosen cases --------------------------------------------------------------------------------------------------


def problem(rows: int, keys: int, mask=None, dtype=torch.float32, width: int = 16, scale: float = 1.0, **options):
    """2 items, 4 query heads on 2 key heads."""
    generator = torch.Generator().manual_seed(rows + 1000 * keys)
    shapes = {"query": (2, 4, rows, width), "key": (2, 2, keys, width), "value": (2, 2, keys, 1)}
    leaves = {name: (torch.randn(shape, generator=generator) * scale).to(dtype) for name, shape in shapes.items()}
    groups = torch.rand(2, 2, keys, generator=generator) < 0.2
    return Question(Draw(leaves, mask, options=options), keys - rows, torch.tensor([0, 1]), groups, 5)


def altered(question: Question, name: str, change) -> Question:
    """With one of the tensors changed in place."""
    leaves = {key: leaf.clone() for key, leaf in question.draw.leaves.items()}
    change(leaves[name])
    return question._replace(draw=replace(question.draw, leaves=leaves))


def same_bits(one, other) -> bool:
    return all(torch.equal(plain(x), plain(y)) for x, y in zip(one, other, strict=True) if x is not None)


def plain(x: torch.Tensor) -> torch.Tensor:
    """A NaN is equal to itself."""
    return x.contiguous().view(torch.int32) if x.dtype == torch.float32 else x


@pytest.mark.parametrize(
    ("mask", "dtype"), alternate([None, Causal(), Window(70, 3), Padding([5, 971], [101, 61])], DTYPES), ids=str
)
def test_long_rows_of_large_logits(mask, dtype):
    """The largest logit of a row is near 60 and is found in any chunk."""
    check(problem(101, 997, mask, dtype, 64, 2.7))


@pytest.mark.parametrize("slope", [1e-3, 0.5, 3.0, -0.5])
def test_logits_that_rise_or_fall_along_a_row(slope):
    """Every chunk has a new largest logit, or only the first: what is summed so far is rescaled again and again."""
    question = problem(61, 1511)
    question.draw.leaves["slopes"] = torch.full((4,), slope)
    check(question)


def test_equal_logits_name_the_smaller_key_first(instructions):
    """Logits are small integers, exact everywhere, and every value stands at many keys."""
    question = problem(53, 809, Causal(), width=4)._replace(top=32)
    question.draw.options["scale"] = 1.0
    for name in ("query", "key"):
        question.draw.leaves[name] = question.draw.leaves[name].round()
    got, of = ask(question), dense(question.draw)
    order = of.logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(got.largest_at, order.indices[..., 0])
    assert torch.equal(got.top_keys, order.indices[..., :32])
    assert torch.equal(got.highest.double(), order.values[..., 0])


def test_nearly_all_weight_on_one_key(instructions):
    """H = (n - 1) x (1 + log 1 / x) for small weights x: no cancellation, never below 0."""
    query = torch.zeros(1, 1, 2, 1)
    query[..., 0, :] = 1
    key = torch.zeros(1, 1, 101, 1)
    key[..., 17, :] = 30
    draw = Draw({"query": query, "key": key, "value": key}, options={"scale": 1.0})
    got = ask(Question(draw, 0, torch.tensor([-1]), torch.zeros(0, 1, 101, dtype=torch.bool), 0))
    x = math.exp(-30)
    assert got.entropy[0, 0, 0] == pytest.approx(100 * x * 31, rel=1e-2, abs=1e-7)
    assert got.entropy[0, 0, 1] == pytest.approx(math.log(101), rel=1e-6)
    query *= 1e3
    assert ask(Question(draw, 0, torch.tensor([-1]), torch.zeros(0, 1, 101, dtype=torch.bool), 0)).entropy[0, 0, 0] == 0


@pytest.mark.parametrize("place", slow_but([0, 3, 2**20 - 1, -(2**40), 2**40], 3, -(2**40)))
def test_mean_distance_over_a_million_keys(place, instructions):
    """1e-6 of it: distances up to 2^20 and sums over 2^20 keys lose nothing."""
    generator = torch.Generator().manual_seed(3)
    query, key = torch.randn(1, 1, 1, 4, generator=generator), torch.randn(1, 1, 2**20, 4, generator=generator)
    draw = Draw({"query": query, "key": key, "value": key})
    got = ask(Question(draw, place, torch.tensor([5]), torch.zeros(0, 1, 2**20, dtype=torch.bool), 0), received=False)
    p = torch.softmax(query.double() @ key.double().mT / 2, -1)
    want = (p * (place - torch.arange(2**20)).abs()).sum().item()
    assert got.distance.item() == pytest.approx(want, rel=1e-6)
    assert got.entropy.item() == pytest.approx(-(p * p.log()).sum().item(), rel=1e-6)


@looped("sink", [-math.inf, -200.0, 0.3, 90.0, 1e30])
def test_sinks_of_any_size(sink, instructions):
    question = problem(11, 61, Causal())
    question.draw.leaves["sink"] = torch.tensor([sink, 0.0, sink, -1.0])
    assert_equal(question, ask(question), dense(question.draw), instructions)


@looped("number", [-3.4e38, -1e30])
def test_a_bias_of_the_smallest_number_is_a_number(number, instructions):
    """Rows of nothing else are uniform, in others such keys weigh 0; all of them are seen."""
    question = problem(7, 101)
    bias = torch.zeros(1, 1, 7, 101)
    bias[..., ::3, :], bias[..., 1::3, 40:] = number, number
    question.draw.leaves["bias"] = bias
    got = ask(question)
    assert torch.allclose(got.entropy[:, :, ::3], torch.tensor(math.log(101.0)), rtol=1e-6)
    assert (got.lowest[:, :, :2] <= number / 2).all() and (got.smallest[:, :, 1::3] == 0).all()
    assert (got.nonfinite == 0).all()


# --- what is not finite ----------------------------------------------------------------------------------------------


@looped("dtype", DTYPES)
@looped("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_key_is_counted_where_it_is_seen_and_reaches_nobody_else(bad, dtype, instructions):
    question = problem(103, 107, Causal(), dtype)
    question.draw.leaves["query"].abs_()  # an infinity times them is that infinity

    def spoil(key):
        key[1, 1, 60] = bad

    spoilt = altered(question, "key", spoil)
    clean, got = ask(question), ask(spoilt)
    meets = torch.zeros(2, 4, 103, dtype=torch.bool)
    meets[1, 2:, 56:] = True  # row i stands at i + 4
    assert torch.equal(got.nonfinite, meets.long())
    assert torch.equal(got.nonfinite_at, torch.where(meets, 60, -1))
    assert torch.equal(got.lse.isnan(), meets if bad != -math.inf else torch.zeros_like(meets))
    for name in (
        "lse",
        "entropy",
        "largest",
        "largest_at",
        "distance",
        "own",
        "previous",
        "lowest",
        "highest",
        "top_keys",
    ):
        x, y = getattr(got, name), getattr(clean, name)
        assert torch.equal(x[~meets], y[~meets]), name
    assert torch.equal(got.groups[:, ~meets], clean.groups[:, ~meets])
    assert torch.equal(got.received[0], clean.received[0]) and torch.equal(got.received[1, :2], clean.received[1, :2])
    assert torch.isfinite(got.lowest).all() and torch.isfinite(got.highest).all()
    if bad == -math.inf:  # a weight of 0
        assert (got.smallest[meets] == 0).all() and torch.isfinite(got.received).all()
        hidden = Causal().dense(103, 107) & (torch.arange(107) != 60)
        masked = ask(question._replace(draw=replace(question.draw, mask=hidden)))
        for name in ("lse", "entropy", "largest", "distance", "lowest", "top_weights"):
            assert torch.allclose(getattr(got, name)[meets], getattr(masked, name)[meets], rtol=1e-5), name
        assert torch.equal(got.top_keys[meets], masked.top_keys[meets])
    else:
        for name in ("entropy", "largest", "smallest", "distance", "top_weights"):
            assert getattr(got, name)[meets].isnan().all(), name
        assert (got.largest_at[meets] == 60).all() and got.received[1, 2:].isnan().all()


def test_a_bad_query_reaches_only_what_it_sees(instructions):
    question = problem(103, 107, Causal())

    def spoil(query):
        query[1, 2, 50] = math.nan

    clean, got = ask(question), ask(altered(question, "query", spoil))
    assert got.nonfinite[1, 2, 50] == 55 and got.nonfinite_at[1, 2, 50] == 0 and got.nonfinite.sum() == 55
    assert got.received[1, 2, :55].isnan().all()
    assert torch.equal(got.received[1, 2, 55:], clean.received[1, 2, 55:])
    assert got.lowest[1, 2, 50] == math.inf and got.highest[1, 2, 50] == -math.inf
    assert got.next[1, 2, 50] == 0 and got.own[1, 2, 50].isnan()  # what it does not see is 0


def test_sums_of_products_that_overflow(instructions):
    question = problem(5, 67)
    question.draw.leaves["query"][0, 0, 2] = 1e30
    question.draw.leaves["key"][0, 0, 64] = 1e30
    question.draw.leaves["key"][0, 0, 31] = -1e30
    got = ask(question)
    assert got.nonfinite[0, 0].tolist() == [0, 0, 2, 0, 0]
    assert got.nonfinite_at[0, 0].tolist() == [-1, -1, 31, -1, -1]
    assert got.nonfinite.sum() == 2 and got.lse[0, 0, 2].isnan()


def test_a_bias_of_nan_is_counted_and_one_of_minus_infinity_is_a_mask(instructions):
    question = problem(7, 101)
    bias = torch.zeros(1, 1, 7, 101)
    bias[..., 3, 90], bias[..., 5, 12], bias[..., 2, 50:] = math.nan, math.inf, -math.inf
    question.draw.leaves["bias"] = bias
    got = ask(question)
    assert got.nonfinite[0, 0].tolist() == [0, 0, 0, 1, 0, 1, 0]
    assert got.nonfinite_at[1, 3].tolist() == [-1, -1, -1, 90, -1, 12, -1]
    assert got.largest_at[:, :, 2].max() < 50 and torch.isfinite(got.lowest[:, :, 2]).all()


@looped("bad", [math.nan, math.inf])
@looped("dtype", DTYPES)
def test_padding_leaves_no_trace(bad, dtype, instructions):
    """The very same bits; what padded keys receive is 0."""
    question = problem(97, 151, Padding([83, 151], [61, 97]), dtype)

    def keys(key):
        key[0, :, 83:] = bad

    def queries(query):
        query[0, :, 61:] = bad

    spoilt = altered(altered(question, "key", keys), "query", queries)
    got = ask(spoilt)
    assert same_bits(got, ask(question))
    assert (got.received[0, :, 83:] == 0).all() and (got.received[1] > 0).all()


# --- rows of nothing, sizes of nothing -------------------------------------------------------------------------------


def test_rows_that_see_nothing_hold_nothing(instructions):
    question = problem(13, 7, Causal())  # the first six rows stand before the first key
    question.draw.leaves["sink"] = torch.ones(4)
    got = ask(question)
    assert (got.lse[:, :, :6] == -math.inf).all() and (got.lse[:, :, 6:] > -math.inf).all()
    for name in ("sink", "entropy", "largest", "smallest", "distance", "own", "previous", "next", "first"):
        assert (getattr(got, name)[:, :, :6] == 0).all(), name
    assert (got.largest_at[:, :, :6] == -1).all() and (got.top_keys[:, :, :6] == -1).all()
    assert (got.top_weights[:, :, :6] == 0).all() and (got.groups[..., :6] == 0).all()
    assert_equal(question, got, dense(question.draw), instructions)


@pytest.mark.parametrize("rows, keys", [(0, 5), (5, 0), (0, 0)])
def test_lengths_of_zero(rows, keys):
    got = ask(problem(rows, keys, Causal()))
    assert got.lse.shape == (2, 4, rows) and (got.lse == -math.inf).all()
    assert got.received.shape == (2, 4, keys) and (got.received == 0).all()
    assert got.top_keys.shape == (2, 4, rows, 5) and (got.top_keys == -1).all()
    assert got.groups.shape == (2, 2, 4, rows) and (got.groups == 0).all()


# --- the same bits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, Causal(), Window(50, 20)], ids=str)
def test_any_number_of_threads_gives_the_same_bits(mask):
    question = problem(331, 997, mask)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = ask(question)
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            assert same_bits(ask(question), alone)
    finally:
        torch.set_num_threads(before)


def test_batch_mates_change_nothing(instructions):
    question = problem(97, 401, Padding([401, 77]))
    both = ask(question)
    leaves = {name: leaf[1:] for name, leaf in question.draw.leaves.items()}
    draw = replace(question.draw, leaves=leaves, mask=Padding([77]))
    alone = ask(question._replace(draw=draw, first=question.first[1:], groups=question.groups[:, 1:]))
    for name, x in both._asdict().items():
        mine = x[:, 1:] if name == "groups" else x[1:]
        assert torch.equal(plain(mine), plain(getattr(alone, name))), name


def test_asking_for_less_changes_nothing_else(instructions):
    question = problem(61, 431, Causal())
    full, bare = ask(question), ask(question._replace(top=0, groups=question.groups[:0]), received=False)
    assert bare.received is None and bare.top_keys is None and bare.top_weights is None
    for name, x in bare._asdict().items():
        if x is not None and name != "groups":
            assert torch.equal(plain(x), plain(getattr(full, name))), name


def test_the_lse_is_the_forward_pass_s(instructions):
    from saccade import attention_with_lse

    question = problem(61, 431, Causal())
    leaves = question.draw.leaves
    _, lse = attention_with_lse(leaves["query"], leaves["key"], leaves["value"], Causal(), backend="native")
    assert apart(ask(question).lse, lse.double()).max() <= 2.0**-22 * lse.abs().max()


# --- memory --------------------------------------------------------------------------------------------------------

MEASURED = """
import torch
from saccade import Window
from saccade.operator._backends.native import _statistics
from saccade.operator._checks import make_call
from saccade.benchmark.attention.memory import growth

def calling(length):
    x = torch.ones(1, 1, length, 64)
    call = make_call(x, x, x, Window(50, 50), bias=None, scale=None, softcap=None, sink=None, dropout=0.0)
    return lambda: _statistics.filled(call, 0, received=True, top=8)

calling(64)()
print(growth(calling(65_536))[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_memory_of_65536_rows_is_linear():
    """Keys in the kernels' order 16.8 MB, 12 numbers and 3 places a row 4.7 MB, top 6.3 MB; the weights were 17 GB."""
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True, timeout=120)
    assert 16e6 < int(done.stdout) < 50e6


# --- refusals ----------------------------------------------------------------------------------------------------


def refusal(dtype=torch.float32, top: int = 0) -> str | None:
    x = torch.ones(1, 1, 3, 4, dtype=dtype)
    call = make_call(x, x, x, None, bias=None, scale=None, softcap=None, sink=None, dropout=0.0)
    return _statistics.refuses(call, top)


def test_what_is_not_taken():
    assert refusal() is None
    assert "float64" in refusal(torch.float64)
    assert "at most 32 keys" in refusal(top=33)
    with _Mode():
        assert refusal() is not None


class _Mode(TorchDispatchMode):
    """Sees every operator, and the kernels are none."""

    def __torch_dispatch__(self, function, types, given=(), options=None):
        return function(*given, **(options or {}))
