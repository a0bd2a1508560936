"""Whether threads of the process group are alive while a run is on, and when Python's exit functions are done.

torchrun --nproc-per-node 2 two_processes_end.py
"""

from __future__ import annotations

import atexit
import json
from pathlib import Path

import torch
from two_processes import run


def alive() -> bool:
    return any(name.read_text().startswith("pt_gloo") for name in Path("/proc/self/task").glob("*/comm"))


def at_the_end() -> None:
    if main:
        print(json.dumps({"while it runs": before, "at its end": alive()}))


atexit.register(at_the_end)  # the first one registered is the last one called
main = run(torch.float32, 2) is not None
before = alive()
