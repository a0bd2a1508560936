"""Measure targets one after another into a report, and judge them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from saccade.benchmark.attention.measuring import MeasurementSettings, measure
from saccade.benchmark.attention.results import BenchmarkReport, MeasurementGroup

from .catalogue import MedianTarget, PerformanceTarget
from .memory import weigh
from .requirements import RequirementOutcome

DECIDED = ("met", "missed", "out of reach")


@dataclass
class TargetReport(BenchmarkReport):
    outcomes: list[RequirementOutcome] = field(default_factory=list)


def hold_to(
    targets: Sequence[PerformanceTarget],
    medians: Sequence[MedianTarget],
    chosen: Collection[str],
    report: TargetReport,
    settings: MeasurementSettings,
    advance: Callable[[MeasurementGroup], None],
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
            if target.weighed:
                groups[target.title] = weigh(target.title, target.entries[0], settings.threads)
            else:
                groups[target.title] = measure(target.title, target.entries, settings)
            found[target.title] = _outcomes(target, groups[target.title])
        report.groups = [groups[one.title] for one in targets if one.title in groups]
        of_each = [outcome for one in targets for outcome in found.get(one.title, [])]
        of_many = [median_outcome(one, found) for one in medians]
        report.outcomes = [*of_each, *(outcome for outcome in of_many if outcome is not None)]
        advance(groups[target.title])


def _outcomes(target: PerformanceTarget, group: MeasurementGroup) -> list[RequirementOutcome]:
    return [ask.outcome(target.title, group) for ask in target.asks]


def median_outcome(target: MedianTarget, outcomes: dict[str, list[RequirementOutcome]]) -> RequirementOutcome | None:
    """The median of the members with a verdict; None if none of them was measured yet."""
    members = [outcomes[title][0] for title in target.members if title in outcomes]
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
