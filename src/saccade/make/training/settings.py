"""Settings of training: optimizer and schedule, execution of a step, evaluation and logging."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch

PRECISIONS = ("bf16", "fp16", "no")
_ALSO = {"bfloat16": "bf16", "float16": "fp16", "float32": "no", "fp32": "no"}  # names of PyTorch and other libraries


def fitting_precision() -> str:
    """ "bf16" if this machine multiplies it faster than float32 (GPUs with bf16, AVX512-BF16, AMX), else "no"."""
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    fast = (getattr(torch.cpu, f"_is_{kind}_supported", None) for kind in ("avx512_bf16", "amx_tile"))
    return "bf16" if any(supported is not None and supported() for supported in fast) else "no"


def _at_least(values: Any, least: int, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(values, name)
        if value is not None and value < least:
            raise ValueError(f"{name}: must be at least {least}, got {value}")


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a step is computed. Except for rounding, this does not change the result.

    One exception: batch norm uses the mean and variance of each micro-batch of each process.

    Args:
        precision: "bf16" (autocast), "fp16" (autocast with a scaled loss; not on a CPU), "no" (float32), or "auto":
            "bf16" on machines with fast bf16 (GPUs that have it, AVX512-BF16, AMX), else "no"; a resumed run
            keeps its precision. "bfloat16", "float16", "float32" and "fp32" are accepted as aliases.
        accumulate: number of sequential micro-batches a process splits its share of a step into, to save memory.
        compile: compile the forward and backward pass with `torch.compile`.
        checkpointing: recompute each block in the backward pass instead of storing its activations (Chen et al.,
            "Training Deep Nets with Sublinear Memory Cost", 2016).
        context_parallel: number of processes that share each sequence, for language models; the processes are this
            many times as many as the parts of the batch. May change when a run is resumed.

    Raises:
        ValueError: an unknown precision; `accumulate` or `context_parallel` below 1.

    Example:
        >>> import saccade
        >>> execution = saccade.training.Execution(accumulate=4)  # for `Settings(..., execution=execution)`
        >>> execution.settled.precision in ("bf16", "no")
        True
    """

    precision: str = "auto"
    accumulate: int = 1
    compile: bool = False
    checkpointing: bool = False
    context_parallel: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", _ALSO.get(self.precision, self.precision))
        if self.precision not in ("auto", *PRECISIONS):
            raise ValueError(
                f"precision: expected 'auto', 'bf16' (bfloat16), 'fp16' (float16) or 'no' (float32, fp32), got "
                f"{self.precision!r}"
            )
        _at_least(self, 1, ["accumulate", "context_parallel"])

    @property
    def settled(self) -> Execution:
        """The same settings with "auto" replaced by the precision it means on this machine."""
        return dataclasses.replace(self, precision=fitting_precision()) if self.precision == "auto" else self


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """When to evaluate, save and log. Only `patience` affects the result: it can end the run.

    Args:
        every: steps between evaluations on the validation data; the last step is always evaluated.
        evaluate_windows: number of evenly spaced windows of the validation text to evaluate on; None uses all.
        checkpoint_every: steps between checkpoints; None writes one at each evaluation.
        patience: stop after this many evaluations without an improvement; None never does. Opening steps do not count.
        improvement: the smallest decrease of the cost that counts as an improvement.
        log_every: steps between entries in the TensorBoard log.
        tensorboard: whether to write that log.
        watch: steps between measurements of the attention of every head, with alarms; None disables them.

    Raises:
        ValueError: numbers outside of these ranges.

    Example:
        >>> import saccade
        >>> looks = saccade.training.EvaluationSettings(every=50, patience=3)
        >>> settings = saccade.training.Settings(steps=1000, looks=looks)
        >>> settings.looks.checkpoint_due(100)
        True
    """

    every: int = 250
    evaluate_windows: int | None = 64
    checkpoint_every: int | None = None
    patience: int | None = None
    improvement: float = 0.0
    log_every: int = 10
    tensorboard: bool = False
    watch: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, ["every", "evaluate_windows", "checkpoint_every", "patience", "log_every", "watch"])
        if not (math.isfinite(self.improvement) and self.improvement >= 0):
            raise ValueError(f"improvement: must be finite and not negative, got {self.improvement}")

    def checkpoint_due(self, step: int) -> bool:
        return step % (self.checkpoint_every or self.every) == 0


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of training with AdamW (Loshchilov and Hutter 2019), warm-up, a cosine schedule and gradient clipping.

    Args:
        steps: optimizer steps; None: as many as fit into `minutes`.
        batch: items in each step (windows of a text, texts), over all processes.
        rate: the peak learning rate, reached after `warmup` steps; the schedule ends at a tenth of it.
        decay: the weight decay of matrices; vectors (norms, biases) have none.
        clip: the largest gradient norm.
        seed: of batches, initial weights and dropout.
        beta2: of AdamW; the first beta is 0.9.
        minutes: time budget, evaluations included; the learning rate follows it. Such a run depends on the speed of the
            machine, so it cannot be repeated bit for bit.
        execution: how a step is computed.
        looks: when to evaluate and save.

    Raises:
        ValueError: neither `steps` nor `minutes`; numbers outside of their ranges; a watched model that is compiled.

    Example:
        >>> import saccade
        >>> settings = saccade.training.Settings(steps=100, rate=1e-3, warmup=10)
        >>> [f"{settings.rate_at(step):.2g}" for step in (0, 10, 100)]
        ['0.0001', '0.001', '0.0001']
    """

    steps: int | None
    batch: int = 16
    rate: float = 1e-3
    warmup: int = 100
    decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    beta2: float = 0.98
    minutes: float | None = None
    execution: Execution = Execution()
    looks: EvaluationSettings = EvaluationSettings()

    @property
    def opening(self) -> int:
        """Number of steps before those counted by `steps`: without dropout, at a constant rate, and not evaluated."""
        return 0

    @property
    def all_steps(self) -> float:
        """The number of steps of a run that nothing ends earlier; infinite if only `minutes` is given."""
        return math.inf if self.steps is None else self.opening + self.steps

    def rate_at(self, step: int, seconds: float = 0.0) -> float:
        """The learning rate of a step: warm-up, constant during the opening, then the cosine.

        With `minutes`, the smaller of two cosines: over the steps and over the time.
        """
        at = step if step < self.warmup else max(step - self.opening, self.warmup)
        steps = math.inf if self.steps is None else self.steps
        rate = learning_rate(at, peak=self.rate, steps=steps, warmup=self.warmup)
        if self.minutes is None:
            return rate
        return min(rate, learning_rate(seconds, peak=self.rate, steps=60 * self.minutes, warmup=0))

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ValueError("steps, minutes: at least one must be given, got neither")
        _at_least(self, 1, ["steps", "batch"])
        if self.looks.watch is not None and self.execution.compile:
            raise ValueError("watch: a compiled model cannot be watched; leave out one of watch and compile")
        for name in ("rate", "clip", "minutes"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be finite and positive, got {value}")
        if self.warmup < 0:
            raise ValueError(f"warmup: steps cannot be negative, got {self.warmup}")
        if not (math.isfinite(self.decay) and self.decay >= 0):
            raise ValueError(f"decay: must be finite and not negative, got {self.decay}")
        if not 0.0 <= self.beta2 < 1.0:
            raise ValueError(f"beta2: must be in [0, 1), got {self.beta2}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: must be in [0, 2**63), got {self.seed}")


@dataclasses.dataclass(frozen=True)
class LanguageSettings(Settings):
    """Settings of training a language model on windows of a text.

    Args:
        repeats: share of windows that contain a copied span (see `draw_windows`).
        copying: opening steps, without dropout and at the peak rate, on periodic random tokens (see `draw_copying`).
            Copying needs two heads that are useless without each other; from text alone a small model learns them late
            or never.

    Raises:
        ValueError: as `Settings`; a negative `copying`, or `repeats` outside of [0, 1].

    Example:
        >>> import saccade
        >>> settings = saccade.training.LanguageSettings(steps=100, copying=20)
        >>> settings.all_steps
        120
    """

    repeats: float = 0.0
    copying: int = 0

    @property
    def opening(self) -> int:
        return self.copying

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.copying < 0:
            raise ValueError(f"copying: steps cannot be negative, got {self.copying}")
        if not 0.0 <= self.repeats <= 1.0:
            raise ValueError(f"repeats: is a share in [0, 1], got {self.repeats}")


def learning_rate(step: float, *, peak: float, steps: float, warmup: int, floor: float = 0.1) -> float:
    """The learning rate of a step: linear warm-up, then half a cosine down. Loshchilov and Hutter, "SGDR" (2017).

    Args:
        step: counted from 0.
        peak: the highest rate, reached after `warmup` steps.
        steps: the end of the cosine; may be infinite.
        warmup: steps of the warm-up.
        floor: the last rate as a share of `peak`.

    Example:
        >>> import saccade
        >>> rates = [saccade.training.learning_rate(step, peak=1.0, steps=100, warmup=4) for step in (0, 1, 4, 100)]
        >>> [round(rate, 2) for rate in rates]
        [0.25, 0.5, 1.0, 0.1]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
