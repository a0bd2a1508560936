"""A group from start to end: who is right is timed, who is wrong has no speed, and who cannot says why."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from saccade.benchmark.attention import (
    Budget,
    Case,
    Contender,
    DenseAttention,
    Entry,
    FlexAttention,
    MeasurementSettings,
    SaccadeAttention,
    SdpaAttention,
    measure,
    measuring,
    sets,
)
from saccade.benchmark.attention.cases import CaseInputs
from saccade.benchmark.attention.machine import limits_of, own_limit

CASE = Case(17, 17, "causal", heads=6, kv_heads=3, width=5, value_width=5)
QUICK = MeasurementSettings(threads=1, budget=Budget(seconds=0.0, least=2, most=2, block=1e-6))


class Lying(Contender):
    """Dense, but for one number of its output."""

    name = "lying"

    def forward(self, inputs):
        right = DenseAttention().forward(inputs)

        def compute():
            out = right()
            return out + torch.zeros_like(out).index_put((torch.tensor([0]),) * 4, torch.tensor([0.001]))

        return compute


class Refusing(Contender):
    name = "refusing"

    def __init__(self, error):
        self.error = error

    def forward(self, inputs):
        raise self.error


@pytest.mark.parametrize("stage", ["forward", "recorded", "backward", "forward+backward", "decode"])
def test_right_contenders_are_timed(stage):
    case = replace(CASE, stage=stage)
    group = measure(
        "title",
        [
            Entry(case, one)
            for one in (SaccadeAttention("auto"), SaccadeAttention("chunked"), SdpaAttention(), DenseAttention())
        ],
        QUICK,
    )
    assert group.title == "title"
    assert [row.contender for row in group.rows] == ["auto", "chunked", "F.sdpa", "dense"]
    for row in group.rows:
        assert row.status == "measured"
        assert len(row.readings) == 2
        assert min(row.readings) > 0
        assert row.error <= 1
        assert row.rate == pytest.approx(case.amount / row.seconds.median)


@pytest.mark.parametrize("stage", ["forward", "forward+backward"])
def test_a_wrong_result_has_no_speed(stage):
    case = replace(CASE, stage=stage)
    group = measure("", [Entry(case, Lying()), Entry(case, DenseAttention())], QUICK)
    wrong, right = group.rows
    assert wrong.status == "wrong"
    assert wrong.readings == ()
    assert wrong.rate is None
    assert wrong.error > 1
    assert wrong.note.startswith("WRONG: out is off by ")
    assert right.status == "measured"
    assert group.speedup(wrong, over=right) is None


@pytest.mark.parametrize(
    "error", [ValueError("no such thing\nhere"), NotImplementedError("no such thing here"), MemoryError()]
)
def test_who_cannot_says_why_and_the_others_run(error):
    group = measure("", [Entry(CASE, Refusing(error)), Entry(CASE, DenseAttention())], QUICK)
    assert group.rows[0].status == "none"
    assert group.rows[0].note == (str(error).replace("\n", " ") or "MemoryError")
    assert group.rows[1].status == "measured"


def test_an_interrupt_is_nobodys_answer():
    with pytest.raises(KeyboardInterrupt):
        measure("", [Entry(CASE, Refusing(KeyboardInterrupt()))], QUICK)


def test_a_backend_that_does_not_exist_is_told():
    row = measure("", [Entry(CASE, SaccadeAttention("nonsense"))], QUICK).rows[0]
    assert row.status == "none"
    assert "backend must be one of" in row.note


@pytest.mark.slow
def test_what_needs_too_much_memory_is_left_out():
    case = Case(1024, 1024)
    small = replace(QUICK, most_memory=2**20)
    group = measure("", [Entry(case, DenseAttention()), Entry(case, SdpaAttention())], small)
    assert group.rows[0].note == "would form 0.1 GiB"
    assert group.rows[0].status == "none"
    assert group.rows[1].status == "measured"


def test_cases_of_one_group_take_turns():
    short, long = CASE, replace(CASE, length_q=23, length_k=23)
    group = measure("", [Entry(short, DenseAttention()), Entry(long, DenseAttention())], QUICK)
    assert [row.case for row in group.rows] == [short, long]
    assert group.speedup(group.rows[0], over=group.rows[1]).median > 0


def test_the_number_of_threads_holds_for_the_group_alone(threads):
    threads(1)
    seen = []

    class Counting(DenseAttention):
        def forward(self, inputs):
            seen.append(torch.get_num_threads())
            return super().forward(inputs)

    measure("", [Entry(CASE, Counting())], replace(QUICK, threads=2))
    assert seen == [2]
    assert torch.get_num_threads() == 1


def test_a_setting_is_around_the_calls_of_its_contender_alone():
    active = []
    seen = {}

    class Setting(DenseAttention):
        def __init__(self, name):
            self.name = name

        def around(self):
            @contextlib.contextmanager
            def entered():
                active.append(self.name)
                yield
                active.remove(self.name)

            return entered()

        def forward(self, inputs):
            inner = super().forward(inputs)

            def compute():
                seen.setdefault(self.name, set()).add(tuple(active))
                return inner()

            return compute

    measure("", [Entry(CASE, Setting("a")), Entry(CASE, Setting("b"))], QUICK)
    assert seen == {"a": {("a",)}, "b": {("b",)}}


def test_limits_take_turns_with_the_contenders(monkeypatch):
    rates = {"float32": iter([100.0, 50.0, 50.0, 50.0, 200.0, 50.0])}  # the best of three counts
    monkeypatch.setattr(sets, "in_use", lambda: "avx2")
    monkeypatch.setattr(sets, "peak", lambda dtype, threads, ms: lambda: next(rates[dtype]))
    group = measure("", [Entry(CASE, DenseAttention()), Entry(CASE, SdpaAttention())], QUICK)
    assert [limit.name for limit in group.limits] == ["float32 multiply-adds (avx2)"]
    assert group.limits[0].readings == (100.0, 200.0)
    row = group.rows[1]
    expected = sorted(CASE.flops / seconds / rate for seconds, rate in zip(row.readings, (100.0, 200.0), strict=True))
    assert group.share(row).median == pytest.approx(sum(expected) / 2)


def test_reading_is_measured_on_the_cases_own_keys_and_values(monkeypatch):
    asked = []

    class Native:
        @staticmethod
        def active():
            return "avx2"

        @staticmethod
        def peak_f32(threads, milliseconds):
            return 7.0

        @staticmethod
        def read_bandwidth(address, size, threads):
            asked.append((address, size, threads))
            return {0: 100.0, 1: 50.0}[len(asked) % 2]  # keys at 50 bytes a second, values at 100

    monkeypatch.setattr(sets, "compiled", lambda: Native)
    inputs = CaseInputs.make(replace(CASE, stage="decode"))
    limit, beside = limits_of(inputs, 3)
    assert (own_limit(inputs.case, [beside, limit]), beside.unit) == (limit, "FLOP/s")
    size = 3 * 17 * 5 * 4
    assert limit.meter() == pytest.approx(2 * size / (size / 50 + size / 100))
    assert asked[2:] == [(inputs.key.data_ptr(), size, 3), (inputs.value.data_ptr(), size, 3)]
    assert limit.unit == "B/s"


def test_what_fits_a_cache_is_read_again_without_its_first_time(monkeypatch):
    rates = iter([1.0, 1e6, 2e6, 3e6])  # the first one tells that it can be timed

    class Native:
        @staticmethod
        def read_bandwidth(address, size, threads):
            return next(rates)

    monkeypatch.setattr(sets, "compiled", lambda: Native)
    assert sets.reading((torch.zeros(1000),), 1)() == pytest.approx(2e6)  # 4000 bytes take 4 ms, then 2
    assert next(rates) == 3e6


def test_so_few_bytes_that_reading_takes_no_time_have_no_limit(monkeypatch):
    class Native:
        @staticmethod
        def read_bandwidth(address, size, threads):
            return 0.0

    monkeypatch.setattr(sets, "compiled", lambda: Native)
    monkeypatch.setattr(sets, "in_use", lambda: None)
    assert limits_of(CaseInputs.make(replace(CASE, stage="decode")), 1) == []


@pytest.mark.slow
def test_without_a_build_no_limit_is_made_up(monkeypatch):
    monkeypatch.setattr(sets, "compiled", lambda: None)
    for stage in ("forward", "decode"):
        assert limits_of(CaseInputs.make(replace(CASE, stage=stage)), 1) == []
    assert sets.in_use() is None
    group = measure("", [Entry(CASE, DenseAttention())], QUICK)
    assert group.limits == ()
    assert group.share(group.rows[0]) is None


def test_a_noisy_group_is_timed_again_for_longer_and_the_calmest_is_kept(monkeypatch):
    wild, calm, budgets = [1.0, 2.0, 3.0], [1.0, 1.0, 1.1], []

    def turns(meters, budget):
        budgets.append(budget)
        return [wild if len(budgets) < 3 else calm for _ in meters]

    monkeypatch.setattr(measuring, "take_turns", turns)
    group = measure("", [Entry(CASE, DenseAttention())], replace(QUICK, again=3))
    assert [budget.least for budget in budgets] == [2, 4, 6]
    assert group.rows[0].readings == tuple(calm)
    measure("", [Entry(CASE, DenseAttention())], QUICK)
    assert len(budgets) == 4


def test_what_others_took_makes_a_group_noisy(monkeypatch):
    shares = iter([0.5, 0.02])
    monkeypatch.setattr(measuring, "take_turns", lambda meters, budget: [[1.0, 1.0] for _ in meters])
    monkeypatch.setattr(measuring, "watch_others", lambda: lambda: next(shares))
    group = measure("", [Entry(CASE, DenseAttention())], replace(QUICK, again=1))
    assert (group.others, group.disturbed) == (0.02, False)
    assert replace(group, others=0.5).disturbed


def test_flex_says_that_it_has_no_backward_here():
    row = measure("", [Entry(replace(CASE, stage="forward+backward"), FlexAttention())], QUICK).rows[0]
    assert row.note == "its backward raises on a CPU"


def test_no_threads_are_refused():
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        MeasurementSettings(threads=0)
