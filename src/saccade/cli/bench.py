"""`saccade bench`."""

from __future__ import annotations

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
    TargetOptions,
    cases_of,
    contenders_of,
    preset_of,
    settings_of,
)
from ._options import GroupedCommand, flattened
from ._outputs import checked_files, piece_bar, read_results, write_files, write_plot

if TYPE_CHECKING:
    from ..benchmark.attention import BenchmarkReport, MeasurementGroup, MeasurementSettings

    Told = Callable[[MeasurementGroup], None]
    Measuring = Callable[[BenchmarkReport, MeasurementSettings, Told], None]

EPILOG = """
Exit status: 0 measured, 1 a result was wrong (it is shown without a speed), 2 bad input, 3 a target was missed or not
measured, 4 a target's readings were too noisy to tell, 130 stopped by Ctrl-C (what was measured until then is shown and
written).
"""


def register(app: typer.Typer) -> None:
    app.command("bench", cls=GroupedCommand, epilog=EPILOG, short_help="Time attention on this machine.")(
        flattened(bench)
    )


def bench(
    cases: CaseOptions,
    contenders: ContenderOptions,
    measuring: BenchMeasuringOptions,
    targets: TargetOptions,
    output: BenchOutputOptions,
) -> None:
    """Time attention on this machine: Saccade, PyTorch's kernels, and how near they come to what the chip can do.

    Contenders take turns in one process, after each one's result was checked. Ratios are medians over the rounds.
    """
    from ..benchmark.attention import BenchmarkReport

    files = checked_files(output)
    try:
        report = (
            read_results(output.read, BenchmarkReport.from_json)
            if output.read
            else _measured(cases, contenders, measuring, targets, output, files)
        )
    except _BenchmarkStopped as stopped:
        _show(stopped.report, output, files)
        raise typer.Exit(130) from None
    _show(report, output, files)
    status = _status(report)
    if status:
        raise typer.Exit(status)


def _status(report: BenchmarkReport) -> int:
    verdicts = {outcome.verdict for outcome in report.outcomes}
    if any(row.status == "wrong" for row in report.rows):
        return 1
    return 3 if verdicts & {"missed", "not measured"} else 4 if "noisy" in verdicts else 0


class _BenchmarkStopped(Exception):
    def __init__(self, report: BenchmarkReport):
        self.report = report


def _measured(
    cases: CaseOptions,
    contenders: ContenderOptions,
    measuring: BenchMeasuringOptions,
    targets: TargetOptions,
    output: BenchOutputOptions,
    files: dict[str, Path],
) -> BenchmarkReport:
    from ..benchmark.attention import BenchmarkReport
    from ..benchmark.attention.machine import describe, keep_freed_memory, last_level_cache
    from ..benchmark.attention.measuring import sweep

    keep_freed_memory()
    settings = settings_of(measuring, memory=output.plot is not None, targets=targets.targets)
    cache = last_level_cache() or 32 * 2**20
    if targets.targets:
        groups, measure = _target_run(cases, contenders, targets, cache, quick=measuring.quick)
    elif targets.only or targets.resume:
        raise ValueError(f"{'only' if targets.only else 'resume'}: it is for --targets")
    else:
        swept = cases_of(cases, cache, quick=measuring.quick)
        who = contenders_of(contenders, quick=measuring.quick)
        groups, measure = len(swept), functools.partial(sweep, swept, who)
    command = shlex.join(["saccade", *sys.argv[1:]])
    report = BenchmarkReport(
        describe(__version__, settings.threads),
        {"command": command, "clock": settings.clock, **vars(settings.budget)},
    )
    if targets.resume and "json" in files and files["json"].exists():
        report.groups = _kept(read_results(files["json"], BenchmarkReport.from_json), report)
    with piece_bar("checking and timing", groups) as advance:

        def told(group: MeasurementGroup) -> None:
            advance(group.title)
            write_files(files, json=report.as_json)

        try:
            measure(report, settings, told)
        except KeyboardInterrupt:
            raise _BenchmarkStopped(report) from None
    return report


def _target_run(
    cases: CaseOptions, contenders: ContenderOptions, given: TargetOptions, cache: int, *, quick: bool
) -> tuple[int, Measuring]:
    from ..benchmark.attention.targets import hold_to, medians, targets

    if cases != CaseOptions():
        raise ValueError("targets: they have cases of their own, of which --only takes some")
    preset = preset_of(contenders, cache, quick=quick)
    every = targets(preset)
    words = [word for some in given.only or [] for word in some.split()]
    chosen = {target.title for target in every if all(word in target.title.split() for word in words)}
    if not chosen:
        raise ValueError(f"only: no target has the words {' '.join(words)}")
    return len(chosen), functools.partial(hold_to, every, medians(preset), chosen)


def _kept(earlier: BenchmarkReport, now: BenchmarkReport) -> list[MeasurementGroup]:
    """The groups of an earlier run. ValueError where they are of another machine or other versions."""
    for name in ("processor", "cores", "threads", "instruction_set", "saccade", "torch"):
        if earlier.machine[name] != now.machine[name]:
            raise ValueError(
                f"resume: the file's {name.replace('_', ' ')} is {earlier.machine[name]}, here {now.machine[name]}"
            )
    return earlier.groups


def _show(report: BenchmarkReport, output: BenchOutputOptions, files: dict[str, Path]) -> None:
    from ..benchmark.attention import figure, tables

    write_files(files, json=report.as_json)
    typer.echo(report.as_json() if output.as_json == "-" else "\n".join(tables.text(report)), nl=output.as_json != "-")
    command = report.settings.get("command", "saccade bench")
    write_files(files, markdown=lambda: tables.page(report, "Speed and memory of attention", command))
    write_plot(files, functools.partial(figure.draw, report))
