"""The options of `saccade train`, by theme: each dataclass is one, its fields are options of the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._errors import require

if TYPE_CHECKING:
    from ..training import Settings

Text = Annotated[
    Path, typer.Argument(metavar="TEXT", help="A text file, or a folder of .txt files.", show_default=False)
]


@dataclasses.dataclass(frozen=True)
class FileOptions:
    """Files and folders"""

    out: Annotated[Path, typer.Option(help="The folder to write the model into.")] = Path("runs/lm")
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model in --out.")] = False
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out; one that is over, with more --steps.")
    ] = False
    initial: Annotated[
        Path | None,
        typer.Option("--from", help="Start from this model's weights and tokenizer.  [default: random weights]"),
    ] = None


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """Text and tokens"""

    hold_out: Annotated[
        list[Path] | None,
        typer.Option(help="Validate on this file, do not train on it; may be given again.  [default: the last tenth]"),
    ] = None
    characters: Annotated[bool, typer.Option("--characters", help="Tokens are characters, not BPE pieces.")] = False
    vocabulary: Annotated[int, typer.Option(help="Size of the BPE vocabulary.")] = 2048
    repeats: Annotated[float, typer.Option(help="Share of windows that say something twice (teaches copying).")] = 0.0
    copying: Annotated[int, typer.Option(help="Steps on repeated random tokens before the text (the same).")] = 0

    @property
    def pieces(self) -> int | None:
        """The size of the BPE vocabulary, None for characters."""
        return None if self.characters else self.vocabulary


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Model"""

    layers: Annotated[int, typer.Option(help="Decoder blocks.")] = 4
    heads: Annotated[int, typer.Option(help="Query heads of each block.")] = 8
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads.  [default: as many]")] = None
    width: Annotated[int, typer.Option(help="Width of the residual stream.")] = 256
    hidden: Annotated[int | None, typer.Option(help="Width inside feed-forward.  [default: 8/3 of --width]")] = None
    context: Annotated[int, typer.Option(help="Tokens the model sees at once.")] = 256
    dropout: Annotated[float, typer.Option(help="Dropout on embedding and residual stream.")] = 0.1
    mechanism: Annotated[
        str | None,
        typer.Option(
            help="What takes the place of softmax attention: linear, performer, ... or with settings of its own, "
            "linear:feature_map=relu.  [default: softmax attention]"
        ),
    ] = None

    @property
    def fields(self) -> dict[str, Any]:
        """As `ModelConfig` takes them; ValueError names mechanisms and settings that there are not."""
        from ..variants import parse

        # A context that cannot be is refused by name when the model is made.
        mechanism = None if self.mechanism is None else parse(self.mechanism, max(self.context, 1))
        return {**vars(self), "mechanism": mechanism}


@dataclasses.dataclass(frozen=True)
class LearningOptions:
    """Learning"""

    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 2000
    batch: Annotated[int, typer.Option(help="Windows in each step, over all processes.")] = 16
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3
    warmup: Annotated[int, typer.Option(help="Steps up to it.")] = 100
    decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.1
    beta2: Annotated[float, typer.Option(help="AdamW's second beta.")] = 0.98
    clip: Annotated[float, typer.Option(help="Largest gradient norm.")] = 1.0
    seed: Annotated[int, typer.Option(help="Of windows, weights and dropout.")] = 0


@dataclasses.dataclass(frozen=True)
class RangeTestOptions:
    """Rates and learning"""

    low: Annotated[float, typer.Option(help="The lowest rate.")] = 1e-6
    high: Annotated[float, typer.Option(help="The highest rate.")] = 1.0
    steps: Annotated[int, typer.Option(help="How many rates are tried, a step with each.")] = 100
    batch: Annotated[int, typer.Option(help="Windows in each step.")] = LearningOptions.batch
    decay: Annotated[float, typer.Option(help="Weight decay.")] = LearningOptions.decay
    beta2: Annotated[float, typer.Option(help="AdamW's second beta.")] = LearningOptions.beta2
    clip: Annotated[float, typer.Option(help="Largest gradient norm.")] = LearningOptions.clip
    seed: Annotated[int, typer.Option(help="Of windows, weights and dropout.")] = LearningOptions.seed

    @property
    def learning(self) -> LearningOptions:
        return LearningOptions(
            self.steps, self.batch, decay=self.decay, beta2=self.beta2, clip=self.clip, seed=self.seed
        )


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """Memory and speed"""

    precision: Annotated[
        str,
        typer.Option(
            help="bf16 (autocast), fp16 (GPUs only), no (float32), or auto: bf16 where this machine is fast at it."
        ),
    ] = "auto"
    accumulate: Annotated[int, typer.Option(help="Micro-batches a step is split into.")] = 1
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute blocks in the backward pass instead of keeping them.")
    ] = False
    compile: Annotated[bool, typer.Option("--compile", help="Compile the model (needs a C++ compiler).")] = False


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
    """Looking and keeping"""

    every: Annotated[int, typer.Option(help="Steps between looks at the validation text.")] = 250
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.  [default: --every]")] = None
    patience: Annotated[
        int | None, typer.Option(help="Stop after so many looks without an improvement.  [default: never]")
    ] = None
    improvement: Annotated[float, typer.Option(help="What counts as one, in nats per token.")] = 0.0
    tensorboard: Annotated[
        bool | None,
        typer.Option("--tensorboard/--no-tensorboard", help="Write a log for TensorBoard.  [default: if installed]"),
    ] = None
    log_every: Annotated[int, typer.Option(help="Steps between its entries.")] = 10
    watch: Annotated[
        int | None,
        typer.Option(help="Steps between looks at every head's attention, for the log and alarms.  [default: never]"),
    ] = None

    @property
    def log(self) -> bool:
        """Whether to write the TensorBoard log; UserError if asked for and not installed."""
        if self.tensorboard:
            require("tensorboard", "train")
        import importlib.util

        return self.tensorboard is not False and importlib.util.find_spec("tensorboard") is not None


def settings_of(
    data: TextOptions, learning: LearningOptions, machine: MachineOptions, keeping: EvaluationOptions | None = None
) -> Settings:
    """The options as the training loop takes them."""
    from ..training import EvaluationSettings, Execution, Settings

    looks = EvaluationSettings()
    if keeping is not None:
        looks = EvaluationSettings(
            every=keeping.every,
            checkpoint_every=keeping.checkpoint_every,
            patience=keeping.patience,
            improvement=keeping.improvement,
            log_every=keeping.log_every,
            tensorboard=keeping.log,
            watch=keeping.watch,
        )
    return Settings(
        steps=learning.steps,
        batch=learning.batch,
        rate=learning.rate,
        warmup=learning.warmup,
        decay=learning.decay,
        beta2=learning.beta2,
        clip=learning.clip,
        seed=learning.seed,
        repeats=data.repeats,
        copying=data.copying,
        execution=Execution(machine.precision, machine.accumulate, machine.compile, machine.checkpointing),
        looks=looks,
    )
