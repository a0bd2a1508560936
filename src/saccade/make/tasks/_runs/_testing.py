"""`saccade.tasks.test`: metrics of a run's model on new data, beside baselines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ....support._restored import seeded
from ....support._tables import Table
from ....support._whole_file import whole_file
from ...models import Model
from .._task import Baseline, Task, Tested
from ._request import split_again
from ._run_folder import TaskFile, read_task_file
from ._training import TrainedRun, import_required, open_run


@dataclasses.dataclass(frozen=True)
class TestReport:
    r"""The result of `test`; `str` is for reading, `as_dict` for programs.

    Attributes:
        run, data: the run that was tested, and the data.
        task: of the run.
        tested: the model with its outputs and the details of the task, such as a confusion matrix.
        metrics: of the model; the first is the one to compare by.
        baselines: the metrics of the task's simple models by their names.
        note: why there are no baselines, if so.
        protocol: what the model learned from, what its weights were chosen by, and how metrics are counted.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = pathlib.Path(folder, "reviews.csv")
        ...     _ = data.write_text("text,label\n" + "a good film,positive\na bad film,negative\n" * 20)
        ...     small = dict(layers=1, heads=2, width=8, vocabulary=280, steps=2, precision="no")
        ...     run = saccade.tasks.train("classify", data, folder + "/run", **small)
        ...     report = saccade.tasks.test(run, data)
        >>> list(report.metrics)
        ['accuracy', 'macro F1', 'calibration error']
        >>> report.better  # the baselines that beat a model of two steps
        ['TF-IDF with logistic regression (C = 0.1)']
    """

    run: Path
    data: Path
    task: Task = dataclasses.field(repr=False)
    tested: Tested = dataclasses.field(repr=False)
    metrics: dict[str, float]
    baselines: dict[str, dict[str, float]]
    note: str = ""
    protocol: str = ""

    __test__ = False  # no test of pytest's, whatever its name

    @property
    def better(self) -> list[str]:
        """The baselines that are better than the model, by the metric that the run was judged by."""
        mine = self.task.cost(self.metrics)
        return [name for name, metrics in self.baselines.items() if self.task.cost(metrics) < mine]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        return {
            "task": self.task.name,
            "run": str(self.run),
            "data": str(self.data),
            "examples": len(self.tested.data),
            "metrics": self.metrics,
            "baselines": self.baselines,
            "better_baselines": self.better,
            "note": self.note,
            "protocol": self.protocol,
            **self.tested.details,
        }

    def __str__(self) -> str:
        lines = [f"The baseline is better than this model: {name}." for name in self.better]
        lines.append(f"{self.run} on {self.data}: {len(self.tested.data):,} examples")
        rows = {"this model": self.metrics, **self.baselines}
        shown = {title: {name: f"{x:.4f}" for name, x in row.items()} for title, row in rows.items()}
        lines += Table.of_named(shown).lines()
        table = self.tested.table
        notes = [line for line in (self.protocol, self.note) if line]
        return "\n".join([*lines, *notes, *(["", table] if table else [])])

    def save_picture(self, path: str | Path) -> None:
        """Write the task's picture, .png or .svg, whole or not at all."""
        write_picture(Path(path), lambda kind: self.task.picture(self.tested, kind))


def write_picture(path: Path, draw: Callable[[str], bytes]) -> None:
    """Write the picture that `draw` makes, as "png" or "svg" by the ending of a name, whole or not at all."""
    kind = path.suffix[1:].lower()
    if kind not in ("png", "svg"):
        raise ValueError(f"path: pictures are written to a name that ends in .png or .svg, got {path}")
    with whole_file(path) as temporary:
        temporary.write_bytes(draw(kind))


def test(run: TrainedRun | str | Path, data: str | Path, *, baseline: bool = True, **options: Any) -> TestReport:
    r"""Test a run's model on data it was not trained on, together with the task's baselines.

    Baselines learn from the examples that the run was trained on, read again from their files; nothing of `data` is
    used to choose anything.

    Args:
        run: of `train`, or its folder.
        data: a file or a folder, as the task reads it.
        baseline: whether to train them.
        options: of the task, where the data differ from those of training: other columns.

    Raises:
        FileNotFoundError, ValueError: no run of a task, data that cannot be read, labels that training had not.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = pathlib.Path(folder, "reviews.csv")
        ...     _ = data.write_text("text,label\n" + "a good film,positive\na bad film,negative\n" * 20)
        ...     small = dict(layers=1, heads=2, width=8, vocabulary=280, steps=2, precision="no")
        ...     run = saccade.tasks.train("classify", data, folder + "/run", **small)
        ...     report = saccade.tasks.test(run, data, baseline=False)  # any labelled file
        >>> sorted(report.as_dict()["metrics"])
        ['accuracy', 'calibration error', 'macro F1']
    """
    opened = open_run(run, options)
    task, path = opened.task, Path(data)
    import_required(type(task))
    examples = task.tested(task.read(path))
    outputs = task.predict(opened.model, examples)
    source = read_task_file(opened.folder)
    baselines, note = _baselines(opened.model, source, examples) if baseline else ([], "")
    details = task.details(outputs, examples)
    tested = Tested(opened.model, examples, outputs, details.values, baselines, details.table)
    simple = {model.name: task.scores(model.outputs, examples) for model in baselines}
    metrics = task.scores(outputs, examples)
    return TestReport(opened.folder, path, task, tested, metrics, simple, note, _protocol(source, task))


test.__test__ = False  # type: ignore[attr-defined]  # as above


def _protocol(source: TaskFile, task: Task) -> str:
    if not source.digests:
        return ""
    judged = source.validation or task.validated_by(source.share, source.seed)
    counted = f"; {task.protocol}" if task.protocol else ""
    return f"protocol: trained on {source.data}, weights selected on {judged}{counted}"


def _baselines(model: Model, source: TaskFile, tested: Sequence[Any]) -> tuple[list[Baseline], str]:
    """The task's baselines, or the reason why there are none."""
    if not source.digests:
        return [], "no baseline: the run's folder does not say what it was trained on"
    changed = source.changed()
    if changed is not None:
        return [], f"no baseline: {changed}"
    learned = split_again(source)
    try:
        with seeded(source.seed):
            return source.task.baselines(model, *learned, tested), ""
    except ValueError as error:  # the model's figures do not hang on what a simple model can learn from
        return [], f"no baseline: {' '.join(str(error).split())}"
