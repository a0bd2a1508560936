"""Taking turns: every meter is read once in each round, so that whatever disturbs the machine disturbs all alike."""

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

SHORT = 10  # blocks; what takes longer hardly notices how it finds the machine


@dataclass(frozen=True)
class Budget:
    """How long a group may be measured: about `seconds`, but at least `least` rounds and at most `most`.

    A call shorter than `block` seconds is repeated until a reading takes that long: the clock's resolution and the
    loop around the call are then a thousandth of it.
    """

    seconds: float = 3.0
    least: int = 5
    most: int = 100
    block: float = 0.005

    def __post_init__(self) -> None:
        if self.seconds < 0 or not 1 <= self.least <= self.most or self.block <= 0:
            raise ValueError(f"a budget needs seconds >= 0, 1 <= least <= most and block > 0, got {self}")

    def longer(self, times: int) -> Budget:
        """So many times as long, in seconds and in rounds."""
        return Budget(self.seconds * times, self.least * times, self.most * times, self.block)


@dataclass
class Stopwatch:
    """Times a call: a reading is the seconds of one call, from as many as fill a block.

    A short call is made once before the clock starts: it finds the caches full of what another contender used, and
    threads asleep or still at work for the other. Both are over after one call.
    """

    call: Callable[[], Any]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    clock: Clock = time.perf_counter
    repeats: int = field(default=1, init=False)
    short: bool = field(default=False, init=False)

    def prepare(self, block: float) -> float:
        """Warm the call up and settle the repeats; the seconds a block takes."""
        self.repeats = 1
        taken = self()
        # A first call pays for what later ones find ready: only a second one tells how long a short call is.
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
    """Readings of each meter, one a round. The order is rotated: nobody always follows the same neighbour."""
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
    """Seconds of each call in each of so many rounds; one more goes before them unless the calls are `warm`."""

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
    """The median of the ratios of readings of the same round."""
    return statistics.median(one / other for one, other in zip(seconds, to, strict=True))


def repeat_noisy(
    meters: Sequence[Meter], readings: Sequence[list[float]], budget: Budget, clock: Clock = time.perf_counter
) -> list[list[float]]:
    """Readings in which the noisy ones were taken once more, where that came out calmer."""
    found = list(readings)
    noisy = [place for place, seconds in enumerate(found) if quartiles(seconds).noisy]
    again = take_turns([meters[place] for place in noisy], budget, clock) if noisy else []
    for place, seconds in zip(noisy, again, strict=True):
        found[place] = min(found[place], seconds, key=lambda one: quartiles(one).spread)
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection while the clock runs."""
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
    """PyTorch computes on so many threads within, and on as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def first_line(error: Exception) -> str:
    """What an error says, as a note in a table: one line, not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."
