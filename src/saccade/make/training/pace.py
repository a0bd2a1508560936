"""Whether other processes slow a run down: its threads sleep, or it falls far behind its own first steps."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

from ...support._shared_cores import threads_sleep

FIRST, LATER = 8, 8  # steps whose median is compared; the very first one, which warms up, is left out
BEHIND = 4.0  # batches differ in length by less
ASLEEP = (
    "other processes hold cores: threads now sleep while they wait for one another, with the same results; where steps "
    "stay slow, --threads 1 may be faster"
)


class Pace:
    """Times steps and gives one line, once: when threads sleep because other processes hold cores, or when the last
    steps take several times as long as the first ones.

    Args:
        clock: seconds.
        asleep: whether threads sleep.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, asleep: Callable[[], bool] = threads_sleep):
        self._clock, self._asleep = clock, asleep
        self._last: float | None = None
        self._first: list[float] = []
        self._later: list[float] = []
        self._over = False

    def paused(self) -> None:
        """What comes before the next step is not a step alone: an evaluation, a file."""
        self._last = None

    def stepped(self) -> str | None:
        """Note the end of a step. The line about it, where there is one."""
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
    """Passive threads need their variable before PyTorch is loaded; fewer threads can be set at any time."""
    fewer = "compute on fewer threads (--threads 1, or torch.set_num_threads(1))"
    if torch.get_num_threads() == 1:
        return "another process may hold the cores"
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE" or "GOMP_SPINCOUNT" in os.environ:
        return f"another process may hold the cores; end it, or {fewer}"
    return (
        "another process may hold a core while PyTorch's threads spin; set OMP_WAIT_POLICY=PASSIVE in the environment "
        f"before PyTorch is imported, or {fewer}"
    )
