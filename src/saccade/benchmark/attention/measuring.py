"""One group from start to end: make the inputs, check every contender, then time all of them in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ...support._machine import watch_others
from .cases import Case, CaseInputs
from .checking import CaseJudge, staged
from .contenders import Contender
from .growth import exponents
from .limits import EMPTY_CALL, Limit, in_cpu_time, limits_of, own_limit
from .memory import peak_memory
from .overhead import empty_call
from .results import DISTURBED, BenchmarkReport, LimitReadings, Measurement, MeasurementGroup
from .statistics import quartiles
from .timing import Budget, Clock, Stopwatch, first_line, quiet, take_turns, thread_count

CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.thread_time}

LONG = 40  # blocks; a call that took longer when it was checked needs no more warming up


class Entry(NamedTuple):
    case: Case
    contender: Contender


@dataclass(frozen=True)
class MeasurementSettings:
    """How a run measures. `most_memory`: bytes beyond which a contender is left out of a case. `again`: how often a
    group with noisy readings is timed again, first twice as long, then three times; the calmest is kept."""

    threads: int
    budget: Budget = field(default_factory=Budget)
    clock: str = "wall"
    most_memory: int = 4 * 2**30
    memory: bool = False  # measure the peak memory of each row, too
    again: int = 0

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")
        if self.clock not in CLOCKS:
            raise ValueError(f"clock must be one of {', '.join(CLOCKS)}; got {self.clock!r}")
        if self.clock == "cpu" and self.threads != 1:
            raise ValueError(f"clock 'cpu' counts the calling thread alone: it needs threads = 1, got {self.threads}")


@dataclass
class _CheckedEntry:
    """An entry that was found right, and how it is timed."""

    entry: Entry
    stopwatch: Stopwatch
    setup: float
    error: float
    limits: list[Limit]


Told = Callable[[MeasurementGroup], None]


def sweep(
    cases: Iterable[Case], who: Sequence[Contender], report: BenchmarkReport, settings: MeasurementSettings, told: Told
) -> None:
    """Measure every contender on every case into a report that can be read at any time; `told` of each group."""
    for case in cases:
        group = measure(case.label, [Entry(case, contender) for contender in who], settings)
        report.groups.append(group)
        report.exponents = exponents(report)
        told(group)


def measure(title: str, entries: Sequence[Entry], settings: MeasurementSettings) -> MeasurementGroup:
    """Check and time the entries against each other; one row each, in their order."""
    shared = _SharedInputs(settings)
    with thread_count(settings.threads):
        prepared = [shared.prepare(entry) for entry in entries]
        runners = [made for made in prepared if isinstance(made, _CheckedEntry)]
        readings, limits, others = _timed(runners, settings)
    rows = [_measured(made, tuple(readings.pop(0))) if isinstance(made, _CheckedEntry) else made for made in prepared]
    if settings.memory:
        rows = [with_memory(row, entry, settings) for row, entry in zip(rows, entries, strict=True)]
    return MeasurementGroup(title, tuple(rows), tuple(limits), others)


class _SharedInputs:
    """Inputs and judges by case, so that contenders of one case read the same memory."""

    def __init__(self, settings: MeasurementSettings):
        self._settings = settings
        self._inputs: dict[Case, CaseInputs] = {}
        self._judges: dict[Case, CaseJudge] = {}

    def prepare(self, entry: Entry) -> _CheckedEntry | Measurement:
        case, contender = entry
        needs = contender.needs(case)
        if needs > self._settings.most_memory:
            return Measurement(case, contender.name, "none", f"would form {needs / 2**30:.1f} GiB")
        try:
            return self._runner(entry)
        except Exception as error:
            # Whatever a contender raises is its own answer to the case; the others still run.
            return Measurement(case, contender.name, "none", first_line(error))

    def _runner(self, entry: Entry) -> _CheckedEntry | Measurement:
        case, contender = entry
        inputs = self._of(case)
        with contender.around():
            start = time.perf_counter()
            forward = contender.forward(inputs)
            verdict = self._judges[case].verdict(forward)
            first = time.perf_counter() - start
            if not verdict.right:
                note = f"WRONG: {verdict.worst} is off by {verdict.error:.3g} times what is allowed"
                return Measurement(case, contender.name, "wrong", note, error=verdict.error)
            stopwatch = Stopwatch(staged(forward, inputs), contender.around, CLOCKS[self._settings.clock])
        setup = 0.0
        if contender.compiles or first < LONG * self._settings.budget.block:
            block = stopwatch.prepare(self._settings.budget.block)
            setup = max(first - block / stopwatch.repeats, 0.0) if contender.compiles else 0.0
        limits = [*limits_of(inputs, contender.instruction_set, self._settings.threads), self._empty(inputs)]
        return _CheckedEntry(entry, stopwatch, setup, verdict.error, limits)

    def _empty(self, inputs: CaseInputs) -> Limit:
        stopwatch = Stopwatch(empty_call(inputs), clock=CLOCKS[self._settings.clock])
        stopwatch.prepare(self._settings.budget.block)
        return Limit(EMPTY_CALL, "s", stopwatch)

    def _of(self, case: Case) -> CaseInputs:
        if case not in self._inputs:
            self._inputs[case] = CaseInputs.make(case)
            self._judges[case] = CaseJudge.of(self._inputs[case])
        return self._inputs[case]


class _Attempt(NamedTuple):
    """Readings by meter, and the share of the processors that others took meanwhile."""

    readings: list[list[float]]
    others: float | None

    def disturbance(self, count: int) -> tuple[int, float]:
        """How many of the first meters are noisy, all of them if others were running; and how much they spread."""
        found = [quartiles(readings) for readings in self.readings[:count]]
        disturbed = self.others is not None and self.others > DISTURBED
        return count if disturbed else sum(one.noisy for one in found), sum(one.spread for one in found)


def _timed(
    runners: list[_CheckedEntry], settings: MeasurementSettings
) -> tuple[list[list[float]], list[LimitReadings], float | None]:
    if not runners:
        return [], [], None
    known = {limit.name: limit for runner in runners for limit in runner.limits}
    limits = sorted(known.values(), key=lambda limit: limit.unit == "s")
    meters: list[Callable[[], float]] = [runner.stopwatch for runner in runners]
    meters += [_meter(limit, settings.clock) for limit in limits]
    judged = len(meters) - sum(limit.unit == "s" for limit in limits)
    attempts: list[_Attempt] = []
    with quiet():
        while len(attempts) <= settings.again and (not attempts or attempts[-1].disturbance(judged)[0]):
            others = watch_others()
            taken = take_turns(meters, settings.budget.longer(len(attempts) + 1))
            attempts.append(_Attempt(taken, others()))
    readings, taken_by_others = min(attempts, key=lambda attempt: attempt.disturbance(judged))
    told = [
        LimitReadings(limit.name, limit.unit, tuple(numbers))
        for limit, numbers in zip(limits, readings[len(runners) :], strict=True)
    ]
    return readings[: len(runners)], told, taken_by_others


def _meter(limit: Limit, clock: str) -> Callable[[], float]:
    """Of arithmetic the best of three: two threads that begin on one core stay there for some of a reading's 10 ms."""
    if limit.unit == "s":
        return limit.meter
    meter = in_cpu_time(limit.meter) if clock == "cpu" else limit.meter
    return (lambda: max(meter() for _ in range(3))) if limit.unit == "FLOP/s" else meter


def _measured(runner: _CheckedEntry, readings: tuple[float, ...]) -> Measurement:
    case, contender = runner.entry
    limit = own_limit(case, runner.limits)
    name = None if limit is None else limit.name
    return Measurement(case, contender.name, "measured", "", readings, name, runner.setup, runner.error)


def with_memory(row: Measurement, entry: Entry, settings: MeasurementSettings) -> Measurement:
    """The row with the peak memory of its call, or with the reason why there is none."""
    if row.status != "measured":
        return row
    needs = entry.contender.needs(row.case)
    if needs > settings.most_memory:
        return replace(row, status="none", note=f"would form {needs / 2**30:.1f} GiB")
    found = peak_memory(entry.case, entry.contender, settings.threads)
    return replace(row, note=found) if isinstance(found, str) else replace(row, memory=found)
