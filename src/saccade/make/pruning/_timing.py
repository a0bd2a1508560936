"""Times the forward pass of two models."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...support._numbers import duration
from ._texts import Batch

ROUNDS = 7


class ForwardTimes(NamedTuple):
    """Median seconds of a forward pass.

    Attributes:
        tokens: of the batch, special ones included.
        before, after: of the two models.
        rounds: number of rounds, in each of which both models ran.
    """

    tokens: int
    before: float
    after: float
    rounds: int

    def line(self) -> tuple[str, str, str]:
        """Name, values and remark, for people."""
        times = f"{duration(self.before)} -> {duration(self.after)}"
        return (
            f"Forward, {self.tokens} tokens",
            times,
            f"{self.after / self.before:.2f}x, medians of {self.rounds} rounds",
        )

    def as_json(self) -> dict[str, Any]:
        """The result as plain values for JSON."""
        return {**self._asdict(), "unit": "s"}


@torch.no_grad()
def forward_times(
    before: nn.Module,
    after: nn.Module,
    batches: Sequence[Batch],
    progress: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    *,
    call: Callable[[Any, Batch], object] = lambda model, batch: model(batch["input_ids"]),
    size: Callable[[Batch], int] = lambda batch: batch["input_ids"].numel(),
) -> ForwardTimes:
    """Time the forward passes of both models alternately, so that other load affects both.

    All rounds use the longest batch. An additional first round is a warm-up. `progress` is called after each of the
    `ROUNDS + 1`.

    Args:
        call: runs a model on a batch.
        size: number of tokens of a batch.
    """
    longest = max(batches, key=size)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + 1):
        for model, times in zip((before, after), seconds, strict=True):
            start = clock()
            call(model, longest)
            times.append(clock() - start)
        progress()
    whole, pruned = (statistics.median(times[1:]) for times in seconds)
    return ForwardTimes(size(longest), whole, pruned, ROUNDS)
