"""`saccade train`: train a model, or find the learning rate to train it with."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import typer

from ._errors import require
from ._options import GroupedCommand, flattened
from ._task_options import (
    ClassOptions,
    Data,
    TaskEvaluationOptions,
    TaskFileOptions,
    TaskLearningOptions,
    TextModelOptions,
    given,
)
from ._train_options import (
    EvaluationOptions,
    FileOptions,
    LearningOptions,
    MachineOptions,
    ModelOptions,
    Text,
    TextOptions,
    settings_of,
)
from ._train_rate import learning_rate
from ._training_run import EPILOG, ending

if TYPE_CHECKING:
    from pathlib import Path

    from ..models import LanguageModel
    from ..training import LanguageRun


def register(app: typer.Typer) -> None:
    train = typer.Typer(no_args_is_help=True, help="Train a model of your own.")
    train.command("lm", cls=GroupedCommand, epilog=EPILOG)(flattened(language_model))
    train.command("classify", cls=GroupedCommand, epilog=EPILOG, short_help="Tell classes of texts apart.")(
        flattened(classify)
    )
    train.command("rate", cls=GroupedCommand, short_help="Find a learning rate to train with.")(
        flattened(learning_rate)
    )
    app.add_typer(train, name="train")


def language_model(
    text: Text,
    files: FileOptions,
    data: TextOptions,
    shape: ModelOptions,
    learning: LearningOptions,
    machine: MachineOptions,
    keeping: EvaluationOptions,
) -> None:
    """Train a language model on TEXT, and measure what its heads do.

    Keeps the best weights while it runs; Ctrl-C keeps all there is. Give the same command with --resume to go on.
    """
    require("accelerate", "train")
    from ..training import LanguageRun, train_language_model
    from ..training.processes import is_main_process
    from ..training.progress import ConsoleReporter

    run = LanguageRun(
        text,
        files.out,
        settings_of(data, learning, machine, keeping),
        shape.fields,
        hold_out=tuple(data.hold_out or ()),
        vocabulary=data.pieces,
        overwrite=files.overwrite,
        initial=files.initial,
        resume=files.resume,
    )
    with ending(run.out), ConsoleReporter(run, quiet=not is_main_process()) as reporter:
        lm = train_language_model(run, reporter, then=lambda lm: _measure_heads(lm, run))
    if is_main_process():
        typer.echo(f"{run.out}: model written. Next:")
        typer.echo(f'  saccade generate --model {run.out} "Once upon a time"')
        if lm.model.config.mechanism is None:
            typer.echo(f'  saccade look --model {run.out} "Once upon a time there was a time"')


def classify(
    data: Data,
    files: TaskFileOptions,
    classes: ClassOptions,
    model: TextModelOptions,
    learning: TaskLearningOptions,
    machine: MachineOptions,
    keeping: TaskEvaluationOptions,
) -> None:
    """Train a classifier of texts on DATA: an encoder of its own, or from a checkpoint.

    Keeps the best weights while it runs; Ctrl-C keeps all there is. Give the same command with --resume to go on.
    """
    _train_task("classify", data, files, given(classes, model, learning, machine, keeping))


def _train_task(task: str, data: Path, files: TaskFileOptions, options: dict[str, Any]) -> None:
    require("accelerate", "tasks")
    require("sklearn", "tasks")
    began = time.perf_counter()
    from ..tasks._training import request, train_requested
    from ..training.processes import is_main_process
    from ..training.progress import ConsoleReporter

    run = request(
        task,
        data,
        files.out,
        {**options, "share": files.share},
        validation=files.validation,
        initial=files.initial,
        overwrite=files.overwrite,
        resume=files.resume,
    )
    with ending(run.out), ConsoleReporter(run, quiet=not is_main_process()) as reporter:
        train_requested(run, reporter, began)
    if is_main_process():
        typer.echo(f"{run.out}: model written. Next:")
        typer.echo(f"  saccade test {run.out} DATA")
        typer.echo(f"  saccade predict {run.out} INPUT")


def _measure_heads(lm: LanguageModel, run: LanguageRun) -> None:
    """Find out what each head does, on validation text, and keep it beside the weights; a mechanism has no weights."""
    if lm.model.config.mechanism is not None:
        return
    from ..inspection import measure_roles
    from ..models.own.checkpoint import HEADS, write_text
    from ..training.prepared_language import texts

    heads = measure_roles(lm, "\n".join(texts(run)[1]))
    write_text(run.out / HEADS, json.dumps(heads, indent=1) + "\n")
