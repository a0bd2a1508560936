"""Alternating timing: each meter is read once in every round, so that disturbances affect all alike."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .statistics import quartiles

Clock = Callable[[], float]  # seconds
Meter = Callable[[], float]

SHORT = 10  # blocks; longer calls need no warm-up


@dataclass(frozen=True)
class Budget:
    """How long to measure a group: about `seconds`, but at least `least` rounds and at most `most`.

    Calls shorter than `block` seconds are repeated until a reading takes that long, so that clock resolution and loop
    overhead are about a thousandth of it.
    """

    seconds: float = 3.0
    least: int = 5
    most: int = 100
    block: float = 0.005

    def __post_init__(self) -> None:
        if self.seconds < 0 or not 1 <= self.least <= self.most or self.block <= 0:
            raise ValueError(f"a budget needs seconds >= 0, 1 <= least <= most and block > 0, got {self}")

    def longer(self, times: int) -> Budget:
        """A budget with `times` as many seconds and rounds."""
        return Budget(self.seconds * times, self.least * times, self.most * times, self.block)


@dataclass
class Stopwatch:
    """Times a call: a reading is the seconds of a call, averaged over as many as fill a block.

    A short call is made once before the clock starts, since another contender's data fills the caches and its threads
    may still be running or asleep. One call is enough.
    """

    call: Callable[[], Any]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    clock: Clock = time.perf_counter
    repeats: int = field(default=1, init=False)
    short: bool = field(default=False, init=False)

    def prepare(self, block: float) -> float:
        """Warm up, choose the number of repeats, and return the seconds of a block."""
        self.repeats = 1
        taken = self()
        # The first call includes initialisation, so the second one determines the number of repeats.
        while taken * self.repeats < block and self.repeats < 1_000_000:
            self.repeats = max(self.repeats + 1, min(self.repeats * 10, math.ceil(block / max(taken, 1e-9))))
            taken = self()
        self.short = taken < SHORT * block
        return taken * self.repeats

    def __call__(self) -> float:
        call, clock = self.call, self.clock
        with self.around():
            if self.short:
                call()
            start = clock()
            for _ in range(self.repeats):
                call()
            return (clock() - start) / self.repeats


def take_turns(meters: Sequence[Meter], budget: Budget, clock: Clock = time.perf_counter) -> list[list[float]]:
    """Readings of each meter, one for each round. The order rotates, so that no meter always follows the same one."""
    readings: list[list[float]] = [[] for _ in meters]
    start = clock()
    for turn in range(budget.most):
        if turn >= budget.least and clock() - start >= budget.seconds:
            break
        for place in range(len(meters)):
            which = (place + turn) % len(meters)
            readings[which].append(meters[which]())
    return readings


def rounds_of(
    calls: Mapping[str, Callable[[], Any]], rounds: int, clock: Clock = time.perf_counter, *, warm: bool = False
) -> dict[str, list[float]]:
    """Seconds of each call in each round; an additional warm-up round comes first unless the calls are `warm`."""

    def meter(call: Callable[[], Any]) -> Meter:
        def read() -> float:
            start = clock()
            call()
            return clock() - start

        return read

    more = 0 if warm else 1
    readings = take_turns([meter(call) for call in calls.values()], Budget(0.0, rounds + more, rounds + more))
    return {name: seconds[more:] for name, seconds in zip(calls, readings, strict=True)}


def median_ratio(seconds: Sequence[float], to: Sequence[float]) -> float:
    """The median ratio of readings of the same round."""
    return statistics.median(time / other for time, other in zip(seconds, to, strict=True))


def repeat_noisy(
    meters: Sequence[Meter], readings: Sequence[list[float]], budget: Budget, clock: Clock = time.perf_counter
) -> list[list[float]]:
    """Readings in which noisy ones were repeated; the repetition is used if it is less noisy."""
    medians = list(readings)
    noisy = [place for place, seconds in enumerate(medians) if quartiles(seconds).noisy]
    again = take_turns([meters[place] for place in noisy], budget, clock) if noisy else []
    for place, seconds in zip(noisy, again, strict=True):
        medians[place] = min(medians[place], seconds, key=lambda one: quartiles(one).spread)
    return medians


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable garbage collection within the context."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def thread_count(threads: int) -> Iterator[None]:
    """Set PyTorch's number of threads within the context, and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def first_line(error: Exception) -> str:
    """The first line of an error message, shortened for a table."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."
