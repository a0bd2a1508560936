"""The options of `saccade train TASK`, by theme; their names are those of the task's fields and of the settings'."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ._options import option
from ._train_options import EvaluationOptions, LearningOptions, log_wanted

Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="A .csv, .tsv or .jsonl, or a folder with a folder of .txt files each class.",
        show_default=False,
    ),
]


@dataclasses.dataclass(frozen=True)
class TaskFileOptions:
    """Files and folders"""

    out: Path = option(cast(Path, ...), "The folder to write the model into.", show_default=False)
    validation: Path | None = option(None, "Judge by this file.  [default: a --share of DATA]", metavar="DATA")
    share: float = option(0.1, "How much of DATA is not trained on but judged by.")
    overwrite: bool = option(False, "Replace the run in --out.", "--overwrite")
    resume: bool = option(False, "Go on with the run in --out; one that is over, with more --steps.", "--resume")
    initial: str | None = option(
        None,
        "Start from the weights and the tokenizer of a run, a published model's folder, or a name on the Hugging Face "
        "hub.  [default: random weights]",
        "--from",
        metavar="DIR_OR_HUB_ID",
    )


@dataclasses.dataclass(frozen=True)
class ClassOptions:
    """Texts and classes"""

    text: str = option("text", "The column of texts.", metavar="COLUMN")
    label: str = option("label", "The column of classes.", metavar="COLUMN")
    skip_empty: bool = option(False, "Leave out texts without a word.", "--skip-empty")
    label_smoothing: float = option(0.0, "Share of the truth that is spread over all classes.")
    class_weights: bool = option(False, "Let rare classes count more.", "--class-weights")
    metric: str = option("accuracy", "What the best weights are chosen by: accuracy or f1.")


@dataclasses.dataclass(frozen=True)
class TextModelOptions:
    """Model"""

    vocabulary: int = option(4096, "Word pieces of a new encoder, at most.")
    layers: int = option(2, "Its blocks.")
    heads: int = option(4, "Its heads of each block.")
    width: int = option(128, "Its width.")
    dropout: float = option(0.3, "Its dropout.")
    longest: int | None = option(
        None, "Tokens of a text that are read.  [default: 256 by a new encoder, all that a checkpoint can]"
    )
    long: str = option("cut", "What to do with longer texts: cut or refuse.")


@dataclasses.dataclass(frozen=True)
class TaskLearningOptions:
    """Learning"""

    epochs: int | None = option(None, "Times through the data.  [default: 10, with --from 3]")
    steps: int | None = option(None, "Optimizer steps, in the place of --epochs.")
    minutes: float | None = option(None, "End before so many minutes are over.  [default: never]")
    batch: int = option(32, "Examples in each step, over all processes.")
    rate: float | None = option(None, "Highest learning rate.  [default: 5e-4, with --from 5e-5]")
    warmup: int | None = option(None, "Steps up to it.  [default: a tenth of the epochs that are usual, at most 100]")
    decay: float = option(0.01, "Weight decay.")
    beta2: float = option(LearningOptions.beta2, "AdamW's second beta.")
    clip: float = option(LearningOptions.clip, "Largest gradient norm.")
    seed: int = option(0, "Of the split, batches, weights and dropout.")


@dataclasses.dataclass(frozen=True)
class TaskEvaluationOptions:
    """Looking and keeping"""

    every: int | None = option(None, "Steps between looks at the validation data.  [default: an epoch]")
    checkpoint_every: int | None = option(None, "Steps between checkpoints.  [default: --every]")
    patience: int = option(5, "Stop after so many looks without an improvement.")
    improvement: float = option(0.0, "What counts as one, in the metric.")
    tensorboard: bool | None = option(
        None, "Write a log for TensorBoard.  [default: if installed]", "--tensorboard/--no-tensorboard"
    )
    log_every: int = option(EvaluationOptions.log_every, "Steps between its entries.")
    watch: int | None = option(
        None, "Steps between looks at every head's attention, for the log and alarms.  [default: never]"
    )


def given(*groups: Any) -> dict[str, Any]:
    """What the groups say, by the names of settings."""
    options = {name: value for group in groups for name, value in vars(group).items()}
    return {**options, "tensorboard": log_wanted(options["tensorboard"])}
