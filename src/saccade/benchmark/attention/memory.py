"""Measures the peak memory of a call. For reliable numbers, measure each in a separate process.

Linux records the peak of a process's resident memory, which can be reset; its growth over the call, beyond the inputs,
is the result. If the peak cannot be reset, resident memory is sampled every millisecond.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WARM_UP = 64  # length of the warm-up call


def environment() -> dict[str, str]:
    """The environment, with this package first in the Python path."""
    root = str(Path(__file__).parents[3])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def growth(call: Callable[[], object]) -> tuple[int, str]:
    """Growth of resident memory in bytes at its peak during the call, and the method of measuring it.

    Raises:
        OSError: the system has no such information (not Linux).
    """
    _free_cached_memory()
    before = _resident("VmRSS")
    try:
        RESET.write_text("5")
    except OSError:
        return _sampled(call, before)
    kept = call()
    peak = _resident("VmHWM")
    del kept
    return max(peak - before, 0), "peak"


def _sampled(call: Callable[[], object], before: int) -> tuple[int, str]:
    done, peak = threading.Event(), before

    def sample() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, _resident("VmRSS"))
            time.sleep(0.001)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        kept = call()
        peak = max(peak, _resident("VmRSS"))
        del kept
    finally:
        done.set()
        sampler.join()
    return peak - before, "sampled"


def _resident(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")


def _free_cached_memory() -> None:
    """Return cached memory to the system: reused memory and collected garbage would reduce the result."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
