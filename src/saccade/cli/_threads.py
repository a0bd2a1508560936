"""The threads of a command: how many compute, and how they wait."""

from __future__ import annotations

import os
import sys
from typing import Any

from ..support._shared_cores import shared_cores

MEASURING = ("bench", "compare")  # what is measured waits as in the user's program


def set_threads(context: Any, parameter: Any, count: int | None) -> None:
    """The callback of `--threads`: so many threads compute while the command runs, given or not."""
    if context.resilient_parsing:
        return
    if context.info_name not in MEASURING:
        context.with_resource(shared_cores())
    if count is None:
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
