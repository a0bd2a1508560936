"""Detects that other processes slow a run down."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

from ...support._shared_cores import threads_sleep

FIRST, LATER = 8, 8  # steps compared by their medians; the very first step, a warm-up, is left out
BEHIND = 4.0  # steps slower by this factor; batches of different lengths vary less
ASLEEP = (
    "other processes hold cores: threads now sleep while they wait for one another, with the same results; where steps "
    "stay slow, --threads 1 may be faster"
)


class Pace:
    """Times steps and gives one line at most: when PyTorch's threads sleep because other processes hold cores, or when
    the last steps are much slower than the first ones.

    Args:
        clock: gives the time in seconds.
        asleep: whether threads sleep.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, asleep: Callable[[], bool] = threads_sleep):
        self._clock, self._asleep = clock, asleep
        self._last: float | None = None
        self._first: list[float] = []
        self._later: list[float] = []
        self._over = False

    def paused(self) -> None:
        """The next interval is not timed: it contains more than a step, such as an evaluation."""
        self._last = None

    def stepped(self) -> str | None:
        """Record the end of a step. Returns the line to show, or None."""
        now, last = self._clock(), self._last
        self._last = now
        if last is None or self._over:
            return None
        if self._asleep():
            self._over = True
            return ASLEEP
        if len(self._first) < FIRST:
            self._first.append(now - last)
            return None
        self._later = [*self._later[1 - LATER :], now - last]
        usual, late = statistics.median(self._first), statistics.median(self._later)
        if len(self._later) < LATER or late < BEHIND * usual:
            return None
        self._over = True
        return f"steps take {late:.2g} s, the first ones took {usual:.2g} s: {_cure()}"


def _cure() -> str:
    """Advice. OMP_WAIT_POLICY has to be set before PyTorch is loaded; the number of threads can be set at any time."""
    fewer = "compute on fewer threads (--threads 1, or torch.set_num_threads(1))"
    if torch.get_num_threads() == 1:
        return "another process may hold the cores"
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE" or "GOMP_SPINCOUNT" in os.environ:
        return f"another process may hold the cores; end it, or {fewer}"
    return (
        "another process may hold a core while PyTorch's threads spin; set OMP_WAIT_POLICY=PASSIVE in the environment "
        f"before PyTorch is imported, or {fewer}"
    )
