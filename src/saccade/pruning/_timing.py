"""How long a forward takes, of a model as it was and as it is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ._texts import Batch

ROUNDS = 7


class ForwardTimes(NamedTuple):
    """Medians over rounds, in seconds a forward.

    Attributes:
        tokens: of the batch, special ones included.
        before, after: of both models.
        rounds: in each of which both ran, one after the other.
    """

    tokens: int
    before: float
    after: float
    rounds: int


@torch.no_grad()
def forward_times(
    before: nn.Module,
    after: nn.Module,
    batches: Sequence[Batch],
    told: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> ForwardTimes:
    """The forwards of both models in turn, so that what else the machine does slows both alike.

    All rounds take the longest batch. One more round comes first and does not count: it fills caches. `told` is called
    after each of the `ROUNDS + 1`.
    """
    ids = max(batches, key=lambda batch: batch["input_ids"].numel())["input_ids"]
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + 1):
        for model, found in zip((before, after), seconds, strict=True):
            start = clock()
            model(ids)
            found.append(clock() - start)
        told()
    whole, pruned = (statistics.median(found[1:]) for found in seconds)
    return ForwardTimes(ids.numel(), whole, pruned, ROUNDS)
