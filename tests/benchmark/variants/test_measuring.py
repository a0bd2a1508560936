"""A comparison from start to end with a clock that is made, and what is wrong has no time."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from comparisons import comparison
from saccade.benchmark.attention import Budget
from saccade.benchmark.variants import ApproximationError, measuring as module, random_data
from saccade.benchmark.variants.catalogue import chosen_contenders, contender_named
from saccade.benchmark.variants.contenders import DecodingRun
from saccade.benchmark.variants.measuring import ComparisonSettings, OutputJudge, distance, measure
from saccade.benchmark.variants.readings import ExactAttention
from saccade.benchmark.variants.weighing import CallWeight, WeighingLimits

DATA = random_data("2,3,8")
SETTINGS = ComparisonSettings(1, Budget(0.0, 2, 2, block=1e-9), WeighingLimits(), seed=3)


@pytest.fixture(autouse=True)
def weights(monkeypatch):
    """Nobody is weighed in a process of its own; what is told instead can be changed."""
    found = {}

    def weigh(who, sizes, lengths, limits, threads, seed, told, stop):
        told_of = {one.name: {} for one in who}
        for one in who:
            for length in lengths:
                told_of[one.name][length] = found.get((one.name, length), CallWeight(1000 * length, "", 0.0))
            told(one.name)
        return told_of

    monkeypatch.setattr(module, "weigh", weigh)
    return found


def measured(who, lengths=(16, 33), data=DATA, clock=None):
    made, told = comparison(), []
    measure(made, who, data, lengths, SETTINGS, told.append, clock or itertools.count().__next__)
    assert len(told) == len(who) + len(lengths)
    return made


@pytest.mark.slow
def test_everyone_is_measured_at_each_length():
    made = measured(chosen_contenders(["window", "linformer", "linear", "GRU"]))
    by_name = {line.name: line for line in made.lines}
    assert list(by_name) == ["exact", "window", "linformer", "linear", "attention", "GRU"]
    assert by_name["linformer"].refused.startswith("cannot be causal: ")
    assert by_name["linformer"].points == ()
    for name in ("exact", "window", "linear", "attention", "GRU"):
        assert [point.length for point in by_name[name].points] == [16, 33]
        for point in by_name[name].points:
            assert point.note == point.no_decode == ""
            assert {call: len(seconds) for call, seconds in point.readings.items()} == {
                "forward": 2,
                "training": 2,
                "decode": 2,
            }
            assert point.memory == 1000 * point.length
            assert point.kept > 0
            assert (point.error is None) == (name in ("attention", "GRU"))
    assert by_name["exact"].whole
    assert by_name["exact"].points[1].error.whole < 1e-6
    assert by_name["window"].points[1].error.whole < 1e-6  # 128 keys are all of 33
    assert by_name["linear"].points[1].error.whole > 0.01
    assert by_name["GRU"].points[1].parameters == 3 * (2 * 24**2 + 2 * 24)


@pytest.mark.slow
def test_a_clock_that_ticks_once_a_call():
    made = measured([ExactAttention()])
    assert {seconds for call in made.lines[0].points[0].readings.values() for seconds in call} == {1}


def test_what_is_noisy_is_read_once_more():
    class Clock:
        """The second reading of the first pair of rounds takes ten times as long."""

        def __init__(self):
            self.now, self.asked = 0.0, 0

        def __call__(self):
            self.asked += 1
            self.now += 10.0 if self.asked == self.slow else 1.0
            return self.now

        slow = 7

    clock = Clock()
    made = measured([ExactAttention()], lengths=(16,), clock=clock)
    assert clock.now > clock.asked  # the slow reading was taken
    assert {seconds for call in made.lines[0].points[0].readings.values() for seconds in call} == {1}


@pytest.mark.slow
def test_without_time_there_is_no_step():
    made = measured(chosen_contenders(["GRU"]), data=random_data("1,2,8", causal=False))
    for line in made.lines:
        assert "direction of time" in line.points[0].no_decode
        assert set(line.points[0].readings) == {"forward", "training"}


@pytest.mark.slow
def test_what_is_too_heavy_is_left_out(weights):
    weights["window", 33] = CallWeight(None, "would form about 9.0 GiB")
    made = measured(chosen_contenders(["window"], layers=False))
    light, heavy = made.lines[1].points
    assert light.readings
    assert (heavy.readings, heavy.note, heavy.error) == ({}, "would form about 9.0 GiB", None)


@pytest.mark.slow
def test_errors_are_on_real_data_alone():
    data = replace(DATA, unlimited=False, sizes=DATA.sizes._replace(length=20))
    first, second = measured([ExactAttention()], data=data).lines[0].points
    assert first.error is not None
    assert second.error is None


class Odd(ExactAttention):
    """Exact attention with something done to its output, or to its step."""

    def __init__(self, out=lambda out: out, step=lambda out: out, **more):
        super().__init__("odd")
        for name, value in {"out": out, "step": step, **more}.items():
            object.__setattr__(self, name, value)

    def build(self, sizes, tensors, seed):
        made = super().build(sizes, tensors, seed)
        decoding = made.decoding()
        return replace(
            made,
            forward=lambda: self.out(made.forward()),
            decoding=lambda: DecodingRun(lambda: self.step(decoding.step()), decoding.kept),
        )


def fail(out):
    raise RuntimeError("the beads\nfell down")


@pytest.mark.parametrize(
    ("odd", "note"),
    [
        (Odd(lambda out: out / 0), "WRONG: the result has NaN or infinity"),
        (Odd(lambda out: out[:, :, 1:]), "WRONG: the result has shape (2, 3, 15, 8), expected (2, 3, 16, 8)"),
        (Odd(lambda out: out * 1.01), "WRONG: exact attention is off by 0.01"),
        (Odd(step=lambda out: out * 1.1), "WRONG: a decoding step is off by 0.1 of the parallel form"),
        (Odd(step=lambda out: out * float("nan")), "WRONG: a decoding step is off by inf of the parallel form"),
        (Odd(fail), "the beads fell down"),
        (Odd(step=fail), "the beads fell down"),
    ],
)
def test_what_is_wrong_has_no_time(odd, note):
    made = measured([odd, ExactAttention()], lengths=(16,))
    point, right = (line.points[0] for line in made.lines)
    assert point.note == note
    assert point.readings == {}
    assert right.readings


def test_distance():
    right = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    found = distance(right + torch.tensor([[0.0, 0.5], [0.0, 0.5]]), right)
    assert found.whole == pytest.approx(math.sqrt(0.5 / 26))
    assert found.worst == pytest.approx(0.5)
    assert distance(right, right) == ApproximationError(0.0, 0.0)
    assert distance(right * float("nan"), right) == ApproximationError(math.inf, math.inf)
    assert distance(right, 0 * right).whole == pytest.approx(math.sqrt(26))


def test_some_rows_of_a_long_problem_are_judged(monkeypatch):
    monkeypatch.setattr(module, "ALL_ROWS", 32)
    monkeypatch.setattr(module, "ROWS", 5)
    judge = OutputJudge(DATA, 33, seed=0)
    assert judge.rows.tolist() == [0, 8, 16, 24, 32]
    runner = ExactAttention().build(judge.sizes, judge.tensors, 0)
    assert judge.error(ExactAttention(), runner, runner.forward()).worst < 1e-5


def test_threads_are_those_asked_for_and_come_back(threads, monkeypatch):
    threads(2)
    seen = []
    at = module._points_at
    monkeypatch.setattr(module, "_points_at", lambda *given: seen.append(torch.get_num_threads()) or at(*given))
    measured([ExactAttention()], lengths=(4,))
    assert seen == [1]
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        ComparisonSettings(0)


def test_an_interrupt_keeps_what_was_measured(threads, monkeypatch):
    threads(2)
    made = comparison()
    told = []

    def stop(what):
        told.append(what)
        if what == "16 tokens":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(made, [contender_named("exact")], DATA, (16, 33), SETTINGS, stop)
    assert [point.length for point in made.lines[0].points] == [16]
    assert torch.get_num_threads() == 2
