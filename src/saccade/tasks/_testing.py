"""`saccade.tasks.test`: a run's model on data it has not seen, beside the simple baseline of its task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._whole_file import whole_file
from ._request import split_again
from ._run_folder import TaskFile, digest, read_task_file
from ._task import Task
from ._training import TrainedRun, open_run


@dataclasses.dataclass(frozen=True)
class TestReport:
    """What a test found; `str` is for reading, `as_dict` for programs.

    Attributes:
        run, data, count: what was tested on how many examples of what.
        task: of the run.
        metrics: of the model; the first is the one to compare by.
        baseline, baseline_metrics: of the simple model; None where it could not be trained.
        note: why it could not.
        details: what the task has beside them, such as a confusion matrix.
    """

    run: Path
    data: Path
    count: int
    task: Task = dataclasses.field(repr=False)
    metrics: dict[str, float]
    baseline: str | None
    baseline_metrics: dict[str, float] | None
    note: str
    details: dict[str, Any] = dataclasses.field(repr=False)

    __test__ = False  # no test of pytest's, whatever its name

    @property
    def baseline_wins(self) -> bool:
        """Whether the baseline is better by the first metric."""
        if self.baseline_metrics is None:
            return False
        return self.task.cost(self.baseline_metrics) < self.task.cost(self.metrics)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        simple = None if self.baseline is None else {"name": self.baseline, "metrics": self.baseline_metrics}
        return {
            "task": self.task.name,
            "run": str(self.run),
            "data": str(self.data),
            "examples": self.count,
            "metrics": self.metrics,
            "baseline": simple,
            "baseline_wins": self.baseline_wins,
            "note": self.note,
            **self.details,
        }

    def __str__(self) -> str:
        lines = []
        if self.baseline_wins:
            lines.append(f"The baseline is better than this model: {self.baseline}.")
        lines.append(f"{self.run} on {self.data}: {self.count:,} examples")
        names = list(self.metrics)
        rows = {"this model": self.metrics}
        if self.baseline is not None and self.baseline_metrics is not None:
            rows[self.baseline] = self.baseline_metrics
        wide = max(map(len, rows))
        lines.append(" " * wide + "".join(f"  {name:>{max(len(name), 6)}}" for name in names))
        for title, row in rows.items():
            lines.append(f"{title:<{wide}}" + "".join(f"  {row[name]:>{max(len(name), 6)}.4f}" for name in names))
        table = self.task.table(self.details)
        return "\n".join([*lines, *([self.note] if self.note else []), *(["", table] if table else [])])

    def save_picture(self, path: str | Path) -> None:
        """Write the task's picture, .png or .svg, whole or not at all."""
        path = Path(path)
        with whole_file(path) as temporary:
            self.task.picture(self.details).savefig(temporary, format=path.suffix[1:].lower(), dpi=144)


def test(run: TrainedRun | str | Path, data: str | Path, *, baseline: bool = True, **options: Any) -> TestReport:
    """Judge a run's model by data it was not trained on, and the task's baseline beside it.

    The baseline learns from the examples that the run was trained on, read again from where they were; nothing of
    `data` is used to choose anything.

    Args:
        run: of `train`, or its folder.
        data: a file or a folder, as the task reads it.
        baseline: whether to train it.
        options: of the task, where the data differ from those of training: other columns.

    Raises:
        FileNotFoundError, ValueError: no run of a task, data that cannot be read, labels that training had not.
    """
    opened = open_run(run, options)
    task, path = opened.task, Path(data)
    examples = task.read(path)
    outputs = task.predict(opened.model, examples)
    name, simple, note = _baseline(read_task_file(opened.folder), examples) if baseline else (None, None, "")
    return TestReport(
        opened.folder,
        path,
        len(examples),
        task,
        task.scores(outputs, examples),
        name,
        None if simple is None else task.scores(simple, examples),
        note,
        task.details(outputs, examples),
    )


test.__test__ = False  # type: ignore[attr-defined]  # as above


def _baseline(source: TaskFile, tested: Sequence[Any]) -> tuple[str | None, Sequence[Any] | None, str]:
    """Its name and its outputs, or why there are none."""
    for path, known in source.digests.items():
        if not Path(path).exists():
            return None, None, f"no baseline: {path}, which the run was trained on, is not there any more"
        if digest(Path(path)) != known:
            return None, None, f"no baseline: {path} is not what the run was trained on any more"
    training, validation = split_again(source)
    found = source.task.baseline(training, validation, tested)
    return found.name, found.outputs, ""
