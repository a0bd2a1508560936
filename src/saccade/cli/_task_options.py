"""The options that all tasks of `saccade train` share. They have the names of the settings' fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ..make._task_options import BaseTaskOptions, Recipe
from ._options import option
from ._parts._existing import existing_data, existing_model
from ._train_options import EvaluationOptions, LearningOptions, log_wanted


@dataclasses.dataclass(frozen=True)
class NewRunOptions:
    """Files and folders"""

    out: Path = option(cast(Path, ...), "The folder to write the model into.", show_default=False)
    validation: Path | None = option(
        None, "The validation data.  [default: a --share of DATA]", metavar="DATA", callback=existing_data()
    )
    share: float | None = option(None, "Share of DATA that is held out for validation.  [default: as for the teacher]")
    overwrite: bool = option(False, "Replace the run in --out.")
    resume: bool = option(False, "Continue the run in --out; give a finished run more --steps.")


@dataclasses.dataclass(frozen=True)
class TaskFileOptions(NewRunOptions):
    """Files and folders"""

    share: float = option(0.1, "Share of DATA that is held out for validation.")
    initial: str | None = option(
        None,
        "Start from the weights and the tokenizer of a run, a published model's folder, or a name on the Hugging Face "
        "hub.  [default: random weights]",
        "--from",
        metavar="DIR_OR_HUB_ID",
        callback=existing_model(),
    )


@dataclasses.dataclass(frozen=True)
class TuningOptions:
    """With --from"""

    last: int | None = option(None, "Train only the last N blocks and the head.  [default: all weights]")
    lora: int | None = option(
        None,
        "Train the head and a low-rank update of this rank for each matrix in the blocks (LoRA).  [default: "
        "all weights]",
    )


@dataclasses.dataclass(frozen=True)
class TaskLearningOptions:
    """Learning"""

    # {...}: of the task's recipe

    epochs: int | None = option(None, "Passes over the data.  [default: {epochs}]")
    steps: int | None = option(None, "Optimizer steps, instead of --epochs.")
    minutes: float | None = option(
        None, "Stop after this many minutes, if training has not ended before.  [default: no limit]"
    )
    batch: int | None = option(None, "Examples in each step, over all processes.  [default: {batch}]")
    rate: float | None = option(None, "Peak learning rate.  [default: {rate}]")
    warmup: int | None = option(
        None, "Warm-up steps.  [default: a tenth of the steps in the default epochs, at most 100]"
    )
    decay: float = option(0.01, "Weight decay.")
    beta2: float = option(LearningOptions.beta2, "Second beta of AdamW.")
    clip: float = option(LearningOptions.clip, "Maximum gradient norm; larger gradients are scaled down to it.")
    seed: int = option(0, "Seed of the split, batches, weights and dropout.")
    seeds: int | None = option(
        None, "Train this many times, with seeds from --seed upwards, into folders seed-N of --out.  [default: one run]"
    )


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """Search"""

    search: int | None = option(
        None,
        "Train this many times with different rates, batches and sizes, and keep the best run. Options you "
        "give keep their value; --minutes is the limit for all runs together.",
    )


@dataclasses.dataclass(frozen=True)
class TaskEvaluationOptions:
    """Evaluation and checkpoints"""

    every: int | None = option(None, "Steps between evaluations on the validation data.  [default: {every}]")
    checkpoint_every: int | None = option(None, "Steps between checkpoints.  [default: --every]")
    patience: int | None = option(
        None, "Stop after this many evaluations without an improvement.  [default: {patience}]"
    )
    improvement: float = option(0.0, "The smallest change of the metric that counts as an improvement.")
    tensorboard: bool | None = option(
        None, "Write a log for TensorBoard.  [default: if installed]", "--tensorboard/--no-tensorboard"
    )
    log_every: int = option(EvaluationOptions.log_every, "Steps between entries of the log.")
    watch: int | None = option(
        None, "Steps between recordings of every head's attention, for the log and alarms.  [default: never]"
    )


def given(*groups: Any) -> dict[str, Any]:
    """The values of the groups, by the names of settings."""
    options = {name: value for group in groups for name, value in vars(group).items()}
    return {**options, "tensorboard": log_wanted(options["tensorboard"])}


def recipe_words(options: type[BaseTaskOptions]) -> dict[str, str]:
    """The default settings of a task, as help shows them: "10, with --from 3"."""
    scratch, tuning = _in_words(options.scratch), _in_words(options.tuning)
    return {
        name: value if value == tuning[name] else f"{value}, with --from {tuning[name]}"
        for name, value in scratch.items()
    }


def _in_words(recipe: Recipe) -> dict[str, str]:
    return {
        "epochs": str(recipe.epochs),
        "rate": f"{recipe.rate:.0e}".replace("e-0", "e-"),
        "batch": "all" if recipe.batch is None else str(recipe.batch),
        "every": "an epoch" if recipe.every is None else str(recipe.every),
        "patience": str(recipe.patience),
    }


def with_recipe(group: type, recipe: Mapping[str, str]) -> type:
    """A group of options whose help has the default settings of a task."""
    fields = []
    for field in dataclasses.fields(group):
        text = field.metadata["option"]
        text = dataclasses.replace(text, help=text.help.format(**recipe))
        fields.append((field.name, field.type, dataclasses.field(default=field.default, metadata={"option": text})))
    made = dataclasses.make_dataclass(group.__name__, fields, frozen=True)
    made.__module__, made.__doc__ = __name__, group.__doc__  # where its types are named; its heading
    return made
