"""Describes the machine and the versions of a run."""

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
    """The machine and the versions as JSON values. `version` is Saccade's."""
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
    """Size in bytes of the first core's largest cache; None if unknown."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = []
    for file in caches.glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text))
    return max(sizes, default=None)


def keep_freed_memory() -> None:
    """Let the process keep freed memory in pieces of up to 32 MiB (glibc only).

    Otherwise outputs are sometimes allocated in new pages: a float32 call of 44 ms then takes up to 256 page faults,
    1.2 ms of system time.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if tune is not None:
        tune(MAP_THRESHOLD, 32 * 2**20)
        tune(TRIM_THRESHOLD, 2**31 - 1)
