"""Measures a group: makes the inputs, checks every contender, then times all of them alternately."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...support._machine import watch_others
from .cases import Case, CaseInputs
from .checking import CaseJudge, staged
from .contenders import Contender
from .machine import Limit, own_limit
from .results import DISTURBED, BenchmarkReport, LimitReadings, Measurement, MeasurementGroup, exponents
from .statistics import quartiles
from .timing import Budget, Stopwatch, first_line, quiet, take_turns, thread_count

LONG = 40  # blocks; a longer first call needs no more warm-up


class Entry(NamedTuple):
    case: Case
    contender: Contender


@dataclass(frozen=True)
class MeasurementSettings:
    """Settings of measuring. `most_memory`: bytes above which a contender is skipped. `again`: how often a noisy group
    is timed again, each time longer; the least noisy attempt is kept."""

    threads: int
    budget: Budget = field(default_factory=Budget)
    most_memory: int = 4 * 2**30
    again: int = 0

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")


@dataclass
class _CheckedEntry:
    """An entry with a correct result, ready to be timed."""

    entry: Entry
    stopwatch: Stopwatch
    setup: float
    error: float
    limits: list[Limit]


def sweep(
    cases: Iterable[Case],
    contenders: Sequence[Contender],
    report: BenchmarkReport,
    settings: MeasurementSettings,
    after: Callable[[MeasurementGroup], None],
) -> None:
    """Measure every contender on every case into a report; `after` is called with each finished group."""
    for case in cases:
        group = measure(case.label, [Entry(case, contender) for contender in contenders], settings)
        report.groups.append(group)
        report.exponents = exponents(report)
        after(group)


def measure(title: str, entries: Sequence[Entry], settings: MeasurementSettings) -> MeasurementGroup:
    """Check the entries and time them alternately; returns a row for each, in order."""
    shared = _SharedInputs(settings)
    with thread_count(settings.threads):
        prepared = [shared.prepare(entry) for entry in entries]
        runners = [made for made in prepared if isinstance(made, _CheckedEntry)]
        readings, limits, others = _timed(runners, settings)
    rows = [_measured(made, tuple(readings.pop(0))) if isinstance(made, _CheckedEntry) else made for made in prepared]
    return MeasurementGroup(title, tuple(rows), tuple(limits), others)


class _SharedInputs:
    """Inputs and expected results by case, shared by its contenders."""

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
            # An exception of a contender becomes its note; the others still run.
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
            stopwatch = Stopwatch(staged(forward, inputs), contender.around)
        setup = 0.0
        if contender.compiles or first < LONG * self._settings.budget.block:
            block = stopwatch.prepare(self._settings.budget.block)
            setup = max(first - block / stopwatch.repeats, 0.0) if contender.compiles else 0.0
        limits = contender.limits(inputs, self._settings.threads)
        return _CheckedEntry(entry, stopwatch, setup, verdict.error, limits)

    def _of(self, case: Case) -> CaseInputs:
        if case not in self._inputs:
            self._inputs[case] = CaseInputs.make(case)
            self._judges[case] = CaseJudge.of(self._inputs[case])
        return self._inputs[case]


class _Attempt(NamedTuple):
    """Readings by meter, and the share of the processors used by other programs."""

    readings: list[list[float]]
    others: float | None

    def disturbance(self) -> tuple[int, float]:
        """Number of noisy meters (all if other programs were running), and their total spread."""
        middles = [quartiles(readings) for readings in self.readings]
        disturbed = self.others is not None and self.others > DISTURBED
        noisy = len(middles) if disturbed else sum(middle.noisy for middle in middles)
        return noisy, sum(middle.spread for middle in middles)


def _timed(
    runners: list[_CheckedEntry], settings: MeasurementSettings
) -> tuple[list[list[float]], list[LimitReadings], float | None]:
    if not runners:
        return [], [], None
    limits = list({limit.name: limit for runner in runners for limit in runner.limits}.values())
    meters: list[Callable[[], float]] = [runner.stopwatch for runner in runners]
    meters += [_meter(limit) for limit in limits]
    attempts: list[_Attempt] = []
    with quiet():
        while len(attempts) <= settings.again and (not attempts or attempts[-1].disturbance()[0]):
            others = watch_others()
            taken = take_turns(meters, settings.budget.longer(len(attempts) + 1))
            attempts.append(_Attempt(taken, others()))
    readings, taken_by_others = min(attempts, key=_Attempt.disturbance)
    taken_of_limits = [
        LimitReadings(limit.name, limit.unit, tuple(numbers))
        for limit, numbers in zip(limits, readings[len(runners) :], strict=True)
    ]
    return readings[: len(runners)], taken_of_limits, taken_by_others


def _meter(limit: Limit) -> Callable[[], float]:
    """The meter of a limit. For arithmetic it takes the best of three readings: threads that start on one core stay
    there for part of the 10 ms."""
    return (lambda: max(limit.meter() for _ in range(3))) if limit.unit == "FLOP/s" else limit.meter


def _measured(runner: _CheckedEntry, readings: tuple[float, ...]) -> Measurement:
    case, contender = runner.entry
    limit = own_limit(case, runner.limits)
    name = None if limit is None else limit.name
    return Measurement(case, contender.name, "measured", "", readings, name, runner.setup, runner.error)
