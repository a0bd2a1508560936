"""A report of targets as a table, and as the page of `benchmarks/results/`."""

from __future__ import annotations

import statistics
from collections import Counter

from saccade.benchmark.attention.results import MeasurementGroup
from saccade.benchmark.attention.tables import group_heading, group_table, machine_line, notes
from saccade.support import _numbers
from saccade.support._tables import Table

from .judging import TargetReport

VERDICTS = {"met": "yes", "missed": "NO", "out of reach": "NO: out of reach"}
FORMATS = {"s": _numbers.duration, "B": _numbers.size}


def outcome_table(report: TargetReport) -> Table:
    """Requirement, measurement, whether it is met, and if not, what arithmetic or noise explains."""
    header = ["target", "asked", "measured", "met", ""]
    rows = [
        [one.target, one.asked, one.shown, VERDICTS.get(one.verdict, one.verdict), one.reason]
        for one in report.outcomes
    ]
    return Table(header, rows, "l")


def outcome_line(report: TargetReport) -> str:
    """`95 of 135 targets are met, 12 are missed, 9 are out of reach, 19 are noisy.`"""
    counts = Counter(one.verdict for one in report.outcomes)
    rest = [f"{counts[verdict]} are {verdict}" for verdict in counts if verdict != "met"]
    return ", ".join([f"{counts['met']} of {len(report.outcomes)} targets are met", *rest]) + "."


def page(report: TargetReport) -> str:
    """The report as a page for `benchmarks/results/`."""
    command, line = report.settings["command"], machine_line(report.machine)
    lines = ["# Speed and memory of attention", "", f"    {command}", "", f"{line}.", ""]
    lines += ["Medians of readings taken in turns; ratios are medians of ratios of readings of the same round.", ""]
    for note in notes(report):
        lines += [note, ""]
    lines += ["## Targets", "", outcome_line(report), "", *outcome_table(report).markdown(), "", "## Measurements", ""]
    for group in report.groups:
        mixed = len({row.case for row in group.rows}) > 1
        limits = f" ({limits_line(group)})" if group.limits else ""
        lines += [f"**{group_heading(group)}**{limits}", "", *group_table(group, cases=mixed).markdown(), ""]
    return "\n".join(lines).rstrip() + "\n"


def limits_line(group: MeasurementGroup) -> str:
    """The measured limits of the machine, in a line."""
    shown = []
    for limit in group.limits:
        middle = statistics.median(limit.readings)
        form = FORMATS.get(limit.unit)
        shown.append(f"{limit.name} {form(middle) if form else _numbers.rate(middle, limit.unit)}")
    return f"limit: {', '.join(shown)}"
