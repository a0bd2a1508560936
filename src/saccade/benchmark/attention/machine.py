"""The machine and the versions of a run, and the machine's limits: operations, bf16 products and bytes read per second.

Limits are measured in every round between the contenders, so that clock changes and other load affect both.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...support._machine import processor
from . import sets
from .cases import Case, CaseInputs
from .timing import Meter

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
TRIM_THRESHOLD, MAP_THRESHOLD = -1, -3  # names of mallopt(3)
MILLISECONDS = 10.0
READING, MULTIPLY_ADDS, DOT_PRODUCTS = "reading keys and values", "float32 multiply-adds", "bf16 dot products"


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


@dataclass(frozen=True)
class Limit:
    """name: what is measured, "float32 multiply-adds (avx2)"; unit: "FLOP/s" or "B/s"."""

    name: str
    unit: str
    meter: Meter


def limits_of(inputs: CaseInputs, threads: int) -> list[Limit]:
    """The limits for a case with the active instruction set, the relevant one first.

    Limits that cannot be measured, such as without native kernels, are missing. `own_limit` selects the one that a case
    is compared with.
    """
    case = inputs.case
    limits = []
    if case.stage == "decode":
        meter = sets.reading((inputs.key.detach(), inputs.value.detach()), threads)
        limits += [] if meter is None else [Limit(READING, "B/s", meter)]
    name = sets.in_use()
    if name is None or case.dtype == "float64":
        return limits
    for dtype, what in _kinds(case):
        meter = sets.peak(dtype, threads, MILLISECONDS)
        if meter is not None:
            limits.append(Limit(f"{what} ({name})", "FLOP/s", meter))
    return limits


def own_limit(case: Case, limits: Sequence[Limit]) -> Limit | None:
    """The limit to compare a case with: reading for decoding, otherwise the fastest products of its dtype."""
    unit = "B/s" if case.stage == "decode" else "FLOP/s"
    return next((limit for limit in limits if limit.unit == unit), None)


def _kinds(case: Case) -> list[tuple[str, str]]:
    """Kinds of products, fastest first; instruction sets without bf16 products compute in float32."""
    wide = ("float32", MULTIPLY_ADDS)
    return [("bfloat16", DOT_PRODUCTS), wide] if case.dtype == "bfloat16" else [wide]
