"""What Python does not tell of the machine."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """The processor's name, as /proc/cpuinfo has it; elsewhere what `platform` knows."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
