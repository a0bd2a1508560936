"""Where and with what a run was made."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

import torch

from . import sets

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


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


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def last_level_cache(caches: Path = CACHES) -> int | None:
    """Bytes of the largest cache of the first core; None where the system does not tell."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = []
    for file in caches.glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text))
    return max(sizes, default=None)
