"""`watch(model)`: every attention call in the forwards of a model, observed while a block runs.

Shapes: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

import torch
from torch import nn

from .. import _tap
from . import _thread
from ._aggregates import Running
from ._observe import Asked, Groups, observed, row_samples, step_samples
from ._record import CallRecord, CallSite, OnGradients, OnRecord
from ._walk import Unobserved, Walk


class Watched:
    """What `watch` saw. A context manager; it can be entered again, and goes on counting then.

    Attributes:
        calls: the places where attention was seen, in the order of their first appearance.
        aggregates: by call name, see `Running`.
        unobserved: by name, what was not seen, how often and why.
        steps: forwards begun; `steps_observed` of them were observed.
    """

    def __init__(
        self, model: nn.Module, every: int, asked: Asked, on_record: OnRecord | None, on_gradients: OnGradients | None
    ) -> None:
        self._asked, self._on_record, self._on_gradients = asked, on_record, on_gradients
        self._walk = Walk(model, every, lambda: _thread.begin(self), lambda: _thread.end(self))
        self._open: contextlib.ExitStack | None = None
        self._rows: dict[str, Running] = {}
        self._steps: dict[str, Running] = {}

    def __enter__(self) -> Watched:
        if self._open is not None:
            raise RuntimeError("watch: this watch is on already; make another one")
        with contextlib.ExitStack() as stack:
            stack.callback(self._walk.remove)
            self._walk.install()
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    @property
    def calls(self) -> list[CallSite]:
        return list(self._walk.sites.values())

    @property
    def unobserved(self) -> dict[str, Unobserved]:
        return self._walk.unobserved

    @property
    def steps(self) -> int:
        return self._walk.steps

    @property
    def steps_observed(self) -> int:
        return self._walk.observed

    @property
    def module(self) -> nn.Module | None:
        return self._walk.module

    def missed_here(self, what: str, reason: str) -> None:
        """Something in the module that runs was not seen."""
        self._walk.missed(f"{self._walk.path}: {what}" if self._walk.path else what, reason)

    def observe(self, call: _tap.AttentionCall) -> None:
        """An attention call has happened."""
        site = self._walk.site(call.source)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            try:
                seen, out_norm = observed(call, self._asked)
                self._add(site, seen, out_norm)
            except Exception as error:
                self._walk.missed(site.name, f"{type(error).__name__}: {error}")
                return
        if self._on_record is not None:
            step = self._walk.steps - 1
            self._on_record(CallRecord(site.name, site.path, site.layer, site.order, step, seen, out_norm))

    def _add(self, site: CallSite, seen: Any, out_norm: Any) -> None:
        for held, new in ((self._rows, row_samples(seen)), (self._steps, step_samples(seen, out_norm))):
            held[site.name] = held[site.name].join(new) if site.name in held else new


def watch(
    model: nn.Module, *, every: int = 1, top: int = 0, received: bool = False, groups: Groups | None = None,
    histograms: Any = None, on_record: OnRecord | None = None, on_gradients: OnGradients | None = None,
) -> Watched:  # fmt: skip
    """Observe every attention call in the forwards of `model` while a block runs."""
    return Watched(model, every, Asked(top, received, groups, histograms), on_record, on_gradients)
