"""The learning-rate range test: raises the rate until the loss diverges."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from .loop import make_optimizer
from .objective import Objective
from .processes import accelerator_for, own_parts
from .settings import Settings
from .state import step_seed

SAFETY = 10.0  # the edge divided by the suggested rate


@dataclasses.dataclass(frozen=True)
class RangeTest:
    """The result of `range_test`: the loss at each rate, until it diverged or all rates were tried.

    Args:
        rates: one a step, rising geometrically.
        losses: of each step, before its rate was applied.
        smoothed: `losses` as an exponential mean.
        diverged: whether the loss left the range before all rates were tried.

    Example:
        >>> import saccade
        >>> result = saccade.training.RangeTest((0.01, 0.1, 1.0), (4.0, 3.0, 9.0), (4.0, 3.0, 9.0), diverged=True)
        >>> result.edge
        0.01
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    diverged: bool

    @property
    def edge(self) -> float:
        """The rate at the lowest smoothed loss; larger rates increase it."""
        lowest = min(range(len(self.smoothed)), key=self.smoothed.__getitem__)
        # The loss of a step shows the effect of the rate before it.
        return self.rates[max(lowest - 1, 0)]

    @property
    def steepest(self) -> float:
        """The rate below the edge at which the smoothed loss fell fastest per factor of the rate."""
        last = self.rates.index(self.edge)
        falls = [self.smoothed[n + 1] - self.smoothed[n] for n in range(max(last, 1))]
        return self.rates[min(range(len(falls)), key=falls.__getitem__)]

    @property
    def suggestion(self) -> float:
        """A rate to train with: a tenth of the edge (curvature grows in training), or `steepest` if that is smaller."""
        return min(self.edge / SAFETY, self.steepest)


def range_test(
    step: Callable[[float], float],
    *,
    low: float = 1e-6,
    high: float = 1.0,
    steps: int = 100,
    smoothing: float = 0.9,
    factor: float = 4.0,
) -> RangeTest:
    """Take steps with an exponentially rising rate, `low (high / low)^(n / (steps - 1))`, until the loss diverges.

    Smith, "Cyclical Learning Rates for Training Neural Networks" (2017), section 3.3.

    Args:
        step: makes one step with the given rate, and returns the loss before that step.
        low, high, steps: the lowest and the highest rate, and the number of rates.
        smoothing: s of the mean `m <- s m + (1 - s) loss`, with bias correction; 0 does not smooth.
        factor: the loss has diverged when its mean is above `factor` times the lowest mean, or not finite.

    Raises:
        ValueError: rates that do not rise, fewer than two steps, a smoothing or factor outside of its range.

    Example:
        >>> import saccade
        >>> place = 1.0
        >>> def descend(rate):  # gradient descent on x^2 / 2 diverges at a rate of 2
        ...     global place
        ...     loss = place**2 / 2
        ...     place -= rate * place
        ...     return loss
        >>> result = saccade.training.range_test(descend, low=0.01, high=10.0, steps=50, smoothing=0.0)
        >>> result.diverged, result.suggestion < 2
        (True, True)
    """
    _check(low, high, steps, smoothing, factor)
    rates: list[float] = []
    losses: list[float] = []
    smoothed: list[float] = []
    mean = 0.0
    for number in range(steps):
        rate = low * (high / low) ** (number / (steps - 1))
        loss = step(rate)
        if not math.isfinite(loss):
            return RangeTest(tuple(rates), tuple(losses), tuple(smoothed), True)
        mean = smoothing * mean + (1 - smoothing) * loss
        rates.append(rate)
        losses.append(loss)
        smoothed.append(mean / (1 - smoothing ** (number + 1)))
        if smoothed[-1] > factor * min(smoothed):
            return RangeTest(tuple(rates), tuple(losses), tuple(smoothed), True)
    return RangeTest(tuple(rates), tuple(losses), tuple(smoothed), False)


def objective_range_test(
    objective: Objective,
    settings: Settings,
    *,
    low: float = 1e-6,
    high: float = 1.0,
    progress: Callable[[float, float], None] = lambda rate, loss: None,
) -> RangeTest:
    """`range_test` of an objective with its batches, its optimizer and its gradient clipping.

    Changes the weights of the model. `settings.steps` is the number of rates; `progress` is called with each rate and
    its loss.
    """
    accelerator = accelerator_for(settings)
    if accelerator.num_processes > 1:
        raise ValueError(f"range test: runs in a single process, got {accelerator.num_processes} processes")
    if settings.steps is None:
        raise ValueError("steps: a range test needs the number of rates to try, got None")
    objective.recompute_blocks(settings.execution.checkpointing)
    model = objective.model
    prepared, optimizer = accelerator.prepare(model.train(), make_optimizer(model, settings))
    number = 0

    def step(rate: float) -> float:
        nonlocal number
        batch = objective.batch(number)
        for group in optimizer.param_groups:
            group["lr"] = rate
        total = 0.0
        for micro, part in enumerate(own_parts(accelerator, objective.split, batch, settings.execution.accumulate)):
            torch.manual_seed(step_seed(settings.seed, number, micro, 0))
            loss = objective.loss(prepared, part) * (objective.weight(part) / objective.weight(batch))
            accelerator.backward(loss)
            total += loss.item()
        accelerator.clip_grad_norm_(prepared.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        progress(rate, total)
        return total

    return range_test(step, low=low, high=high, steps=settings.steps)


def _check(low: float, high: float, steps: int, smoothing: float, factor: float) -> None:
    if not (0 < low < high < math.inf):
        raise ValueError(f"low, high: rates must be positive, finite and rising, got {low:g} and {high:g}")
    if steps < 2:
        raise ValueError(f"steps: a range has at least 2 rates, got {steps}")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing: must be in [0, 1), got {smoothing}")
    if not factor > 1:
        raise ValueError(f"factor: must be above 1, got {factor}")
