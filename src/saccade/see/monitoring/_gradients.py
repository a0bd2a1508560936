"""Norms of the gradients of q, k, v and out, measured during backward passes.

Padding is left out: a loss that reads padded positions sends large gradients through them.

Nothing is kept alive: a hook belongs to a tensor of the model's graph, and is freed with it.

Shape legend: B items, H heads, L rows or keys, D width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ...operator._call import GraphTensor
from ._record import CallSite, GradientRecord


class _CallStep(NamedTuple):
    site: CallSite
    step: int


class GradientNorms:
    """Collects norms during a backward pass, and reports them by call at its end.

    Args:
        receive: called with a `GradientRecord` for each call that a pass reached, in the order of the forward.
        missed: called with what could not be measured, and the reason.
    """

    def __init__(self, receive: Callable[[GradientRecord], None], missed: Callable[[str, str], None]) -> None:
        self._receive, self._missed = receive, missed
        self._lock = threading.Lock()  # each device has its own thread in a backward pass
        self._pending: dict[int, dict[_CallStep, dict[str, Tensor]]] = {}  # by backward pass

    def listen(
        self, site: CallSite, step: int, used: dict[str, GraphTensor], rows: Tensor, keys: Tensor | None
    ) -> bool:
        """Register hooks on the tensors of one call. Returns whether any of them will have a gradient.

        Args:
            rows: (B, Hq, Lq) bool, counted rows.
            keys: (B or 1, H or 1, Lk) bool, keys that a counted row may see; None: all.
        """
        call = _CallStep(site, step)
        real_rows = None if bool(rows.all()) else rows
        needed = {name: used_tensor for name, used_tensor in used.items() if used_tensor.tensor.requires_grad}
        for name, used_tensor in needed.items():
            self._hang(call, name, used_tensor, keys if name in ("key", "value") else real_rows)
        return bool(needed)

    def _hang(self, call: _CallStep, name: str, tensor: GraphTensor, real: Tensor | None) -> None:
        seen_as = tensor.seen_as
        handles: list[RemovableHandle] = []

        def hook(gradient: Tensor) -> None:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                try:
                    norm = norms(gradient if seen_as is None else seen_as(gradient), real)
                except Exception as error:  # must not end the backward pass
                    self._missed(f"{call.site.name}: gradient of {name}", f"{type(error).__name__}: {error}")
                else:
                    self._add(call, name, norm)
            for handle in handles:
                handle.remove()

        handle = tensor.tensor.register_hook(hook)
        if tensor.tensor.is_leaf:  # it outlives the graph and belongs to other calls, too
            handles.append(handle)

    def _add(self, call: _CallStep, name: str, norm: Tensor) -> None:
        # Only a pass knows when it ends, and a failed pass never ends: its norms are dropped with the next one.
        running = torch._C._current_graph_task_id()
        with self._lock:
            new = running not in self._pending
            self._pending.setdefault(running, {}).setdefault(call, {})[name] = norm
        if new:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._ended(running))

    def _ended(self, running: int) -> None:
        with self._lock:
            by_call = self._pending.pop(running, {})
            self._pending = {task: calls for task, calls in self._pending.items() if task > running}
        for (site, step), gradients in sorted(by_call.items(), key=lambda item: (item[0].step, item[0].site.layer)):
            self._receive(GradientRecord(site.name, site.path, site.layer, site.order, step, gradients))


def norms(gradient: Tensor, real: Tensor | None = None) -> Tensor:
    """(H,) the L2 norm of (B, H, L, D) for each head over its rows or keys without padding, at least float32.

    Args:
        real: (B or 1, H or 1, L) bool, of the call; the tensor may have fewer items or heads. None: all.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    four = gradient[(None,) * (4 - gradient.dim())] if gradient.dim() < 4 else gradient.flatten(0, -4)
    fitted = None if real is None else _fitted(real, four.shape)
    if fitted is not None:
        four = torch.where(fitted[..., None], four, 0)
    return torch.linalg.vector_norm(four, dim=(0, 2, 3), dtype=wide)


def _fitted(real: Tensor, shape: torch.Size) -> Tensor | None:
    """`real` for a tensor that is shared by items or heads of the call; None for another layout."""
    items, heads, length = shape[:3]
    if items == 1:
        real = real.any(0, keepdim=True)
    if 0 < heads < real.shape[1] and real.shape[1] % heads == 0:
        real = real.unflatten(1, (heads, -1)).any(2)
    fits = real.shape[0] in (1, items) and real.shape[1] in (1, heads) and real.shape[2] == length
    return real if fits else None
