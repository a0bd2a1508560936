"""`saccade.tasks.train`."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from ....support._extras import NotInstalled
from ...models import Model
from ...training import EvaluationSettings, Execution, Reporter, Settings, run_training
from .._task import Task
from ._prepared import PreparedTaskRun
from ._registry import TASKS, task_with
from ._request import SHARE, TaskRun, read_data, task_run
from ._run_folder import read_task_file
from ._tuning import Tuning

_GROUPS = (Settings, Execution, EvaluationSettings)
SETTINGS = {"epochs", *(field.name for group in _GROUPS for field in dataclasses.fields(group))}
SETTINGS -= {"execution", "looks", "evaluate_windows"}
_OF_THE_DATA_AND_MODEL = ("share", "last", "lora")  # options that are neither the task's nor settings


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    r"""A run's folder, opened.

    Attributes:
        folder: its path.
        task: with its options and what it learned from the data.
        model: with the best weights, in evaluation mode.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = pathlib.Path(folder, "reviews.csv")
        ...     _ = data.write_text("text,label\n" + "a good film,positive\na bad film,negative\n" * 20)
        ...     small = dict(layers=1, heads=2, width=8, vocabulary=280, steps=2, precision="no")
        ...     run = saccade.tasks.train("classify", data, folder + "/run", **small)
        >>> run.folder.name, run.task.labels
        ('run', ('negative', 'positive'))
    """

    folder: Path
    task: Task
    model: Model = dataclasses.field(repr=False)


def train(
    task: str,
    data: str | Path,
    out: str | Path,
    *,
    validation: str | Path | None = None,
    initial: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    reporter: Reporter | None = None,
    **options: Any,
) -> TrainedRun:
    r"""Train a model for a task, and keep the best weights in a folder.

    Args:
        task: its name, such as "classify".
        data: a file or a folder, as the task reads it.
        out: the folder to write; an existing one raises an error unless `overwrite`.
        validation: data to validate on; None: a share of `data`, split off by the seed.
        initial: a run's folder, a published model's, or a name on the hub to start from; None: random weights.
        overwrite: replace the run in `out`.
        resume: continue the run in `out` where it stopped.
        reporter: gets the events of the run.
        options: of the task (`saccade.tasks.Classify`), of the settings (`saccade.training.Settings`, `Execution`,
            `EvaluationSettings`), `epochs`, `share`, how much of `data` is split off, and with `initial` the fields of
            `Tuning`: `last`, how many of the last blocks learn, and `lora`, the rank of what is learned. None takes the
            task's recipe (`Recipe`), also for `patience`.

    Raises:
        TypeError: an unknown option.
        FileNotFoundError, FileExistsError, ValueError: what is wrong with the input.
        Diverged, Stopped: as of `saccade.training.run_training`.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = pathlib.Path(folder, "reviews.csv")
        ...     _ = data.write_text("text,label\n" + "a good film,positive\na bad film,negative\n" * 20)
        ...     small = dict(layers=1, heads=2, width=8, vocabulary=280, steps=2, precision="no")
        ...     run = saccade.tasks.train("classify", data, folder + "/run", **small)
        >>> run.task.name, run.model.label_names
        ('classify', ['negative', 'positive'])
    """
    began = time.perf_counter()
    run = request(task, data, out, options, validation=validation, initial=initial, overwrite=overwrite, resume=resume)
    return train_requested(run, reporter, began)


def train_requested(run: TaskRun, reporter: Reporter | None, began: float) -> TrainedRun:
    """Run a request of `train`; `began` as in `run_training`."""
    return TrainedRun(run.out, run.task, run_training(run, PreparedTaskRun.of, reporter, began=began))


def request(
    task: str,
    data: str | Path,
    out: str | Path,
    options: Mapping[str, Any],
    *,
    validation: str | Path | None = None,
    initial: str | Path | None = None,
    **how: Any,
) -> TaskRun:
    """The request of `train`, with its data read; `how` as in `TaskRun`."""
    if task not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(map(repr, TASKS))}, got {task!r}")
    import_required(TASKS[task])
    kind, given = split_options(TASKS[task], options)
    share, last, lora = (options.get(name) for name in _OF_THE_DATA_AND_MODEL)
    source, training, judged = read_data(
        kind, data, validation, given.get("seed") or 0, SHARE if share is None else share
    )
    return task_run(
        source,
        training,
        judged,
        out,
        kind.scratch if initial is None else kind.tuning,
        given,
        initial=None if initial is None else str(initial),
        tuning=Tuning(last, lora),
        **how,
    )


def split_options(kind: type[Task], options: Mapping[str, Any]) -> tuple[Task, dict[str, Any]]:
    """The task with its own options, and the options of `settings_for`. TypeError for an unknown one."""
    own = {field.name for field in dataclasses.fields(kind)} - set(kind.learned)
    known = own | SETTINGS | {*_OF_THE_DATA_AND_MODEL}
    check_options(kind.name, options, known)
    given = {name: value for name, value in options.items() if value is not None}
    mine = {name: value for name, value in given.items() if name in own}
    others = {name: value for name, value in given.items() if name in SETTINGS}
    return task_with(kind.name, mine), others


def check_options(owner: str, options: Iterable[str], known: Set[str]) -> None:
    """TypeError for an option that the owner does not have."""
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(f"{unknown[0]}: no option of {owner}; it has {', '.join(sorted(known))}")


def open_run(run: TrainedRun | str | Path, options: Mapping[str, Any]) -> TrainedRun:
    """The run in a folder, with other options for reading data.

    FileNotFoundError or ValueError if there is no run of a task; TypeError for options that must not differ.
    """
    if isinstance(run, TrainedRun):
        return dataclasses.replace(run, task=run.task.changed(options))
    folder = Path(run)
    kind = read_task_file(folder).task.changed(options)
    return TrainedRun(folder, kind, kind.open_model(folder))


def import_required(kind: type[Task]) -> None:
    """Import the optional dependencies of a task, so that a missing one is found before any work.

    Raises:
        NotInstalled: it is not there; the message is the command that installs it.
    """
    for module in kind.requires:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            raise NotInstalled(kind.name, module.partition(".")[0], kind.extra) from None
