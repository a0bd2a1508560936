"""`saccade distill`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._errors import UserError
from ._options import GroupedCommand, flattened, option
from ._run_options import Changes, changes_of
from ._task_commands import TaskCommand
from ._task_options import NewRunOptions, TaskEvaluationOptions, TaskLearningOptions, given, with_recipe
from ._train_options import MachineOptions
from ._training_run import EPILOG
from .train import train_runs

if TYPE_CHECKING:
    from ..tasks._runs._request import TaskRun

# Which task it is, only the teacher's folder says.
_USUAL = "as the task has"
_RECIPE = TaskCommand("", "", "", (), epochs=_USUAL, rate=_USUAL, batch=_USUAL, patience=_USUAL)


@dataclasses.dataclass(frozen=True)
class TeachingOptions:
    """Teaching"""

    weight: float = option(0.5, "Of the teacher's outputs, from 0 to 1; the truth has the rest.")
    temperature: float = option(2.0, "By which logits of both are divided: the higher, the more small ones count.")
    hidden: float = option(0.0, "Weight of the distance of last hidden states, which is added.")
    relations: float = option(0.0, "Weight of the distance of last layers' attention and values, which is added.")
    unlabelled: Path | None = option(
        None,
        "Learn from these inputs, too; the teacher says their classes.  [default: from DATA alone]",
        metavar="FILE",
    )


def register(app: typer.Typer) -> None:
    for name, group in (("learning", TaskLearningOptions), ("looking", TaskEvaluationOptions)):
        distill.__annotations__[name] = with_recipe(group, _RECIPE)
    short = "Train a small model to say what a large one says."
    app.command("distill", cls=GroupedCommand, epilog=EPILOG, short_help=short)(flattened(distill))


def distill(
    *,
    teacher: Annotated[Path, typer.Argument(metavar="TEACHER", help="A run's folder.", show_default=False)],
    student: Annotated[
        str,
        typer.Argument(
            metavar="STUDENT",
            help="What differs from the teacher's configuration, as layers=2,width=128; a config.json; or a run, a "
            "published model's folder or a name on the hub to start from.",
            show_default=False,
        ),
    ],
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Data with truth, as the teacher learned from.", show_default=False)
    ],
    files: NewRunOptions,
    teaching: TeachingOptions,
    learning: TaskLearningOptions,
    machine: MachineOptions,
    looking: TaskEvaluationOptions,
    changes: Changes = None,
) -> None:
    """Train a smaller model to say what the model of TEACHER says; the run is one of the teacher's task.

    With fewer layers and nothing else changed STUDENT begins with blocks of its teacher, else with random weights.
    """
    options, of_task = given(teaching, learning, machine, looking), changes_of(changes)
    for name in {*options, *vars(files)} & of_task.keys():
        raise UserError(f"--set {name}: is no option of a task; give --{name.replace('_', '-')}")
    options |= of_task
    unlabelled = options.pop("unlabelled")

    def ask(files: NewRunOptions, options: dict[str, Any]) -> TaskRun:
        from ..tasks._smaller._distill import distill_request

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
