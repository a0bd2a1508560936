"""`saccade compare --task`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ._compare_options import ComparedOptions, CompareMeasuringOptions, CompareOutputOptions, TaskOptions, refuse_beside
from ._outputs import checked_files, listed, write_files, write_plot

if TYPE_CHECKING:
    from ...benchmark.tasks import FinishedRun, ModelShape, SyntheticTask, TrainingCase


def compare_tasks(
    tasks: TaskOptions,
    chosen: ComparedOptions,
    measuring: CompareMeasuringOptions,
    output: CompareOutputOptions,
    shape: ModelShape | None = None,
) -> None:
    """Train a small model with each mechanism on the given tasks, and show which it solves.

    `shape` is the size of the model; None uses the default.
    """
    kept = replace(measuring, threads=None, seed=0, quick=False)  # the remaining options have no effect here
    refuse_beside("tasks are of one length, and trained, not timed", replace(chosen, mechanism=None, layers=True), kept)
    files = checked_files(output, output.markdown)
    wanted = _tasks(tasks.task or [])
    if output.read is not None:
        _show(_read(output.read, wanted, chosen.mechanism), output, files)
        return
    session = _TaskSession(_cases(tasks, chosen, measuring, wanted, shape), tasks.records)
    try:
        session.run(1 if measuring.threads is None else measuring.threads)
    except KeyboardInterrupt:
        if session.rows:
            _show(session.rows, output, files)
        raise typer.Exit(130) from None
    _show(session.rows, output, files)


@dataclass
class _TaskSession:
    """The requested runs, and the results of those finished."""

    cases: list[TrainingCase]
    records: Path | None
    rows: list[FinishedRun] = field(default_factory=list)

    def run(self, threads: int) -> None:
        """Run everything without a record; results are saved even if the run is interrupted."""
        from ...benchmark.tasks import go_through, load, missing
        from ...support._terminal._console import progress_bar

        known = [] if self.records is None else load(self.records)
        wanted = [case.described() for case in self.cases]
        self.rows = [row for row in known if row.case in wanted]
        left = missing(self.cases, self.rows)
        steps, known_rows = self.cases[0].budget.steps, len(self.rows)
        with progress_bar() as update:
            update(total=len(left))

            def started(case: TrainingCase) -> Callable[[int, float], object]:
                done = len(self.rows) - known_rows
                update(description=f"{case.task.name}: {case.name}, seed {case.seed}")
                return lambda step, accuracy: update(completed=done + step / steps)

            def ended(row: FinishedRun) -> None:
                self._keep(row)
                update(completed=len(self.rows) - known_rows)

            go_through(left, started, ended, threads)

    def _keep(self, row: FinishedRun) -> None:
        from ...benchmark.tasks import append

        self.rows.append(row)
        if self.records is not None:
            append(self.records, row)


def _tasks(names: Sequence[str]) -> list[SyntheticTask]:
    from ...benchmark.tasks import TASKS

    known = {kind.name: kind for kind in TASKS}
    asked = [name for text in names for name in listed(text, "task", str)]
    for name in asked:
        if name not in (*known, "all"):
            raise ValueError(f"task: expected {', '.join(known)} or all; got {name!r}")
    return [known[name]() for name in known if name in asked or "all" in asked]


def _cases(
    tasks: TaskOptions,
    chosen: ComparedOptions,
    measuring: CompareMeasuringOptions,
    wanted: list[SyntheticTask],
    shape: ModelShape | None,
) -> list[TrainingCase]:
    from ...benchmark.tasks import ModelShape, TrainingBudget, cases
    from ...benchmark.tasks.catalogue import NETWORKS

    budget = TrainingBudget(steps=60) if measuring.quick else TrainingBudget()
    if tasks.steps is not None:
        budget = replace(budget, steps=tasks.steps)
    if tasks.rates is not None:
        budget = replace(budget, rates=tuple(listed(tasks.rates, "rates", float)))
    names = None if not chosen.mechanism else list(dict.fromkeys(["exact", *chosen.mechanism]))
    chosen_cases = cases(wanted, names, tasks.seeds, shape or ModelShape(), budget)
    chosen_cases = [case for case in chosen_cases if chosen.layers or case.name not in NETWORKS]
    return [replace(case, seed=case.seed + measuring.seed) for case in chosen_cases]


def _read(path: Path, wanted: list[SyntheticTask], names: list[str] | None) -> list[FinishedRun]:
    from ...benchmark.tasks import load

    titles = [task.name for task in wanted]
    rows = [row for row in load(path) if row.task in titles and (not names or row.mechanism in ("exact", *names))]
    if not rows:
        raise ValueError(f"read: {path} has no run of {', '.join(titles)}")
    return rows


def _show(rows: list[FinishedRun], output: CompareOutputOptions, files: dict[str, Path]) -> None:
    from ...benchmark.tasks import as_dict, figure, refused_contenders, tables

    as_json = json.dumps({"tasks": 1, "runs": [as_dict(row) for row in rows]}, indent=1) + "\n"
    lines = tables.page(rows, refused_contenders())
    if output.as_json == "-":
        typer.echo(as_json, nl=False)
    else:
        typer.echo("\n".join(lines))
    write_files(files, json=lambda: as_json, markdown=lambda: "\n".join([*tables.head(rows), *lines, ""]))
    task = "recall" if any(row.task == "recall" for row in rows) else rows[0].task
    write_plot(files, functools.partial(figure.draw, rows, task))
