"""Which accelerations are on in a thread, and telling them of a call."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack


class CallCounts:
    """What went where: calls taken, by backend; calls left, by the reason; how many of both a compiler traced."""

    def __init__(self) -> None:
        self.backends: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.traced = 0


class ActiveAccelerations:
    """The accelerations that are on in one thread, and what is undone with the last one."""

    def __init__(self) -> None:
        self.on: tuple[CallCounts, ...] = ()
        self.blocks = ExitStack()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.held = ActiveAccelerations()


THREAD = _Thread()


def counted(backend: str | None, reason: str, traced: bool) -> None:
    """One call of this thread: a backend took it, or it was left for a reason."""
    for run in THREAD.held.on:
        if backend is not None:
            run.backends[backend] += 1
        else:
            run.left[reason] += 1
        run.traced += traced
