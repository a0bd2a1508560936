"""The two runs that patching compares, and runs with one head's tensor taken from the other run.

Shape legend: B batch, H query heads of a call, L rows, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..intervention import Patch
from ..intervention._edit import Edit
from ..monitoring import KeptCall, Observations, watch
from ._heads import CallHeads
from ._runs import GradientProbe, by_query_head, edited, gradients, no_gradient, run_model, scalar

Metric = Callable[[Any], Any]
Shapes = Mapping[tuple[Any, ...], tuple[int, ...]]  # of an output's tensors, by the names and numbers that lead to them
NO_GRADIENT = no_gradient("metric", "exact")


@dataclass(frozen=True)
class WatchedRun:
    """A run of the model on one input: its metric, the shapes of its output, and the tensors of every call."""

    inputs: Any
    name: str
    metric: float
    shapes: Shapes
    seen: Observations

    @property
    def calls(self) -> tuple[CallHeads, ...]:
        """The calls of the run, in the order in which the model makes them."""
        kept = self.seen.kept
        return tuple(CallHeads(site.name, site.layer, kept[site.name].query.shape[1]) for site in self.seen.calls)


def watched(model: nn.Module, inputs: Any, metric: Metric, name: str) -> WatchedRun:
    """Run the model on `inputs`. ValueError if it ran more than once, or no call could be observed."""
    with watch(model, keep=True, alarms=False) as observed:
        out = run_model(model, inputs, name)
    if len(observed.kept) < max(1, len(observed.calls)):
        lost = "; ".join(f"{call}: {what.reason}" for call, what in observed.unobserved.items())
        raise ValueError(f"model: it has no attention calls that can be patched{': ' if lost else ''}{lost}")
    if observed.steps != 1:
        raise ValueError(f"{name}: expected one forward of the model, got {observed.steps}")
    return WatchedRun(inputs, name, float(scalar(metric(out), "metric")), _shapes(out), observed)


def parts_of(out: Any) -> dict[Any, Any]:
    """The parts of a model's output, by name or number; none of a tensor, or of an object such as a cache."""
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        return {field.name: getattr(out, field.name) for field in dataclasses.fields(out)}
    if isinstance(out, Mapping):
        return dict(out)
    return dict(enumerate(out)) if isinstance(out, (tuple, list)) else {}


def _shapes(out: Any) -> Shapes:
    if isinstance(out, Tensor):
        return {(): tuple(out.shape)}
    parts = parts_of(out)
    return {(key, *path): shape for key in parts for path, shape in _shapes(parts[key]).items()}


@dataclass(frozen=True)
class PatchRuns:
    """The model, the run that is patched (`base`) and the run that the patches come from (`source`)."""

    model: nn.Module
    metric: Metric
    base: WatchedRun
    source: WatchedRun
    what: str
    positions: tuple[int, ...] | None

    @property
    def calls(self) -> tuple[CallHeads, ...]:
        return self.base.calls

    def value(self, *edits: Edit | Mapping[str, Edit]) -> Tensor:
        """The metric of the base input under these edits."""
        with edited(self.model, *edits):
            return scalar(self.metric(run_model(self.model, self.base.inputs, self.base.name)), "metric")

    def patch(self, call: str, head: int) -> dict[str, Edit]:
        """The edit that patches one head from the source."""
        return {call: Patch([head], self.source.seen, self.what, self.positions)}

    def change_by_head(self, call: str, gradient: Tensor) -> Tensor:
        """(H,) first-order changes of the metric, from its gradient (B, H, L, D) by the patched tensor."""
        heads = gradient.shape[1]
        own, other = (_kept(run.seen.kept[call], self.what, heads) for run in (self.base, self.source))
        if self.positions is not None:
            places = torch.tensor(self.positions, device=gradient.device)
            own, other, gradient = (tensor.index_select(2, places) for tensor in (own, other, gradient))
        wide = torch.promote_types(gradient.dtype, torch.float32)
        return ((other - own).to(wide) * gradient.to(wide)).sum((0, 2, 3))


def _kept(call: KeptCall, what: str, heads: int) -> Tensor:
    tensor: Tensor | None = call.out if what == "output" else getattr(call, what)
    assert tensor is not None
    return by_query_head(tensor, heads)


def exact_change(runs: PatchRuns, call: str, head: int) -> float:
    """Change of the metric when the head is patched."""
    return float(runs.value(runs.patch(call, head))) - runs.base.metric


def first_order(runs: PatchRuns) -> Mapping[str, Tensor]:
    """(H,) by call: first-order change of the metric when a head is patched, from one backward pass."""
    probe = GradientProbe(runs.what)
    with torch.enable_grad():
        slopes = gradients(runs.value(probe), probe.zeros, NO_GRADIENT)
    return {name: runs.change_by_head(name, gradient) for name, gradient in slopes.items()}
