"""Information about the machine that Python's standard library lacks."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

PROCESSOR_TIMES = Path("/proc/stat")


def processor() -> str:
    """The processor's name, from /proc/cpuinfo or else from `platform`."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def watch_others(times: Path = PROCESSOR_TIMES) -> Callable[[], float | None]:
    """A function that returns the share of this process's processors that other programs have taken since this call.

    What a hypervisor took from all of them counts, too. None if the system does not report it, and in the first
    fifth of a second, which its ticks of 10 ms do not resolve.
    """
    start, own, since = busy_seconds(times), time.process_time(), time.perf_counter()

    def share() -> float | None:
        passed, stop = time.perf_counter() - since, busy_seconds(times)
        if start is None or stop is None or passed < 0.2:
            return None
        taken = stop - start - (time.process_time() - own)
        return min(max(taken / (passed * len(os.sched_getaffinity(0))), 0.0), 1.0)

    return share


def busy_seconds(times: Path = PROCESSOR_TIMES) -> float | None:
    """Seconds in which the processors that this process may use were busy, since the system's start. None if the system
    does not report it."""
    try:
        lines = times.read_text().splitlines()
    except OSError:
        return None
    if not hasattr(os, "sched_getaffinity"):
        return None
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for words in map(str.split, lines):
        if words and words[0] in ours:
            ticks += sum(map(int, (*words[1:4], *words[6:9])))  # but for idle time and waiting for disks
    return ticks / os.sysconf("SC_CLK_TCK")
