"""`saccade distill`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._errors import UserError
from ._options import flattened, option
from ._parts._existing import existing, existing_data
from ._parts._run_options import EPILOG, Changes, RunCommand, changes_of
from ._task_options import NewRunOptions, TaskEvaluationOptions, TaskLearningOptions, given, with_recipe
from ._train_options import MachineOptions
from .train import train_runs

if TYPE_CHECKING:
    from ..make.tasks._runs._request import TaskRun

# The task is known only from the teacher's folder.
_RECIPE = {**dict.fromkeys(("epochs", "rate", "batch", "patience"), "as the task has"), "every": "an epoch"}


@dataclasses.dataclass(frozen=True)
class TeachingOptions:
    """Teaching"""

    weight: float = option(0.5, "Weight of the teacher's outputs in the loss, from 0 to 1; the labels have the rest.")
    temperature: float = option(
        2.0, "Divide the logits of both models by this; the higher, the more small probabilities count."
    )
    hidden: float = option(0.0, "Weight of an extra loss: the distance between the last hidden states of both models.")
    relations: float = option(
        0.0, "Weight of an extra loss: the distance between attention and values in the last layers of both models."
    )
    unlabelled: Path | None = option(
        None,
        "Also train on these unlabelled inputs, with the teacher's predictions as labels.  [default: DATA only]",
        metavar="FILE",
        callback=existing("inputs in the format of DATA"),
    )


def register(app: typer.Typer) -> None:
    for name, group in (("learning", TaskLearningOptions), ("looking", TaskEvaluationOptions)):
        distill.__annotations__[name] = with_recipe(group, _RECIPE)
    short = "Train a small model to imitate a large one."
    app.command("distill", cls=RunCommand, epilog=EPILOG, short_help=short)(flattened(distill))


def distill(
    *,
    teacher: Annotated[
        Path,
        typer.Argument(
            metavar="TEACHER",
            help="The folder of the teacher's run.",
            show_default=False,
            callback=existing(kind="folder"),
        ),
    ],
    student: Annotated[
        str,
        typer.Argument(
            metavar="STUDENT",
            help="Changes to the teacher's configuration, such as layers=2,width=128; a config.json; or a run, a "
            "published model's folder or a name on the hub to start from.",
            show_default=False,
        ),
    ],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="Labelled data in the format that the teacher was trained on.",
            show_default=False,
            callback=existing_data(),
        ),
    ],
    files: NewRunOptions,
    teaching: TeachingOptions,
    learning: TaskLearningOptions,
    machine: MachineOptions,
    looking: TaskEvaluationOptions,
    changes: Changes = None,
) -> None:
    """Train a smaller model to imitate the model of TEACHER; the new run has the teacher's task.

    If STUDENT changes only the number of layers, it starts with blocks of its teacher, otherwise with random weights.
    """
    options, of_task = given(teaching, learning, machine, looking), changes_of(changes)
    for name in {*options, *vars(files)} & of_task.keys():
        raise UserError(f"--set {name}: is no option of a task; give --{name.replace('_', '-')}")
    options |= of_task
    unlabelled = options.pop("unlabelled")

    def ask(files: NewRunOptions, options: dict[str, Any]) -> TaskRun:
        from ..make.tasks._compression._distill import distill_request

        return distill_request(
            teacher,
            student,
            data,
            files.out,
            {**options, "share": files.share},
            validation=files.validation,
            unlabelled=unlabelled,
            overwrite=files.overwrite,
            resume=files.resume,
        )

    train_runs(ask, files, options)
