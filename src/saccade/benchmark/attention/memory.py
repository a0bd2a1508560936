"""The peak memory of one call. For numbers to keep, measure each in a process of its own.

Linux keeps the peak of a process's resident memory and lets it be reset; the growth of that peak over the call, above
the inputs, is what the call needed. Where the peak cannot be reset, the resident memory is sampled every millisecond.
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
WARM_UP = 64  # length of the call that loads what a first call loads


def environment() -> dict[str, str]:
    """Ours, with this very package first on the path."""
    root = str(Path(__file__).parents[3])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def growth(call: Callable[[], object]) -> tuple[int, str]:
    """Bytes by which this process's resident memory grows at its peak while the call runs, and how that was seen.

    Raises:
        OSError: the system does not tell (it is not Linux).
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
    """Free memory that the allocator keeps would hide what the call needs; so would garbage collected meanwhile."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
