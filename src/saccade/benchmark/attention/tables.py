"""A report as aligned text for a terminal or a pipe, and as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...support import _numbers
from ...support._tables import Table
from .results import DISTURBED, BenchmarkReport, Measurement, MeasurementGroup
from .statistics import NOISY, Quartiles


def unit_of(row: Measurement) -> str:
    return "B/s" if row.case.stage == "decode" else "FLOP/s"


def group_table(group: MeasurementGroup, *, cases: bool = False) -> Table:
    """Header and cells of a group. cases: whether to add a column for the case."""
    first = group.rows[0]
    header = ["contender", "time", "spread", "rate", "of limit", f"{first.contender} is"]
    header += ["work"] if cases else []
    lines = [_cells(group, row) for row in group.rows]
    for cells, row in zip(lines, group.rows, strict=True):
        cells += [_numbers.percent(row.case.work)] if cases else []
    if cases:
        header.insert(0, "case")
        lines = [[row.case.label, *cells] for row, cells in zip(group.rows, lines, strict=True)]
    return Table([*header, ""], [[*cells, row.note] for cells, row in zip(lines, group.rows, strict=True)], "l")


def _cells(group: MeasurementGroup, row: Measurement) -> list[str]:
    share, faster = group.share(row), group.speedup(group.rows[0], row)
    seconds = row.seconds
    return [
        row.contender,
        "-" if seconds is None else _numbers.duration(seconds.median),
        "-" if seconds is None else f"{_numbers.percent(seconds.spread)}{' !' if row.noisy or group.disturbed else ''}",
        "-" if row.rate is None else _numbers.rate(row.rate, unit_of(row)),
        ("-" if seconds is None else "not known") if share is None else _numbers.percent(share.median),
        "-" if faster is None or row is group.rows[0] else _faster(faster),
    ]


def _faster(ratio: Quartiles) -> str:
    return "noisy" if ratio.noisy else f"{ratio.median:.2f}x as fast"


def exponent_table(report: BenchmarkReport) -> Table:
    header = ["grows as", "time", "from", "to"]
    rows = [
        [
            entry["series"],
            f"L^{entry['time']:.2f}",
            _numbers.length(entry["from"]),
            _numbers.length(entry["to"]),
        ]
        for entry in report.exponents
    ]
    return Table(header, rows, "l")


def group_heading(group: MeasurementGroup) -> str:
    """The title, with the visible share of pairs if some are hidden."""
    case = group.rows[0].case
    return group.title if _mixed(group) or case.work == 1 else f"{group.title}; work {_numbers.percent(case.work)}"


def limits_line(group: MeasurementGroup) -> str:
    """The limits measured with the group; "" if unknown."""
    limits = [f"{limit.name} {_numbers.rate(_middle(limit.readings), limit.unit)}" for limit in group.limits]
    return f"limit: {', '.join(limits)}" if limits else ""


def _middle(readings: Sequence[float]) -> float:
    return sorted(readings)[len(readings) // 2]


def _mixed(group: MeasurementGroup) -> bool:
    return len({row.case for row in group.rows}) > 1


def group_lines(group: MeasurementGroup) -> list[str]:
    limits = limits_line(group)
    table = group_table(group, cases=_mixed(group)).lines("  ")
    return [group_heading(group), *([f"  {limits}"] if limits else []), *table, ""]


def notes(report: BenchmarkReport) -> list[str]:
    """Notes on noise, missing limits, compilation and wrong results."""
    rows = report.rows
    lines = disturbances(sum(row.noisy for row in rows), len(rows), report.machine)
    disturbed = [group.others or 0.0 for group in report.groups if group.disturbed]
    if disturbed:
        lines.append(
            f"! Other programs took more than {_numbers.percent(DISTURBED)} of the processors while {len(disturbed)} "
            f"groups were timed, up to {_numbers.percent(max(disturbed))}."
        )
    if any(row.status == "measured" and row.readings and row.limit is None for row in rows):
        lines.append("The limit is unknown if no native kernel measures it.")
    compiled = [row for row in rows if row.setup > 0]
    if compiled:
        longest = max(row.setup for row in compiled)
        lines.append(
            f"Times do not include compilation: {compiled[0].contender} took up to {longest:.0f} s for a shape."
        )
    wrong = sum(row.status == "wrong" for row in rows)
    if wrong:
        lines.append(f"{wrong} results were WRONG, so no speed is shown for them.")
    return lines


def disturbances(noisy: int, rows: int, machine: dict[str, Any]) -> list[str]:
    """Warnings about noisy readings and other programs."""
    lines = []
    if noisy:
        lines.append(
            f"! {noisy} of {rows} rows are noisy: the middle half of their readings spans more than "
            f"{_numbers.percent(NOISY)} of the median."
        )
    load = machine.get("load_before")
    if load is not None and load > 0.5:
        lines.append(f"! Other programs were running: the load average was {load} before the run.")
    return lines


def machine_line(machine: dict[str, Any]) -> str:
    cache = machine.get("last_level_cache")
    parts = [
        f"{machine['processor']}, {machine['threads']} of {machine['cores']} cores",
        *([f"last-level cache {_numbers.size(cache)}"] if cache else []),
        f"instruction set {machine['instruction_set'] or 'not known (no native build)'}",
        f"PyTorch {machine['torch']}",
        f"Saccade {machine['saccade']}",
        f"{machine['date'][:10]}",
    ]
    return ", ".join(parts)


def text(report: BenchmarkReport) -> list[str]:
    """The report as lines for a terminal or a pipe."""
    lines = [machine_line(report.machine), ""]
    for group in report.groups:
        lines += group_lines(group)
    if report.exponents:
        lines += [*exponent_table(report).lines(), ""]
    return [*lines, *notes(report)]
