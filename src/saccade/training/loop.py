"""The training loop: a straight line from windows to weights. Devices and precision are Hugging Face Accelerate's.

Shapes: B batch, L context, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import DecoderLM, ModelConfig
from .data import Corpus
from .evaluation import evaluate
from .schedule import learning_rate
from .windows import draw_copying, draw_windows, whole_windows


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to train: AdamW (Loshchilov and Hutter 2019), warm-up and cosine, clipped gradients.

    Args:
        steps, batch: optimizer steps, and windows in each.
        peak: the highest learning rate; it is reached after `warmup` steps and ends at a tenth.
        weight_decay: of matrices; vectors (norms, biases) have none.
        clip: the largest gradient norm.
        seed: of windows, initial weights and dropout.
        precision: "bf16" (autocast) or "no" (float32).
        evaluate_every: steps between looks at the validation text.
        evaluate_windows: how many of its windows, evenly spread, to look at; None is all.
        repeats: share of windows in which a stretch is followed by itself (see `draw_windows`).
        copying: steps before all others, without dropout and at the highest rate, on random tokens over and over
            (see `draw_copying`). Copying what followed last time takes two heads that are useless without each other;
            from text alone a small model finds them late or never.
        beta2: of AdamW; the first is 0.9.
    """

    steps: int
    batch: int = 16
    peak: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    precision: str = "bf16"
    evaluate_every: int = 250
    evaluate_windows: int | None = 64
    repeats: float = 0.0
    copying: int = 0
    beta2: float = 0.98

    @property
    def all_steps(self) -> int:
        return self.copying + self.steps

    def rate(self, step: int) -> float:
        """The learning rate of a step: warm-up, flat while copying is taught, then the cosine."""
        at = step if step < self.warmup else max(step - self.copying, self.warmup)
        return learning_rate(at, peak=self.peak, steps=self.steps, warmup=self.warmup)

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("peak", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be finite and positive, got {value}")
        for name in ("warmup", "copying"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: steps cannot be negative, got {getattr(self, name)}")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(f"weight_decay: must be finite and not negative, got {self.weight_decay}")
        if not 0.0 <= self.beta2 < 1.0:
            raise ValueError(f"beta2: must be in [0, 1), got {self.beta2}")
        if self.evaluate_windows is not None and self.evaluate_windows < 1:
            raise ValueError(f"evaluate_windows: must be at least 1, got {self.evaluate_windows}")
        if self.precision not in ("bf16", "no"):
            raise ValueError(f"precision: expected 'bf16' or 'no', got {self.precision!r}")
        if not 0.0 <= self.repeats <= 1.0:
            raise ValueError(f"repeats: is a share in [0, 1], got {self.repeats}")


class Monitor(Protocol):
    """What the loop tells while it runs."""

    def step(self, step: int, loss: float, norm: float, rate: float, tokens_per_second: float) -> None: ...

    def evaluated(self, step: int, training_loss: float, validation_loss: float, seconds: float) -> None: ...


class Diverged(ValueError):
    """The loss is no longer a finite number."""


def train(model: DecoderLM, corpus: Corpus, start: int, settings: Settings, monitor: Monitor) -> float:
    """Train `model` in place and return its last validation loss (nats per token).

    What a step sees is a function of the seed and the step. `monitor.evaluated` is called every `evaluate_every` steps
    and at the end. A `KeyboardInterrupt` passes through with the model as it is. Raises `Diverged` when the loss is
    not finite.
    """
    # Accelerate is an extra, and slow to import.
    from accelerate import Accelerator

    context = model.config.context
    windows = spread(whole_windows(corpus.validation, start=start, context=context), settings.evaluate_windows)
    torch.manual_seed(settings.seed)
    accelerator = Accelerator(mixed_precision=settings.precision)
    prepared, optimizer = accelerator.prepare(model, _optimizer(model, settings))
    began, mean, seen, validation = time.perf_counter(), _RunningMean(), 0, math.nan
    for step in range(settings.all_steps):
        model.train(step >= settings.copying)
        rate = settings.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = _draw(step, corpus.training, start, model.config, settings).to(accelerator.device)
        loss = _loss(prepared, batch)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        value = mean.add(loss.item())
        if not math.isfinite(value):
            raise Diverged(f"training: the loss became {value} at step {step + 1}; try a smaller learning rate")
        done, seen, seconds = step + 1, seen + batch[:, 1:].numel(), time.perf_counter() - began
        monitor.step(done, value, float(norm), rate, seen / seconds)
        if done % settings.evaluate_every == 0 or done == settings.all_steps:
            validation = evaluate(model, windows)
            monitor.evaluated(done, mean.take(), validation, seconds)
    return validation


def _loss(model: nn.Module, windows: Tensor) -> Tensor:
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def _draw(step: int, tokens: Tensor, start: int, config: ModelConfig, settings: Settings) -> Tensor:
    """The windows of a step: a function of the settings and the step."""
    seed, batch = settings.seed, settings.batch
    if step < settings.copying:
        return draw_copying(config.vocabulary, start=start, context=config.context, batch=batch, seed=seed, step=step)
    return draw_windows(
        tokens,
        start=start,
        context=config.context,
        batch=batch,
        seed=seed,
        step=step - settings.copying,
        repeats=settings.repeats,
    )


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.peak, betas=(0.9, settings.beta2), fused=True)


def spread(windows: Tensor, count: int | None) -> Tensor:
    """`count` windows spread evenly over all; all, when there are not more or `count` is None."""
    if count is None or count >= windows.shape[0]:
        return windows
    return windows[torch.arange(count) * windows.shape[0] // count]


class _RunningMean:
    """Mean of the losses since it was last taken."""

    def __init__(self) -> None:
        self._total, self._count = 0.0, 0

    def add(self, value: float) -> float:
        self._total, self._count = self._total + value, self._count + 1
        return value

    def take(self) -> float:
        mean = self._total / max(self._count, 1)
        self._total, self._count = 0.0, 0
        return mean
