"""Measure targets one after another into a report, and judge them."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

from ..measuring import Entry, MeasurementSettings, Told, measure, with_memory
from ..results import BenchmarkReport, Measurement, MeasurementGroup, RequirementOutcome
from .catalogue import MedianTarget, PerformanceTarget

DECIDED = ("met", "missed", "out of reach")


def hold_to(
    targets: Sequence[PerformanceTarget],
    medians: Sequence[MedianTarget],
    chosen: Collection[str],
    report: BenchmarkReport,
    settings: MeasurementSettings,
    told: Told,
) -> None:
    """Measure the targets whose titles are chosen, unless the report holds them already and their readings decide.

    All targets that the report holds are judged after each group, so that it can be read at any time.
    """
    groups = {group.title: group for group in report.groups}
    found = {target.title: _outcomes(target, groups[target.title]) for target in targets if target.title in groups}
    for target in targets:
        if target.title not in chosen:
            continue
        if target.title not in found or any(one.verdict not in DECIDED for one in found[target.title]):
            take = weigh if target.weighed else measure
            groups[target.title] = take(target.title, target.entries, settings)
            found[target.title] = _outcomes(target, groups[target.title])
        report.groups = [groups[one.title] for one in targets if one.title in groups]
        of_each = [outcome for one in targets for outcome in found.get(one.title, [])]
        of_many = [median_outcome(one, found) for one in medians]
        report.outcomes = [*of_each, *(outcome for outcome in of_many if outcome is not None)]
        told(groups[target.title])


def _outcomes(target: PerformanceTarget, group: MeasurementGroup) -> list[RequirementOutcome]:
    return [ask.outcome(target.title, group) for ask in target.asks]


def median_outcome(target: MedianTarget, found: dict[str, list[RequirementOutcome]]) -> RequirementOutcome | None:
    """Of the members whose readings decide something; None where none of them was measured yet."""
    members = [found[title][0] for title in target.members if title in found]
    if not members:
        return None
    numbers = [one.measured for one in members if one.verdict in DECIDED and one.measured is not None]
    asked = f"at least {target.bound:.2f}x the best other's speed at the median"
    if 2 * len(numbers) <= len(members):
        verdict = "noisy" if any(one.verdict == "noisy" for one in members) else "not measured"
        return RequirementOutcome(target.title, asked, None, f"{len(numbers)} of {len(members)} calls", verdict)
    middle = statistics.median(numbers)
    shown = f"{middle:.2f}x of {len(numbers)} calls"
    return RequirementOutcome(target.title, asked, middle, shown, "met" if middle >= target.bound else "missed")


def weigh(title: str, entries: Sequence[Entry], settings: MeasurementSettings) -> MeasurementGroup:
    """The peak memory of each entry, without times: for cases whose times are of no interest."""
    rows = [
        with_memory(Measurement(entry.case, entry.contender.name, "measured"), entry, settings) for entry in entries
    ]
    return MeasurementGroup(title, tuple(rows))
