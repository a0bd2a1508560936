"""The threads of a command: how many compute, and how they wait for one another.

OpenMP's threads spin at the end of every region. Where another process holds a core, they spin for its whole time
slice, and a step that takes milliseconds takes seconds. Threads that sleep instead leave the core to the one they wait
for. OpenMP reads its variables when PyTorch is loaded, so they are set before.
"""

from __future__ import annotations

import os
import sys
from typing import Any

MEASURING = ("bench", "compare")  # they time PyTorch as a program of the user's would run it
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_asleep() -> None:
    """Let this process's threads sleep while they wait, unless the user has set how, or PyTorch is there already."""
    measures = sys.argv[1:2] and sys.argv[1] in MEASURING
    if not measures and "torch" not in sys.modules and not any(name in os.environ for name in WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def set_threads(context: Any, parameter: Any, count: int | None) -> None:
    """The callback of `--threads`: so many threads compute while the command runs."""
    if count is None or context.resilient_parsing:
        return
    if count < 1:
        raise ValueError(f"--threads: must be at least 1, got {count}")
    if "torch" not in sys.modules:  # which reads this when it is imported: help and usage errors need no PyTorch
        os.environ["OMP_NUM_THREADS"] = str(count)
        return
    import torch

    before = torch.get_num_threads()
    context.call_on_close(lambda: torch.set_num_threads(before))
    torch.set_num_threads(count)
