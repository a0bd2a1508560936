"""Weights are seen, foreseen where they would be too much, and a process that ends takes nobody along."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import torch

from looped import looped
from saccade.benchmark.attention import memory
from saccade.benchmark.variants import ProblemSizes, weighing
from saccade.benchmark.variants.catalogue import contender_named
from saccade.benchmark.variants.weighing import CallWeight, WeighingLimits, answer, foreseen, weigh, weights

MIB = 2**20
SIZES = ProblemSizes(1, 2, 2, 16, 16, 0, True)

linux = pytest.mark.skipif(not memory.STATUS.exists(), reason="the system does not tell its memory")


def test_what_is_foreseen_of_one_length():
    small = [(256, CallWeight(MIB, "", 1.0))]
    assert foreseen([], 8192, WeighingLimits()) == ""
    assert foreseen(small, 512, WeighingLimits(4 * MIB, 2.0)) == ""
    assert foreseen(small, 512, WeighingLimits(4 * MIB - 1, 2.0)) == "would form about 0.0 GiB"
    assert (
        foreseen(small, 512, WeighingLimits(4 * MIB, 1.9)) == "a call would take about 2 s"
    )  # at least: time grows as L
    assert foreseen([(256, CallWeight(2**30, "", 0.0))], 512, WeighingLimits(2**30)) == "would form about 4.0 GiB"


@looped(("before", "told"), [(8.0, 16), (4.0, 16), (3.0, 21), (2.0, 32), (1.0, 32), (0.0, 16)])
def test_growth_goes_on_as_it_was(before, told):
    """8 s at 512 after so many at 256: as between the two, at least as L and at most as L^2."""
    earlier = [(256, CallWeight(0, "", before)), (512, CallWeight(0, "", 8.0))]
    assert foreseen(earlier, 1024, WeighingLimits(seconds=1.0)).endswith(f" {told} s")


def test_longer_ones_are_not_tried_after_what_they_would_need(monkeypatch):
    asked = []

    def weighed(contender, sizes, seed):
        asked.append(sizes.length)
        return CallWeight(sizes.length**2, "", 0.0)

    monkeypatch.setattr(weighing, "_weighed", weighed)
    found = list(weights(contender_named("exact"), SIZES, (64, 128, 256), WeighingLimits(bytes=128**2), seed=0))
    assert asked == [64, 128]
    assert found == [(64, 64**2, "", 0.0), (128, 128**2, "", 0.0), (256, None, "would form about 0.0 GiB", 0.0)]


def test_a_wide_gap_is_crossed_in_steps(monkeypatch):
    """1 MiB at 256 would be 4 GiB at 16k if it grew as L^2; it grows as L, and that is seen on the way."""
    assert weighing.steps((16384, 256, 300, 256)) == [256, 300, 1200, 4800, 16384]
    monkeypatch.setattr(weighing, "_weighed", lambda one, sizes, seed: CallWeight(sizes.length * 2**12, "", 0.0))
    found = list(weights(contender_named("exact"), SIZES, (256, 16384), WeighingLimits(bytes=2**30), seed=0))
    assert found == [(256, 2**20, "", 0.0), (16384, 2**26, "", 0.0)]


def test_what_is_needed_for_certain_is_not_tried(monkeypatch):
    monkeypatch.setattr(weighing, "_weighed", lambda *given: pytest.fail("it was built"))
    (found,) = weights(contender_named("connected"), SIZES, (2**15,), WeighingLimits(), seed=0)
    assert found == (2**15, None, "would form 16.0 GiB", 0.0)


@linux
def test_a_square_of_weights_is_seen(threads):
    """Training a connected layer forms the masked weights, their gradient and the gradient of all weights."""
    threads(1)
    list(weights(contender_named("connected"), SIZES, (64,), WeighingLimits(), seed=0))  # loads what a first call loads
    (found,) = weights(contender_named("connected"), SIZES, (2048,), WeighingLimits(), seed=0)
    square = 4 * 2048**2
    assert 1.9 * square < found[1] < 4.5 * square
    assert found[2] == ""


@linux
def test_gradients_of_inputs_are_not_counted(threads):
    threads(1)
    sizes = SIZES._replace(length=4096)
    one = contender_named("window:size=4")
    runner = one.build(sizes, weighing.normal(sizes, 0), 0)
    runner.training()()
    peak, _ = memory.growth(runner.training())
    (found,) = weights(one, sizes, (4096,), WeighingLimits(), seed=0)
    assert runner.bytes_of_inputs == 3 * 4096 * 32 * 4
    assert found[1] <= peak  # the gradients of q, k and v are 1.5 MiB of it


def test_what_fails_says_why(monkeypatch):
    one = replace(contender_named("window"), given=(("size", -1),))
    (found,) = weights(one, SIZES, (64,), WeighingLimits(), seed=0)
    assert found[1] is None
    assert "size" in found[2]


def test_a_system_that_does_not_tell_still_times(monkeypatch):
    def refuse(call):
        raise OSError("/proc/self/status has no VmRSS")

    monkeypatch.setattr(weighing, "growth", refuse)
    assert list(weights(contender_named("exact"), SIZES, (64, 128), WeighingLimits(), seed=0)) == [
        (64, None, "", 0.0),
        (128, None, "", 0.0),
    ]


@pytest.mark.slow
@linux
def test_a_question_is_answered_line_by_line(threads):
    threads(1)
    question = {
        "names": ["GRU", "window"],
        "sizes": SIZES,
        "lengths": [64, 96],
        "bytes": 2**30,
        "seconds": 9.0,
        "threads": 1,
        "seed": 0,
    }
    told = [json.loads(line) for line in answer(json.dumps(question))]
    assert [entry[:2] for entry in told] == [["GRU", 64], ["GRU", 96], ["window", 64], ["window", 96]]
    assert all(entry[2] is not None and entry[3] == "" for entry in told)
    assert torch.get_num_threads() == 1


def test_a_process_that_ends_takes_nobody_along(monkeypatch):
    """The first that has no answer is what ended it; the rest are asked anew."""
    asked, told = [], []

    def ask(question, found, told, stop):
        asked.append(question["names"])
        if len(asked) == 1:
            found["exact"] |= {64: CallWeight(1), 128: CallWeight(2)}
            found["GRU"][64] = CallWeight(3)
            return "it ended"
        for name in question["names"]:
            found[name] |= {64: CallWeight(4), 128: CallWeight(5)}
        return ""

    monkeypatch.setattr(weighing, "_ask", ask)
    who = [contender_named("exact"), contender_named("GRU"), contender_named("LSTM")]
    found = weigh(who, SIZES, (64, 128), WeighingLimits(), 1, 0, told.append, threading.Event())
    assert asked == [["exact", "GRU", "LSTM"], ["LSTM"]]
    assert found == {
        "exact": {64: CallWeight(1), 128: CallWeight(2)},
        "GRU": {64: CallWeight(3), 128: CallWeight(None, "it ended")},
        "LSTM": {64: CallWeight(4), 128: CallWeight(5)},
    }
    assert told == ["GRU"]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import os; os._exit(7)", "the process that measured its memory ended: exit status 7"),
        ("raise MemoryError('all gone')", "the process that measured its memory ended: MemoryError: all gone"),
    ],
)
def test_why_a_process_ended(monkeypatch, program, words):
    """What it answered before counts."""
    answered = """print('["exact", 64, 7, "", 0.5]', flush=True);"""
    monkeypatch.setattr(weighing, "PROGRAM", answered + program)
    found, told = {"exact": {}}, []
    assert weighing._ask({"lengths": [64]}, found, told.append, threading.Event()) == words
    assert found == {"exact": {64: CallWeight(7, "", 0.5)}}
    assert told == ["exact"]


def test_one_that_is_stopped_asks_no_more(monkeypatch):
    stop = threading.Event()

    def ask(question, found, told, stop):
        stop.set()
        return "it was killed"

    monkeypatch.setattr(weighing, "_ask", ask)
    found = weigh([contender_named("exact"), contender_named("GRU")], SIZES, (64,), WeighingLimits(), 1, 0, str, stop)
    assert found == {"exact": {64: CallWeight(None, "it was killed")}, "GRU": {}}


def test_a_process_is_killed_when_stopped(monkeypatch):
    """It would never end by itself."""
    monkeypatch.setattr(weighing, "PROGRAM", "import time; print('[]', flush=True); time.sleep(600)")
    stop = threading.Event()
    stop.set()
    found = {"exact": {}}
    assert "exit status -9" in weighing._ask({"lengths": [64]}, found, str, stop)
    assert found == {"exact": {}}


@linux
@pytest.mark.slow  # a process that imports torch
def test_weighing_in_a_process_of_its_own():
    told = []
    found = weigh(
        [contender_named("linear"), contender_named("GRU")],
        SIZES,
        (64, 128),
        WeighingLimits(),
        1,
        0,
        told.append,
        threading.Event(),
    )
    assert told == list(found) == ["linear", "GRU"]
    for by_length in found.values():
        assert list(by_length) == [64, 128]
        for weight in by_length.values():
            assert weight.peak is not None
            assert not weight.left_out
            assert weight.seconds > 0
