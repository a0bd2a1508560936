"""A whole run, group after group, into a report that can be read at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .cases import Case
from .contenders import Contender
from .growth import exponents
from .measuring import Entry, MeasurementSettings, measure
from .results import BenchmarkReport, MeasurementGroup

Told = Callable[[MeasurementGroup], None]


def sweep(
    cases: Iterable[Case], who: Sequence[Contender], report: BenchmarkReport, settings: MeasurementSettings, told: Told
) -> None:
    """Measure every contender on every case; `told` of each group when it is there."""
    for case in cases:
        group = measure(case.label, [Entry(case, contender) for contender in who], settings)
        report.groups.append(group)
        report.exponents = exponents(report)
        told(group)
