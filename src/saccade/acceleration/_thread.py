"""Which accelerations are on in a thread, and telling them of a call."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._acceleration import Acceleration


class Held:
    """The accelerations that are on in one thread, and what is undone with the last one."""

    def __init__(self) -> None:
        self.on: tuple[Acceleration, ...] = ()
        self.blocks = ExitStack()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.held = Held()


THREAD = _Thread()


def counted(backend: str | None, reason: str, traced: bool) -> None:
    """One call of this thread: a backend took it, or it was left for a reason."""
    for run in THREAD.held.on:
        if backend is not None:
            run.backends[backend] += 1
        else:
            run.left[reason] += 1
        run.traced += traced
