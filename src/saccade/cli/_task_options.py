"""The options that all tasks of `saccade train` have, by theme; their names are those of the settings' fields."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any, cast

from ._options import option
from ._task_commands import TaskCommand
from ._train_options import EvaluationOptions, LearningOptions, log_wanted


@dataclasses.dataclass(frozen=True)
class NewRunOptions:
    """Files and folders"""

    out: Path = option(cast(Path, ...), "The folder to write the model into.", show_default=False)
    validation: Path | None = option(None, "Judge by this file.  [default: a --share of DATA]", metavar="DATA")
    share: float | None = option(None, "How much of DATA is not trained on but judged by.  [default: as the teacher]")
    overwrite: bool = option(False, "Replace the run in --out.", "--overwrite")
    resume: bool = option(False, "Go on with the run in --out; one that is over, with more --steps.", "--resume")


@dataclasses.dataclass(frozen=True)
class TaskFileOptions(NewRunOptions):
    """Files and folders"""

    share: float = option(0.1, "How much of DATA is not trained on but judged by.")
    initial: str | None = option(
        None,
        "Start from the weights and the tokenizer of a run, a published model's folder, or a name on the Hugging Face "
        "hub.  [default: random weights]",
        "--from",
        metavar="DIR_OR_HUB_ID",
    )


@dataclasses.dataclass(frozen=True)
class TuningOptions:
    """With --from"""

    last: int | None = option(None, "Train only the last N blocks and the head.  [default: all weights]")
    lora: int | None = option(
        None, "Train the head, and a change of this rank of each matrix in the blocks (LoRA).  [default: all weights]"
    )


@dataclasses.dataclass(frozen=True)
class TaskLearningOptions:
    """Learning"""

    # {...}: of the task's recipe

    epochs: int | None = option(None, "Times through the data.  [default: {epochs}]")
    steps: int | None = option(None, "Optimizer steps, in the place of --epochs.")
    minutes: float | None = option(None, "End before so many minutes are over, if that comes first.  [default: never]")
    batch: int | None = option(None, "Examples in each step, over all processes.  [default: {batch}]")
    rate: float | None = option(None, "Highest learning rate.  [default: {rate}]")
    warmup: int | None = option(None, "Warm-up steps.  [default: a tenth of the epochs that are usual, at most 100]")
    decay: float = option(0.01, "Weight decay.")
    beta2: float = option(LearningOptions.beta2, "AdamW's second beta.")
    clip: float = option(LearningOptions.clip, "Largest gradient norm.")
    seed: int = option(0, "Of the split, batches, weights and dropout.")
    seeds: int | None = option(None, "Train with so many seeds, from --seed on, into folders seed-N of --out.")


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """Search"""

    search: int | None = option(
        None,
        "Train so many times with other rates, batches and sizes, and keep the best run. Options that are given are "
        "not tried; --minutes are for all runs together.",
    )


@dataclasses.dataclass(frozen=True)
class TaskEvaluationOptions:
    """Looking and keeping"""

    every: int | None = option(None, "Steps between looks at the validation data.  [default: {every}]")
    checkpoint_every: int | None = option(None, "Steps between checkpoints.  [default: --every]")
    patience: int | None = option(None, "Stop after so many looks without an improvement.  [default: {patience}]")
    improvement: float = option(0.0, "The smallest change of the metric that counts as an improvement.")
    tensorboard: bool | None = option(
        None, "Write a log for TensorBoard.  [default: if installed]", "--tensorboard/--no-tensorboard"
    )
    log_every: int = option(EvaluationOptions.log_every, "Steps between entries of the log.")
    watch: int | None = option(
        None, "Steps between looks at every head's attention, for the log and alarms.  [default: never]"
    )


def given(*groups: Any) -> dict[str, Any]:
    """What the groups say, by the names of settings."""
    options = {name: value for group in groups for name, value in vars(group).items()}
    return {**options, "tensorboard": log_wanted(options["tensorboard"])}


def with_recipe(group: type, command: TaskCommand) -> type:
    """A group of options whose help has the recipe of a task."""
    recipe = {name: getattr(command, name) for name in ("epochs", "rate", "batch", "every", "patience")}
    fields = []
    for field in dataclasses.fields(group):
        info = copy.copy(field.metadata["option"])
        info.help = info.help.format(**recipe)
        fields.append((field.name, field.type, dataclasses.field(default=field.default, metadata={"option": info})))
    made = dataclasses.make_dataclass(group.__name__, fields, frozen=True)
    made.__module__, made.__doc__ = __name__, group.__doc__  # where its types are named; its heading
    return made
