"""`saccade bench`."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .. import __version__
from ._bench_options import (
    BenchMeasuringOptions,
    BenchOutputOptions,
    CaseOptions,
    ContenderOptions,
    cases_of,
    contenders_of,
    settings_of,
)
from ._options import GroupedCommand, flattened
from ._outputs import checked_files, piece_bar, read_results, write_files, write_plot

if TYPE_CHECKING:
    from ..benchmark.attention import BenchmarkReport, MeasurementGroup, MeasurementSettings

    Told = Callable[[MeasurementGroup], None]
    Measuring = Callable[[BenchmarkReport, MeasurementSettings, Told], None]

EPILOG = """
Exit status: 0 measured, 1 a result was wrong (it is shown without a speed), 2 bad input, 3 a target was missed, 130
stopped by Ctrl-C (what was measured until then is shown and written).
"""


def register(app: typer.Typer) -> None:
    app.command("bench", cls=GroupedCommand, epilog=EPILOG, short_help="Time attention on this machine.")(
        flattened(bench)
    )


def bench(
    cases: CaseOptions, contenders: ContenderOptions, measuring: BenchMeasuringOptions, output: BenchOutputOptions
) -> None:
    """Time attention on this machine: Saccade, PyTorch's kernels, and how near they come to what the chip can do.

    Contenders take turns in one process, after each one's result was checked. Ratios are medians over the rounds.
    """
    run(cases, contenders, measuring, output)


def run(
    cases: CaseOptions,
    contenders: ContenderOptions,
    measuring: BenchMeasuringOptions,
    output: BenchOutputOptions,
    setup: Setup | None = None,
) -> None:
    """Measure, show, write, and exit with what came of it."""
    from ..benchmark.attention import BenchmarkReport

    files = checked_files(output)
    try:
        report = (
            read_results(output.read, BenchmarkReport.from_json)
            if output.read
            else _measured(cases, contenders, measuring, output, setup or Setup(), files)
        )
    except _BenchmarkStopped as stopped:
        _show(stopped.report, output, files)
        raise typer.Exit(130) from None
    _show(report, output, files)
    if any(row.status == "wrong" for row in report.rows):
        raise typer.Exit(1)
    if any(not outcome.met for outcome in report.outcomes):
        raise typer.Exit(3)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is fixed for `saccade bench`, and not for `benchmarks/attention.py`.

    Attributes:
        program: the command whose arguments these are, for reports.
        clock: "wall", or "cpu" for one thread's own time.
        targets: by the size of the last-level cache, how many groups are measured in place of the cases, and how.
    """

    program: str = "saccade"
    clock: str = "wall"
    targets: Callable[[int], tuple[int, Measuring]] | None = None


class _BenchmarkStopped(Exception):
    def __init__(self, report: BenchmarkReport):
        self.report = report


def _measured(
    cases: CaseOptions,
    contenders: ContenderOptions,
    measuring: BenchMeasuringOptions,
    output: BenchOutputOptions,
    setup: Setup,
    files: dict[str, Path],
) -> BenchmarkReport:
    from ..benchmark.attention import BenchmarkReport
    from ..benchmark.attention.machine import describe, last_level_cache
    from ..benchmark.attention.measuring import sweep

    settings = settings_of(measuring, memory=output.plot is not None, clock=setup.clock)
    cache = last_level_cache() or 32 * 2**20
    who = contenders_of(contenders, quick=measuring.quick)
    if setup.targets is not None:
        groups, measure = setup.targets(cache)
    else:
        swept = cases_of(cases, cache, quick=measuring.quick)
        groups, measure = len(swept), functools.partial(sweep, swept, who)
    machine = describe(__version__, settings.threads)
    report = BenchmarkReport(
        machine,
        {
            "command": shlex.join([*setup.program.split(), *sys.argv[1:]]),
            "clock": settings.clock,
            **vars(settings.budget),
        },
    )
    with piece_bar("checking and timing", groups) as advance:

        def told(group: MeasurementGroup) -> None:
            advance(group.title)
            write_files(files, json=report.as_json)

        try:
            measure(report, settings, told)
        except KeyboardInterrupt:
            raise _BenchmarkStopped(report) from None
    return report


def _show(report: BenchmarkReport, output: BenchOutputOptions, files: dict[str, Path]) -> None:
    from ..benchmark.attention import figure, tables

    write_files(files, json=report.as_json)
    typer.echo(report.as_json() if output.as_json == "-" else "\n".join(tables.text(report)), nl=output.as_json != "-")
    command = report.settings.get("command", "saccade bench")
    write_files(files, markdown=lambda: tables.page(report, "Speed and memory of attention", command))
    write_plot(files, functools.partial(figure.draw, report))
