"""A whole run: sweeps and targets, group after group, into a report that can be read at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .cases import Case
from .contenders import Contender
from .growth import exponents
from .measuring import Entry, MeasurementSettings, measure, weigh
from .results import BenchmarkReport, MeasurementGroup
from .targets import PerformanceTarget

Told = Callable[[MeasurementGroup], None]


def sweep(
    report: BenchmarkReport, cases: Iterable[Case], who: Sequence[Contender], settings: MeasurementSettings, told: Told
) -> None:
    """Measure every contender on every case; `told` of each group when it is there."""
    for case in cases:
        group = measure(case.label, [Entry(case, contender) for contender in who], settings)
        report.groups.append(group)
        report.exponents = exponents(report)
        told(group)


def hold_to(
    report: BenchmarkReport, targets: Iterable[PerformanceTarget], settings: MeasurementSettings, told: Told
) -> None:
    """Measure targets and judge them."""
    for target in targets:
        take = weigh if target.weighed else measure
        group = take(target.title, target.entries, settings)
        report.groups.append(group)
        report.outcomes += [ask.outcome(target.title, group) for ask in target.asks]
        told(group)
