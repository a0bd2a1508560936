"""`saccade train`: train a model, or find the learning rate to train it with."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import typer

from ._errors import require
from ._options import GroupedCommand, flattened
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

if TYPE_CHECKING:
    from ..models import LanguageModel
    from ..training import LanguageRun

EPILOG = """
Exit status: 0 trained (early stopping included), 2 bad input, a full disk at the end, or a loss that is not finite
(anomaly.txt in --out says where), 130 stopped by Ctrl-C, 143 by SIGTERM; the last two leave a checkpoint of the last
step, and --resume goes on from there.
"""


def register(app: typer.Typer) -> None:
    train = typer.Typer(no_args_is_help=True, help="Train a model of your own.")
    train.command("lm", cls=GroupedCommand, epilog=EPILOG)(flattened(language_model))
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
    from ..training import LanguageRun, Stopped, train_language_model
    from ..training.processes import OtherProcessFailed, is_main_process
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
    try:
        with ConsoleReporter(run, quiet=not is_main_process()) as reporter:
            lm = train_language_model(run, reporter, then=lambda lm: _measure_heads(lm, run))
    except OtherProcessFailed:
        raise typer.Exit(2) from None
    except Stopped as stopped:
        if is_main_process():
            typer.echo(f"saccade: stopped; {run.out} keeps the best weights and the last; --resume goes on", err=True)
        raise typer.Exit(143 if stopped.signal == signal.SIGTERM else 130) from None
    if is_main_process():
        typer.echo(f"{run.out}: model written. Next:")
        typer.echo(f'  saccade generate --model {run.out} "Once upon a time"')
        if lm.model.config.mechanism is None:
            typer.echo(f'  saccade look --model {run.out} "Once upon a time there was a time"')


def _measure_heads(lm: LanguageModel, run: LanguageRun) -> None:
    """Find out what each head does, on validation text, and keep it beside the weights; a mechanism has no weights."""
    if lm.model.config.mechanism is not None:
        return
    from ..inspection import measure_roles
    from ..models.own.checkpoint import HEADS, write_text
    from ..training.run import texts

    heads = measure_roles(lm, "\n".join(texts(run)[1]))
    write_text(run.out / HEADS, json.dumps(heads, indent=1) + "\n")
