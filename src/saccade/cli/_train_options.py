"""The options of `saccade train`, by theme: each dataclass is one, its fields are options of the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._errors import require
from ._options import option

if TYPE_CHECKING:
    from ..training import LanguageSettings

Text = Annotated[
    Path, typer.Argument(metavar="TEXT", help="A text file, or a folder of .txt files.", show_default=False)
]


@dataclasses.dataclass(frozen=True)
class FileOptions:
    """Files and folders"""

    out: Path = option(Path("runs/lm"), "The folder to write the model into.")
    overwrite: bool = option(False, "Replace the model in --out.", "--overwrite")
    resume: bool = option(False, "Go on with the run in --out; one that is over, with more --steps.", "--resume")
    initial: Path | None = option(
        None, "Start from this model's weights, tokenizer and sizes.  [default: random weights]", "--from"
    )


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """Text and tokens"""

    hold_out: list[Path] | None = option(
        None, "Validate on this file, do not train on it; may be given again.  [default: the last tenth]"
    )
    characters: bool = option(False, "Tokens are characters, not BPE pieces.", "--characters")
    vocabulary: int = option(2048, "Size of the BPE vocabulary.")
    repeats: float = option(0.0, "Share of windows that say something twice (teaches copying).")
    copying: int = option(0, "Steps on repeated random tokens before the text (the same).")

    @property
    def pieces(self) -> int | None:
        """The size of the BPE vocabulary, None for characters."""
        return None if self.characters else self.vocabulary


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Model"""

    layers: int = option(4, "Decoder blocks.")
    heads: int = option(4, "Query heads of each block.")
    kv_heads: int | None = option(None, "Key/value heads.  [default: as many]")
    width: int = option(128, "Width of the residual stream.")
    hidden: int | None = option(None, "Width inside feed-forward.  [default: 8/3 of --width]")
    context: int = option(128, "Tokens the model sees at once.")
    dropout: float = option(0.1, "Dropout on embedding and residual stream.")
    mechanism: str | None = option(
        None,
        "What takes the place of softmax attention: linear, performer, ... or with settings of its own, "
        "linear:feature_map=relu.  [default: softmax attention]",
    )

    @property
    def fields(self) -> dict[str, Any]:
        """As `ModelConfig` takes them; ValueError names mechanisms and settings that there are not."""
        from ..variants import parse

        # A context that cannot be is refused by name when the model is made.
        mechanism = None if self.mechanism is None else parse(self.mechanism, max(self.context, 1))
        return {**vars(self), "mechanism": mechanism}


def sizes_of(folder: Path, names: set[str]) -> dict[str, int]:
    """Those of a model folder that are among the names; none where it cannot be read, which its opening reports."""
    from ..models.own.checkpoint import CONFIG

    try:
        config = json.loads((folder / CONFIG).read_bytes())
        return {name: config[name] for name in names & {"layers", "heads", "kv_heads", "width", "hidden", "context"}}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


@dataclasses.dataclass(frozen=True)
class LearningOptions:
    """Learning"""

    steps: int = option(300, "Optimizer steps.")
    minutes: float | None = option(None, "End before so many minutes are over, if that comes first.  [default: never]")
    batch: int = option(16, "Windows in each step, over all processes.")
    rate: float = option(2e-3, "Highest learning rate.")
    warmup: int = option(40, "Steps up to it.")
    decay: float = option(0.1, "Weight decay.")
    beta2: float = option(0.98, "AdamW's second beta.")
    clip: float = option(1.0, "Largest gradient norm.")
    seed: int = option(0, "Of windows, weights and dropout.")
    seeds: int | None = option(None, "Train with so many seeds, from --seed on, into folders seed-N of --out.")


@dataclasses.dataclass(frozen=True)
class RangeTestOptions:
    """Rates and learning"""

    low: float = option(1e-6, "The lowest rate.")
    high: float = option(1.0, "The highest rate.")
    steps: int = option(100, "How many rates are tried, a step with each.")
    batch: int = option(LearningOptions.batch, "Windows in each step.")
    decay: float = option(LearningOptions.decay, "Weight decay.")
    beta2: float = option(LearningOptions.beta2, "AdamW's second beta.")
    clip: float = option(LearningOptions.clip, "Largest gradient norm.")
    seed: int = option(LearningOptions.seed, "Of windows, weights and dropout.")

    @property
    def learning(self) -> LearningOptions:
        return LearningOptions(
            self.steps, batch=self.batch, decay=self.decay, beta2=self.beta2, clip=self.clip, seed=self.seed
        )


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """Memory and speed"""

    precision: str = option(
        "auto", "bf16 (autocast), fp16 (GPUs only), no (float32), or auto: bf16 where this machine is fast at it."
    )
    accumulate: int = option(1, "Micro-batches a step is split into.")
    checkpointing: bool = option(
        False, "Recompute blocks in the backward pass instead of keeping them.", "--checkpointing"
    )
    compile: bool = option(False, "Compile the model (needs a C++ compiler).", "--compile")


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
    """Looking and keeping"""

    every: int = option(100, "Steps between looks at the validation text.")
    checkpoint_every: int | None = option(None, "Steps between checkpoints.  [default: --every]")
    patience: int | None = option(None, "Stop after so many looks without an improvement.  [default: never]")
    improvement: float = option(0.0, "What counts as one, in nats per token.")
    tensorboard: bool | None = option(
        None, "Write a log for TensorBoard.  [default: if installed]", "--tensorboard/--no-tensorboard"
    )
    log_every: int = option(10, "Steps between its entries.")
    watch: int | None = option(
        None, "Steps between looks at every head's attention, for the log and alarms.  [default: never]"
    )


def log_wanted(asked: bool | None) -> bool:
    """Whether to write the TensorBoard log, None where it is installed; UserError if asked for and not installed."""
    if asked:
        require("tensorboard", "train")
    import importlib.util

    return asked is not False and importlib.util.find_spec("tensorboard") is not None


def settings_of(
    data: TextOptions, learning: LearningOptions, machine: MachineOptions, keeping: EvaluationOptions | None = None
) -> LanguageSettings:
    """The options as the training loop takes them."""
    from ..training import EvaluationSettings, Execution, LanguageSettings

    looks = {} if keeping is None else {**vars(keeping), "tensorboard": log_wanted(keeping.tensorboard)}
    return LanguageSettings(
        **{name: value for name, value in vars(learning).items() if name != "seeds"},
        repeats=data.repeats,
        copying=data.copying,
        execution=Execution(**vars(machine)),
        looks=EvaluationSettings(**looks),
    )
