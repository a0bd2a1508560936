"""Norms of the gradients of q, k, v and out, taken where backward passes bring them.

Nothing is kept alive: a hook hangs on a tensor of the model's graph, and goes with it.

Shapes: B items, H heads, L rows or keys, D width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ._record import CallSite, GradientRecord
from ._seen import Used


class _Call(NamedTuple):
    site: CallSite
    step: int


class Gradients:
    """Collects norms while backward runs, and tells of them by call when the pass has ended.

    Args:
        told: gets a `GradientRecord` for each call that a pass reached, in the order of the forward.
    """

    def __init__(self, told: Callable[[GradientRecord], None]) -> None:
        self._told = told
        self._lock = threading.Lock()  # the passes of several devices run on threads of their own
        self._pending: dict[int, dict[_Call, dict[str, Tensor]]] = {}  # by backward pass

    def listen(self, site: CallSite, step: int, used: dict[str, Used]) -> bool:
        """Hang hooks on the tensors of one call. Says whether any of them will have a gradient."""
        call = _Call(site, step)
        needed = {name: one for name, one in used.items() if one.tensor.requires_grad}
        for name, one in needed.items():
            self._hang(call, name, one)
        return bool(needed)

    def _hang(self, call: _Call, name: str, one: Used) -> None:
        seen_as = one.seen_as
        handles: list[RemovableHandle] = []

        def hook(gradient: Tensor) -> None:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self._add(call, name, norms(gradient if seen_as is None else seen_as(gradient)))
            for handle in handles:
                handle.remove()

        handle = one.tensor.register_hook(hook)
        if one.tensor.is_leaf:  # it outlives the graph, and other calls use it
            handles.append(handle)

    def _add(self, call: _Call, name: str, norm: Tensor) -> None:
        # Only a pass knows when it ends, and a pass that fails never does: its norms are dropped with the next one.
        running = torch._C._current_graph_task_id()
        with self._lock:
            new = running not in self._pending
            self._pending.setdefault(running, {}).setdefault(call, {})[name] = norm
        if new:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._ended(running))

    def _ended(self, running: int) -> None:
        with self._lock:
            found = self._pending.pop(running, {})
            self._pending = {task: calls for task, calls in self._pending.items() if task > running}
        for (site, step), gradients in sorted(found.items(), key=lambda item: (item[0].step, item[0].site.layer)):
            self._told(GradientRecord(site.name, site.path, site.layer, site.order, step, gradients))


def norms(gradient: Tensor) -> Tensor:
    """(H,) the L2 norm of (B, H, L, D) for each head, float32 at least."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    four = gradient[(None,) * (4 - gradient.dim())] if gradient.dim() < 4 else gradient.flatten(0, -4)
    return torch.linalg.vector_norm(four, dim=(0, 2, 3), dtype=wide)
