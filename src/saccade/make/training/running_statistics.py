"""Norms with running statistics (batch norm), whose results depend on how a batch is split."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .settings import Settings

if TYPE_CHECKING:
    from accelerate import Accelerator


def running_norms(model: nn.Module) -> list[_NormBase]:
    """Norms that normalise by their batch in training mode, and by running statistics otherwise."""
    return [part for part in model.modules() if isinstance(part, _NormBase) and part.track_running_stats]


def frozen_norms(model: nn.Module) -> list[_NormBase]:
    """Norms without trainable weights, whose running statistics must not change either."""
    return [norm for norm in running_norms(model) if not _learns(norm)]


def _learns(norm: _NormBase) -> bool:
    parameters = list(norm.parameters(recurse=False))
    return not parameters or any(parameter.requires_grad for parameter in parameters)


def share_statistics(accelerator: Accelerator, model: nn.Module) -> None:
    """Copy the running statistics of the main process to all: each process updated its own from its rows."""
    if accelerator.num_processes == 1:
        return
    for norm in running_norms(model):
        for kept in norm.buffers(recurse=False):
            torch.distributed.broadcast(kept, src=0)


def parts_told(model: nn.Module, settings: Settings, processes: int) -> str | None:
    """A warning if a step is split into parts, since batch norm then uses the statistics of each part; else None."""
    parts, learning = settings.execution.accumulate * processes, len(running_norms(model)) > len(frozen_norms(model))
    if parts == 1 or not learning:
        return None
    return (
        f"batch norm: each of {parts} parts of a step is normalised by the mean and variance of its own "
        f"{-(-settings.batch // parts)} items, so results differ from undivided batches of {settings.batch}"
    )
