"""`saccade train`: train a model, or find the learning rate to train it with."""

from __future__ import annotations

import dataclasses
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ..make._task_options import BaseTaskOptions
from ..make._task_registry import TASK_OPTIONS
from ._errors import UserError, require
from ._options import Group, GroupedCommand, flattened, from_command_line
from ._parts._existing import existing_data
from ._parts._run_options import EPILOG, ending
from ._parts._search import train_search
from ._parts._train_rate import learning_rate
from ._task_options import (
    NewRunOptions,
    SearchOptions,
    TaskEvaluationOptions,
    TaskFileOptions,
    TaskLearningOptions,
    TuningOptions,
    given,
    recipe_words,
    with_recipe,
)
from ._train_options import (
    EvaluationOptions,
    FileOptions,
    LanguageMachineOptions,
    LearningOptions,
    MachineOptions,
    ModelOptions,
    Text,
    TextInputOptions,
    settings_of,
    sizes_of,
)

if TYPE_CHECKING:
    from ..make.models import LanguageModel
    from ..make.tasks._runs._request import TaskRun
    from ..make.training import Evaluation, LanguageRun

F = TypeVar("F", bound=NewRunOptions | FileOptions)

Ask = Callable[[F, dict[str, Any]], "TaskRun"]
KEPT = (
    """The best weights are saved during training, also at Ctrl-C. The same command with --resume continues the run."""
)


def register(app: typer.Typer) -> None:
    train = typer.Typer(cls=Group, no_args_is_help=True, help="Train a model of your own.")
    train.command("lm", cls=GroupedCommand, epilog=EPILOG)(flattened(language_model))
    for task, options in TASK_OPTIONS.items():
        train.command(task, cls=GroupedCommand, epilog=EPILOG, short_help=_help(options)[0])(
            flattened(_task_command(options))
        )
    train.command("rate", cls=GroupedCommand, short_help="Find a learning rate to train with.")(
        flattened(learning_rate)
    )
    app.add_typer(train, name="train")


def language_model(
    call: typer.Context,
    text: Text,
    files: FileOptions,
    data: TextInputOptions,
    shape: ModelOptions,
    learning: LearningOptions,
    machine: LanguageMachineOptions,
    keeping: EvaluationOptions,
) -> None:
    """Train a language model on TEXT, and measure what its heads do.

    The best weights are saved during training, also at Ctrl-C. The same command with --resume continues the run.
    """
    require("accelerate", "train")
    from ..make.training import LanguageRun, train_language_model
    from ..make.training.processes import is_main_process
    from ..make.training.progress import ConsoleReporter

    sizes = shape.fields
    if files.initial is not None:
        sizes |= sizes_of(files.initial, set(sizes) - from_command_line(call))

    def one(files: FileOptions, changes: dict[str, Any]) -> Evaluation | None:
        run = LanguageRun(
            text,
            files.out,
            settings_of(data, dataclasses.replace(learning, **changes), machine, keeping),
            sizes,
            hold_out=tuple(data.hold_out or ()),
            vocabulary=data.pieces,
            overwrite=files.overwrite,
            initial=files.initial,
            resume=files.resume,
        )
        with ending(run.out), ConsoleReporter(run, quiet=not is_main_process()) as reporter:
            train_language_model(run, reporter, then=lambda lm: _measure_heads(lm, run))
        return reporter.stored

    runs = _train_seeds(one, files, vars(learning))
    if is_main_process():
        typer.echo(f"{_written(files.out, runs)} Next:")
        typer.echo(f'  saccade generate --model {runs[0]} "Once upon a time"')
        if shape.mechanism is None:
            typer.echo(f'  saccade look --model {runs[0]} "Once upon a time there was a time"')


def _task_command(task: type[BaseTaskOptions]) -> Callable[..., None]:
    """A function for `flattened`: its parameters are DATA and groups of options."""
    recipe, (_, description, data_formats) = recipe_words(task), _help(task)
    learning, looking = (with_recipe(group, recipe) for group in (TaskLearningOptions, TaskEvaluationOptions))
    groups = (TaskFileOptions, task, learning, TuningOptions, SearchOptions, MachineOptions, looking)

    def run(context: typer.Context, data: Path, **options: Any) -> None:
        files = options.pop(TaskFileOptions.__name__)
        _train_task(task.name, data, files, given(*options.values()), from_command_line(context))

    argument = typer.Argument(metavar="DATA", help=data_formats, show_default=False, callback=existing_data())
    own = {"context": typer.Context, "data": Annotated[Path, argument]}
    run.__annotations__ = {**own, **{group.__name__: group for group in groups}}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in run.__annotations__]
    )
    run.__doc__ = f"{description}\n\n{KEPT}"
    return run


def _help(task: type[BaseTaskOptions]) -> list[str]:
    """The paragraphs of a task's help: for the list of tasks, what the command does, what DATA may be."""
    return [" ".join(paragraph.split()) for paragraph in inspect.cleandoc(task.__doc__ or "").split("\n\n")]


