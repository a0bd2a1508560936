"""Windows that several processes share: each computes some rows of every window (context parallelism).

Shape legend: B batch, L context, n rows of this process, V vocabulary.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from ....distributed import SequencePlan, context_parallel, plan
from ....operator._masks import Causal
from ....operator.nn.stacks import LayerObserver

_RING = 1024  # rows of a process from which on messages hide behind computing


class SharedWindows:
    """The rows of each window that this process computes.

    Args:
        processes: how many consecutive processes share a window; all processes of the run make this object.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._group, _ = dist.new_subgroups(processes)
        self._plans: dict[int, SequencePlan] = {}

    def predicted(
        self, model: nn.Module, windows: Tensor, observe: LayerObserver | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits (B, n, V) and targets (B, n) of this process's rows of windows (B, L + 1)."""
        length = windows.shape[1] - 1
        if length not in self._plans:
            # Not by a measurement: another layout adds in another order, and a run is to have the same bits again.
            layout = "ring" if length >= _RING * self.processes else "gathered"
            self._plans[length] = plan(Causal(), length, self._group, layout)
        rows = self._plans[length]
        with context_parallel(model, rows):
            inputs = rows.shard(windows[:, :-1], 1)
            logits = model(inputs) if observe is None else model(inputs, observe=observe)
        return logits, rows.shard(windows[:, 1:], 1)
