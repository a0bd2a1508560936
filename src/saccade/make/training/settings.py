"""How to train, as values: what is learned, how a step is computed, and what is looked at and kept on the way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch

PRECISIONS = ("bf16", "fp16", "no")
_ALSO = {"bfloat16": "bf16", "float16": "fp16", "float32": "no", "fp32": "no"}  # as PyTorch and others name them


def fitting_precision() -> str:
    """ "bf16" where this machine multiplies it faster than float32 (a GPU that has it, AVX512-BF16, AMX), else "no"."""
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
    """How a step is computed. Except for rounding, this does not change what is learned.

    One exception: batch norm takes its means and variances from each micro-batch of each process.

    Args:
        precision: "bf16" (autocast), "fp16" (autocast with a scaled loss; not on a CPU), "no" (float32), or "auto":
            "bf16" where the machine is fast at it (GPUs that have it, AVX512-BF16, AMX), else "no"; a run that is
            resumed keeps what it began with. "bfloat16", "float16", "float32" and "fp32" are the same by other names.
        accumulate: micro-batches into which each process splits its windows of a step, one after another: less memory.
        compile: let `torch.compile` make the forward and backward pass.
        checkpointing: recompute each block in the backward pass instead of keeping what it computed (Chen et al.,
            "Training Deep Nets with Sublinear Memory Cost", 2016).

    Raises:
        ValueError: an unknown precision, or `accumulate` below 1.

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", _ALSO.get(self.precision, self.precision))
        if self.precision not in ("auto", *PRECISIONS):
            raise ValueError(
                f"precision: expected 'auto', 'bf16' (bfloat16), 'fp16' (float16) or 'no' (float32, fp32), got "
                f"{self.precision!r}"
            )
        _at_least(self, 1, ["accumulate"])

    @property
    def settled(self) -> Execution:
        """The same settings with "auto" replaced by the precision it means on this machine."""
        return dataclasses.replace(self, precision=fitting_precision()) if self.precision == "auto" else self


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """When to evaluate, save and log. Only `patience` changes what is learned: it can end the run.

    Args:
        every: steps between looks at the validation data; the last step is always one.
        evaluate_windows: how many windows of a validation text, evenly spread, to look at; None is all.
        checkpoint_every: steps between checkpoints; None is at each look.
        patience: stop after so many looks without an improvement; None never does. Looks in the opening do not count.
        improvement: the least decrease of the cost that counts as an improvement.
        log_every: steps between entries in the TensorBoard log.
        tensorboard: whether to write that log.
        watch: steps between looks at the attention of every head, with alarms; None never does.

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
    """How to train: AdamW (Loshchilov and Hutter 2019), warm-up and cosine, clipped gradients.

    Args:
        steps: optimizer steps; None is as many as there are `minutes` for.
        batch: items in each step (windows of a text, texts), over all processes.
        rate: the highest learning rate; it is reached after `warmup` steps and ends at a tenth.
        decay: the weight decay of matrices; vectors (norms, biases) have none.
        clip: the largest gradient norm.
        seed: of batches, initial weights and dropout.
        beta2: of AdamW; the first beta is 0.9.
        minutes: the run ends before so many are over, its last looks included, and the rate falls with the time. Such
            a run depends on how fast the machine is, so it cannot be repeated bit for bit.
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
        """Steps before those that `steps` counts: without dropout, at a rate that does not fall, and not judged."""
        return 0

    @property
    def all_steps(self) -> float:
        """The number of steps if nothing ends the run earlier; infinite where only the time does."""
        return math.inf if self.steps is None else self.opening + self.steps

    def rate_at(self, step: int, seconds: float = 0.0) -> float:
        """The learning rate of a step: warm-up, flat while the opening lasts, then the cosine.

        With a budget of minutes it is the lower one of two cosines: over the steps, and over the time.
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
    """How to train a language model on windows of a text.

    Args:
        repeats: share of windows in which a stretch is followed by itself (see `draw_windows`).
        copying: steps before all others, without dropout and at the highest rate, on random tokens that repeat
            (see `draw_copying`). Copying what followed last time takes two heads that are useless without each other;
            from text alone a small model finds them late or never.

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
        step: counted from 0: the step about to be made.
        peak: the highest rate, reached after `warmup` steps.
        steps: where the cosine ends; may be infinite.
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
