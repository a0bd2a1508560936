"""Where and with what a run was made."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
from pathlib import Path
from typing import Any

import torch

from ...support._machine import processor
from . import sets

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
TRIM_THRESHOLD, MAP_THRESHOLD = -1, -3  # names of mallopt(3)


def describe(version: str, threads: int) -> dict[str, Any]:
    """The machine and the versions, as JSON takes them. version: Saccade's own."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "last_level_cache": last_level_cache(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "instruction_set": sets.in_use(),
        "saccade": version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def last_level_cache(caches: Path = CACHES) -> int | None:
    """Bytes of the largest cache of the first core; None where the system does not tell."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = []
    for file in caches.glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text))
    return max(sizes, default=None)


def keep_freed_memory() -> None:
    """From now on this process keeps what it frees, in pieces of up to 32 MiB (with glibc; elsewhere nothing).

    Otherwise chance decides whether a contender's output lies in pages that are there or in fresh ones: a full float32
    call of 44 ms cost nothing or 256 page faults, 1.2 ms of the system's time.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if tune is not None:
        tune(MAP_THRESHOLD, 32 * 2**20)
        tune(TRIM_THRESHOLD, 2**31 - 1)
