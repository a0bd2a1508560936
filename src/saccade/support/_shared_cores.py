"""Threads that wait for one another while other processes hold cores.

GNU's OpenMP, which PyTorch and the kernels use on Linux, lets a waiting thread spin for 300,000 rounds, the fastest way
on a machine of one's own. Beside a process that holds a core it waits for a thread that does not run. While more
threads are managed than there are processors, it spins for 100 rounds and sleeps (GOMP_SPINCOUNT in its manual). An
idle team of threads makes it so at any time. Work is divided as before, so results keep their bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ._machine import busy_seconds, watch_others

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # how OpenMP's threads wait, where a user says so
INTERVAL = 0.5  # seconds
BEGIN, END = 0.45, 0.3  # cores that others take of those that ours need; below, spinning costs less than sleep

_watching: list[_Watch] = []  # one at most


@contextlib.contextmanager
def shared_cores() -> Iterator[None]:
    """A block in which threads that wait for one another sleep whenever other processes hold cores that they need.

    It changes nothing if the environment says how threads wait, if the system does not report how busy it is, or with
    another OpenMP than GNU's. One thread looks twice a second for all contexts. It continues for a second after the
    last context, so that successive short contexts are watched, too.
    """
    watch = _watch()
    context = object()
    if watch is not None:
        watch.contexts.append(context)
    try:
        yield
    finally:
        if watch is not None:
            watch.used = True
            watch.contexts.remove(context)


def _watch() -> _Watch | None:
    """The running watch, or a new one. It has no lock: a fork would copy a locked one. Two watches at once do no
    harm."""
    if any(name in os.environ for name in WAITING):
        return None
    if not any(watch.thread.is_alive() for watch in _watching):  # a fork leaves it without a thread
        _watching[:] = [] if busy_seconds() is None else [_Watch()]
    return next(iter(_watching), None)


def threads_sleep() -> bool:
    """Whether waiting threads sleep now because other processes hold cores."""
    return any(watch.team is not None for watch in _watching)


class _Watch:
    """A thread that observes other processes, until no context was open since its last look."""

    def __init__(self) -> None:
        self.team: _IdleTeam | None = None
        self.contexts: list[object] = []
        self.used = True
        self.thread = threading.Thread(target=self._look, daemon=True, name="saccade-shared-cores")
        self.thread.start()

    def _look(self) -> None:
        while self.contexts or self.used:
            self.used, share = False, watch_others()
            time.sleep(INTERVAL)
            self._decide(share())
        _watching[:] = [watch for watch in _watching if watch is not self]
        self._decide(0.0)

    def _decide(self, share: float | None) -> None:
        cores = len(os.sched_getaffinity(0))
        taken = (share or 0.0) * cores
        if self.team is not None and taken < END:
            self.team.end()
            self.team = None
        elif self.team is None and taken >= BEGIN and (begin := _gnu_region()) is not None:
            ours = _threads()
            if 1 < ours > cores - taken:
                self.team = _IdleTeam(begin, cores - ours + 2)


class _IdleTeam:
    """A team of `threads` threads of OpenMP that do nothing, until `end`."""

    def __init__(self, begin: Callable[..., Any], threads: int):
        self._over, made = threading.Event(), threading.Event()
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # of a null pointer, in each thread

        def hold() -> None:
            begin(nothing, None, ctypes.c_uint(max(threads, 2)), ctypes.c_uint(0))
            made.set()
            self._over.wait()  # OpenMP keeps the team until the thread that began it ends

        self._thread = threading.Thread(target=hold, daemon=True, name="saccade-idle-team")
        self._thread.start()
        made.wait()

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def _gnu_region() -> Callable[..., Any] | None:
    """The function that begins a region of GNU's OpenMP. None before PyTorch is loaded, and with another OpenMP."""
    torch = sys.modules.get("torch")
    if not hasattr(torch, "get_num_threads"):
        return None
    library = ctypes.CDLL(sys.modules["torch._C"].__file__)  # finds what it depends on as well
    return None if hasattr(library, "kmp_set_blocktime") else getattr(library, "GOMP_parallel", None)


def _threads() -> int:
    """The number of threads with which PyTorch starts a new thread's regions. A thread that has computed keeps its own
    number."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(sys.modules["torch"].get_num_threads()), daemon=True)
    thread.start()
    thread.join()
    return found[0]
