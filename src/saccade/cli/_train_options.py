"""The options of `saccade train`, by theme: each dataclass is one, its fields are options of the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..support._plain_values import parsed_json
from ._errors import require
from ._options import option
from ._parts._existing import existing

if TYPE_CHECKING:
    from ..make.training import LanguageSettings

Text = Annotated[
    Path,
    typer.Argument(
        metavar="TEXT", help="A text file, or a folder of .txt files.", show_default=False, callback=existing()
    ),
]


@dataclasses.dataclass(frozen=True)
class FileOptions:
    """Files and folders"""

    out: Path = option(Path("runs/lm"), "The folder to write the model into.")
    overwrite: bool = option(False, "Replace the model in --out.")
    resume: bool = option(False, "Continue the run in --out; give a finished run more --steps.")
    initial: Path | None = option(
        None,
        "Start from this model's weights, tokenizer and sizes.  [default: random weights]",
        "--from",
        callback=existing("the folder of a model that `saccade train lm` wrote", kind="model folder"),
    )


@dataclasses.dataclass(frozen=True)
class TextInputOptions:
    """Text and tokens"""

    hold_out: list[Path] | None = option(
        None,
        "Use this file only for validation; repeat it for more.  [default: the last tenth of TEXT]",
        callback=existing("a text file, or a folder of .txt files"),
    )
    characters: bool = option(False, "Use characters as tokens, not BPE pieces.")
    vocabulary: int = option(2048, "Size of the BPE vocabulary.")
    repeats: float = option(0.0, "Share of training windows that contain a passage twice; this teaches copying.")
    copying: int = option(0, "Steps on repeated random tokens before training on the text; this also teaches copying.")

    @property
    def pieces(self) -> int | None:
        """The size of the BPE vocabulary, None for characters."""
        return None if self.characters else self.vocabulary


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Model"""

    layers: int = option(4, "Decoder blocks.")
    heads: int = option(4, "Query heads of each block.")
    kv_heads: int | None = option(None, "Key/value heads of each block.  [default: as many as query heads]")
    width: int = option(128, "Width of the residual stream.")
    hidden: int | None = option(None, "Width inside the feed-forward layers.  [default: 8/3 of --width]")
    context: int = option(128, "Context length in tokens.")
    dropout: float = option(0.1, "Dropout probability on embedding and residual stream.")
    mechanism: str | None = option(
        None,
        "A mechanism instead of softmax attention: linear, performer, ..., or with settings, such as "
        "linear:feature_map=relu.  [default: softmax attention]",
    )

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of `ModelConfig`. ValueError for an unknown mechanism or setting."""
        from ..operator.variants import parse

        # A context that cannot be is refused by name when the model is made.
        mechanism = None if self.mechanism is None else parse(self.mechanism, max(self.context, 1))
        return {**vars(self), "mechanism": mechanism}


def sizes_of(folder: Path, names: set[str]) -> dict[str, int]:
    """The sizes with these names in a model folder; empty if it cannot be read, which is reported later."""
    from ..make.models.decoder_lm.checkpoint import CONFIG

    try:
        config = parsed_json((folder / CONFIG).read_bytes())
        return {name: config[name] for name in names & {"layers", "heads", "kv_heads", "width", "hidden", "context"}}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


@dataclasses.dataclass(frozen=True)
class LearningOptions:
    """Learning"""

    steps: int = option(1200, "Optimizer steps.")
    minutes: float | None = option(
        None, "Stop after this many minutes, if training has not ended before.  [default: no limit]"
    )
    batch: int = option(16, "Windows in each step, over all processes.")
    rate: float = option(2e-3, "Peak learning rate.")
    warmup: int = option(40, "Warm-up steps: the learning rate rises to its peak.")
    decay: float = option(0.1, "Weight decay.")
    beta2: float = option(0.98, "Second beta of AdamW.")
    clip: float = option(1.0, "Maximum gradient norm; larger gradients are scaled down to it.")
    seed: int = option(0, "Seed of windows, weights and dropout.")
    seeds: int | None = option(
        None, "Train this many times, with seeds from --seed upwards, into folders seed-N of --out.  [default: one run]"
    )


@dataclasses.dataclass(frozen=True)
class RangeTestOptions:
    """Rates and learning"""

    low: float = option(1e-6, "The lowest learning rate.")
    high: float = option(1.0, "The highest learning rate.")
    steps: int = option(100, "Number of rates to try, with one step for each.")
    batch: int = option(LearningOptions.batch, "Windows in each step.")
    decay: float = option(LearningOptions.decay, "Weight decay.")
    beta2: float = option(LearningOptions.beta2, "Second beta of AdamW.")
    clip: float = option(LearningOptions.clip, "Maximum gradient norm; larger gradients are scaled down to it.")
    seed: int = option(LearningOptions.seed, "Seed of windows, weights and dropout.")

    @property
    def learning(self) -> LearningOptions:
        return LearningOptions(
            self.steps, batch=self.batch, decay=self.decay, beta2=self.beta2, clip=self.clip, seed=self.seed
        )


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """Memory and speed"""

    precision: str = option(
        "auto", "bf16 (autocast), fp16 (GPUs only), no (float32), or auto: bf16 if it is fast on this machine."
    )
    accumulate: int = option(1, "Number of micro-batches that a step is split into.")
    checkpointing: bool = option(False, "Recompute blocks in the backward pass instead of keeping them.")
    compile: bool = option(False, "Compile the model (needs a C++ compiler).")


@dataclasses.dataclass(frozen=True)
class LanguageMachineOptions(MachineOptions):
    """Memory and speed"""

    context_parallel: int = option(1, "Processes that share each window, for long contexts; needs torchrun.")


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
    """Evaluation and checkpoints"""

    every: int = option(100, "Steps between evaluations on the validation text.")
    checkpoint_every: int | None = option(None, "Steps between checkpoints.  [default: --every]")
    patience: int | None = option(None, "Stop after this many evaluations without an improvement.  [default: never]")
    improvement: float = option(
        0.0, "The smallest decrease of the validation loss that counts as an improvement, in nats per token."
    )
    tensorboard: bool | None = option(
        None, "Write a log for TensorBoard.  [default: if installed]", "--tensorboard/--no-tensorboard"
    )
    log_every: int = option(10, "Steps between entries of the log.")
    watch: int | None = option(
        None, "Steps between recordings of every head's attention, for the log and alarms.  [default: never]"
    )


def log_wanted(asked: bool | None) -> bool:
    """Whether to write the TensorBoard log. If `asked` is None, it is written if TensorBoard is installed. UserError if
    True and not installed."""
    if asked:
        require("tensorboard", "train")
    import importlib.util

    return asked is not False and importlib.util.find_spec("tensorboard") is not None


def settings_of(
    data: TextInputOptions, learning: LearningOptions, machine: MachineOptions, keeping: EvaluationOptions | None = None
) -> LanguageSettings:
    """The options as settings of the training loop."""
    from ..make.training import EvaluationSettings, Execution, LanguageSettings

    looks = {} if keeping is None else {**vars(keeping), "tensorboard": log_wanted(keeping.tensorboard)}
    return LanguageSettings(
        **{name: value for name, value in vars(learning).items() if name != "seeds"},
        repeats=data.repeats,
        copying=data.copying,
        execution=Execution(**vars(machine)),
        looks=EvaluationSettings(**looks),
    )