def _train_task(
    task: str, data: Path, files: TaskFileOptions, options: dict[str, Any], given_options: set[str]
) -> None:
    """Train the model of a task. `given_options`: the names of the options on the command line."""
    trials = options.pop("search")
    if trials is not None:
        if options.pop("seeds") is not None:
            raise UserError("--search and --seeds: give one of them; search first, then train with the best settings")
        require("accelerate", "tasks")
        train_search(task, data, files, {name: options[name] for name in options if name in given_options}, trials)
        _told_what_next(files.out, [files.out])
        return

    def ask(files: TaskFileOptions, options: dict[str, Any]) -> TaskRun:
        from ..make.tasks._runs._training import request

        return request(
            task,
            data,
            files.out,
            {**options, "share": files.share},
            validation=files.validation,
            initial=files.initial,
            overwrite=files.overwrite,
            resume=files.resume,
        )

    train_runs(ask, files, options)


def train_runs(ask: Ask[F], files: F, options: dict[str, Any]) -> None:
    """Train the requests of `ask` for files and options, once or with several seeds, and print the next commands."""
    require("accelerate", "tasks")
    settings = {name: value for name, value in options.items() if name != "seeds"}
    runs = _train_seeds(lambda files, changes: _train_run(ask, files, {**settings, **changes}), files, options)
    _told_what_next(files.out, runs)


def _told_what_next(out: Path, runs: Sequence[Path]) -> None:
    from ..make.training.processes import is_main_process

    if is_main_process():
        typer.echo(f"{_written(out, runs)} Next:")
        typer.echo(f"  saccade test {out} DATA")
        typer.echo(f"  saccade predict {runs[0]} INPUT")
        if _explains(runs[0]):
            typer.echo(f"  saccade predict {runs[0]} INPUT --picture why.png")


def _explains(run: Path) -> bool:
    """Whether the task of a run has a picture of predictions."""
    from ..make.tasks import Task
    from ..make.tasks._runs._registry import TASKS
    from ..make.training.run_folder.layout import task_of

    kind = TASKS.get(task_of(run) or "")
    return kind is not None and kind.predicted_picture is not Task.predicted_picture


def _written(out: Path, runs: Sequence[Path]) -> str:
    written = "model" if runs == [out] else f"models of {', '.join(run.name for run in runs)}"
    return f"{out}: {written} written."


def _train_seeds(
    train: Callable[[F, dict[str, Any]], Evaluation | None], files: F, options: Mapping[str, Any]
) -> list[Path]:
    """Train once, or with each of several seeds, one after another; minutes are those of all together.

    Args:
        train: with other files and other settings (the seed, the minutes); how good the best weights are, in the main
            process.

    Returns:
        The folders of all runs, by seed.
    """
    seeds = options["seeds"]
    if seeds is None:
        train(files, {})
        return [files.out]
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: must be at least 1")
    from ..make.tasks._runs._seeds import check_for_seeds, seed_folder, spread

    numbers = range(options["seed"], options["seed"] + seeds)
    check_for_seeds(files.out, numbers)

    metrics, minutes = [], options["minutes"]
    for seed in numbers:
        out = seed_folder(files.out, seed)
        mine = dataclasses.replace(files, out=out, resume=files.resume and out.is_dir())
        stored = train(mine, {"seed": seed, "minutes": None if minutes is None else minutes / seeds})
        metrics += [] if stored is None else [stored.metrics or {"nats per token": stored.loss}]
    if metrics:
        summary = ", ".join(
            f"{name} {mean:.4f} ± {deviation:.4f}" for name, (mean, deviation) in spread(metrics).items()
        )
        typer.echo(f"{seeds} seeds, validation data, mean and standard deviation: {summary}")
    return [seed_folder(files.out, seed) for seed in numbers]


def _train_run(ask: Ask[F], files: F, options: dict[str, Any]) -> Evaluation | None:
    """Train one run; its best evaluation in the main process, else None."""
    began = time.perf_counter()
    from ..make.tasks._runs._training import train_requested
    from ..make.training.processes import is_main_process
    from ..make.training.progress import ConsoleReporter

    run = ask(files, options)
    with ending(run.out), ConsoleReporter(run, quiet=not is_main_process()) as reporter:
        train_requested(run, reporter, began)
    return reporter.stored


def _measure_heads(lm: LanguageModel, run: LanguageRun) -> None:
    """Measure the role of each head on validation text and store it, unless the model has no attention weights."""
    if lm.model.config.mechanism is not None:
        return
    from ..make.models.decoder_lm.checkpoint import HEADS, write_text
    from ..make.training.language.prepared import texts
    from ..see.inspection import measure_roles

    heads = measure_roles(lm, "\n".join(texts(run)[1]))
    write_text(run.out / HEADS, json.dumps(heads, indent=1) + "\n")
