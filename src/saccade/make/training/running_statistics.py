"""Norms that keep running statistics (batch norm): what of them hangs on how a step is split."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .settings import Settings

if TYPE_CHECKING:
    from accelerate import Accelerator


def running_norms(model: nn.Module) -> list[_NormBase]:
    """The norms that compute by their batch while learning, and by what they have kept of batches otherwise."""
    return [part for part in model.modules() if isinstance(part, _NormBase) and part.track_running_stats]


def frozen_norms(model: nn.Module) -> list[_NormBase]:
    """Those whose weights do not learn: what they have kept must not move either."""
    return [norm for norm in running_norms(model) if not _learns(norm)]


def _learns(norm: _NormBase) -> bool:
    parameters = list(norm.parameters(recurse=False))
    return not parameters or any(parameter.requires_grad for parameter in parameters)


def share_statistics(accelerator: Accelerator, model: nn.Module) -> None:
    """Give all processes what the main one's norms have kept: each has kept it of its own rows of the last step."""
    if accelerator.num_processes == 1:
        return
    for norm in running_norms(model):
        for kept in norm.buffers(recurse=False):
            torch.distributed.broadcast(kept, src=0)


def parts_told(model: nn.Module, settings: Settings, processes: int) -> str | None:
    """A line where parts of a step have statistics of their own, so that it is not the step of the undivided batch."""
    parts, learning = settings.execution.accumulate * processes, len(running_norms(model)) > len(frozen_norms(model))
    if parts == 1 or not learning:
        return None
    return (
        f"batch norm: each of {parts} parts of a step has means and variances of its own {-(-settings.batch // parts)} "
        f"items, so the model learns something else than from undivided batches of {settings.batch}"
    )
