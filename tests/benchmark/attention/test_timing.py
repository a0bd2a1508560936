"""Taking turns, with a clock that the calls themselves move."""

from __future__ import annotations

import gc

import pytest

from looped import looped
from saccade.benchmark.attention import Budget
from saccade.benchmark.attention.timing import Stopwatch, median_ratio, quiet, repeat_noisy, rounds_of, take_turns


class Time:
    """A clock, and calls that take what they say; `costs` may give the first calls other times."""

    def __init__(self):
        self.now = 0.0
        self.calls: list[str] = []

    def clock(self):
        return self.now

    def call(self, name, seconds, *first):
        costs = list(first)

        def run():
            self.calls.append(name)
            self.now += costs.pop(0) if costs else seconds

        return run

    def stopwatch(self, name, seconds, *first):
        return Stopwatch(self.call(name, seconds, *first), clock=self.clock)


def test_a_short_call_is_repeated_until_it_fills_a_block():
    time = Time()
    watch = time.stopwatch("short", 1e-5)
    assert watch.prepare(5e-3) >= 5e-3
    assert 500 <= watch.repeats <= 510
    assert watch() == pytest.approx(1e-5)


def test_a_long_call_is_not_repeated():
    time = Time()
    watch = time.stopwatch("long", 2.0)
    assert watch.prepare(5e-3) == 2.0
    assert watch.repeats == 1
    assert time.calls == ["long"]


def test_a_slow_first_call_does_not_settle_the_repeats():
    time = Time()
    watch = time.stopwatch("late", 1e-4, 4e-3)
    watch.prepare(5e-3)
    assert watch.repeats >= 50
    assert watch() == pytest.approx(1e-4)


def test_what_the_contender_before_left_behind_is_not_timed():
    time = Time()
    cold, warm = 3e-2, 1e-2
    watch = time.stopwatch("short", warm, warm, cold)  # prepared in one call; the next one comes after another's turn
    watch.prepare(5e-3)
    assert watch() == pytest.approx(warm)


def test_a_clock_that_stands_still_ends_nevertheless():
    watch = Stopwatch(lambda: None, clock=lambda: 0.0)
    watch.prepare(5e-3)
    assert watch.repeats >= 1_000_000


def test_everyone_is_read_once_in_each_round_and_nobody_always_first():
    time = Time()
    meters = [time.stopwatch(name, 1.0) for name in "abc"]
    readings = take_turns(meters, Budget(seconds=0.0, least=3, most=9), time.clock)
    assert time.calls == [*"abc", *"bca", *"cab"]
    assert readings == [[1.0] * 3] * 3


@pytest.mark.parametrize(("budget", "rounds"), [((10.0, 2, 50), 5), ((0.0, 4, 50), 4), ((1000.0, 2, 7), 7)])
def test_rounds_fill_the_time_but_neither_more_nor_less_than_agreed(budget, rounds):
    time = Time()
    seconds, least, most = budget
    readings = take_turns([time.stopwatch("x", 2.0)], Budget(seconds, least, most), time.clock)
    assert readings == [[2.0] * rounds]


def test_readings_of_a_round_share_what_disturbs_it():
    time = Time()
    slow = [1.0, 1.0, 3.0, 1.0]

    def meter(factor):
        def read():
            before = len(time.calls)
            time.calls.append("x")
            return factor * slow[before // 2]

        return read

    ours, theirs = take_turns([meter(2.0), meter(3.0)], Budget(0.0, 4, 4), time.clock)
    assert [b / a for a, b in zip(ours, theirs, strict=True)] == [1.5] * 4


def test_the_setting_holds_around_the_calls_and_no_longer():
    seen = []

    class Around:
        def __enter__(self):
            seen.append("in")

        def __exit__(self, *_):
            seen.append("out")

    Stopwatch(lambda: seen.append("call"), Around, clock=lambda: 0.0)()
    assert seen == ["in", "call", "out"]


def test_no_garbage_is_collected_while_the_clock_runs():
    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt), quiet():
        assert not gc.isenabled()
        raise KeyboardInterrupt
    assert gc.isenabled()


@looped("budget", [{"seconds": -1}, {"least": 0}, {"least": 9, "most": 8}, {"block": 0}])
def test_what_is_no_budget_is_refused(budget):
    with pytest.raises(ValueError, match="a budget needs seconds >= 0, 1 <= least <= most and block > 0"):
        Budget(**budget)


def test_what_is_noisy_is_read_once_more_and_the_calmer_readings_count():
    calm, wild, worse = [1.0, 1.01, 1.0], [1.0, 3.0, 1.0, 9.0], [2.0, 2.2, 2.6, 2.9]
    read = {"calm": 0, "wild": 0, "worse": 0}

    def meter(name, answers):
        def reading():
            read[name] += 1
            return answers[read[name] - 1]

        return reading

    meters = [meter("calm", []), meter("wild", [2.0, 2.0, 2.1]), meter("worse", [1.0, 5.0, 25.0])]
    found = repeat_noisy(meters, [calm, wild, worse], Budget(0.0, 3, 3), clock=lambda: 0.0)
    assert found == [calm, [2.0, 2.0, 2.1], worse]
    assert read == {"calm": 0, "wild": 3, "worse": 3}


def test_rounds_by_name_without_the_one_that_warms_up():
    now, order = [0.0], []

    def call(name, seconds):
        order.append(name)
        now[0] += seconds * (10.0 if len(order) <= 2 else 1.0)

    calls = {"one": lambda: call("one", 1.0), "two": lambda: call("two", 4.0)}
    assert rounds_of(calls, 2, lambda: now[0]) == {"one": [1.0, 1.0], "two": [4.0, 4.0]}
    assert order == ["one", "two", "two", "one", "one", "two"]
    assert rounds_of(calls, 1, lambda: now[0], warm=True) == {"one": [1.0], "two": [4.0]}


def test_ratios_are_of_one_round():
    assert median_ratio([2.0, 9.0, 8.0], [1.0, 3.0, 1.0]) == 3.0
