"""Running a model for one number: in evaluation mode, with edits of calls by name, and edits that read gradients.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...operator._call import AttentionCall
from ...operator._masks._data import describe
from ..intervention import Intervention
from ..intervention._choice import Choice
from ..intervention._edit import CallPart, CallPlace, Edit, Stage
from ..intervention._intervene import CallName
from ._heads import CallHeads

ALL = Choice(None, None)
Progress = Callable[[int, int], None]
K = TypeVar("K", bound=Hashable)


def run_model(model: nn.Module, inputs: Any, name: str) -> Any:
    """The output for keyword arguments, a tuple of arguments, one argument, or a function of the model."""
    if isinstance(inputs, str):
        raise TypeError(f"{name}: expected inputs of the model, such as token ids, got text; tokenize it first")
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    if callable(inputs) and not isinstance(inputs, (Tensor, nn.Module)):
        return inputs(model)
    return model(inputs)


@contextmanager
def edited(model: nn.Module, *edits: Edit | Mapping[str, Edit]) -> Iterator[Intervention]:
    """Apply edits to all calls of the model, or to single calls by name."""
    edits_by_layer: list[tuple[str | CallName, Edit]] = []
    for edit in edits:
        if isinstance(edit, Edit):
            edits_by_layer.append(("*", edit))
        else:
            edits_by_layer += [(CallName(name), each) for name, each in edit.items()]
    run = Intervention(model, edits_by_layer)
    run.may_idle = True  # the caller has its own message for calls that did not run
    with run:
        yield run


def scalar(result: Any, name: str) -> Tensor:
    """The number that a user's function returned. TypeError or ValueError if it is not a finite scalar."""
    if not isinstance(result, Tensor):
        if isinstance(result, bool) or not isinstance(result, (int, float)):
            raise TypeError(f"{name}: expected a scalar, got {describe(result)}")
        result = torch.tensor(float(result), dtype=torch.float64)
    if result.numel() != 1 or result.is_complex():
        raise ValueError(f"{name}: expected a scalar, got {describe(result)}")
    if not math.isfinite(number := float(result.detach())):
        raise ValueError(f"{name}: expected a finite number, got {number}")
    return result.reshape(())


def no_gradient(name: str, instead: str) -> str:
    """The error message for a user's number without gradient."""
    return (
        f"{name}: no gradient reaches the heads: it is computed without gradients, detached, converted to a Python "
        f"number, or does not depend on the heads; by={instead!r} needs no gradient"
    )


def gradients(value: Tensor, of: Mapping[K, Tensor], none: str, *, again: bool = False) -> dict[K, Tensor]:
    """The derivative of `value` by each tensor, 0 where it does not depend on it. ValueError (`none`) if all are 0.

    With `again` the graph is kept for another backward pass.
    """
    slopes: tuple[Tensor | None, ...] = (None,) * len(of)
    if value.requires_grad and of:
        slopes = torch.autograd.grad(value, list(of.values()), allow_unused=True, retain_graph=again)
    if all(slope is None for slope in slopes):
        raise ValueError(none)
    return {
        key: torch.zeros_like(of[key]) if slope is None else slope.detach()
        for key, slope in zip(of, slopes, strict=True)
    }


@dataclass(frozen=True, eq=False)
class CallList(Edit):
    """Changes nothing, and lists the calls.

    Attributes:
        found: by call name.
        items: batch size of the latest call, by call name.
    """

    found: dict[str, CallHeads] = field(default_factory=dict)
    items: dict[str, int] = field(default_factory=dict)
    choice: Choice = ALL

    def _output(self, out: Tensor, call: AttentionCall, place: CallPlace) -> Tensor:
        self.items[place.name] = out.shape[0]
        self.found.setdefault(place.name, CallHeads(place.name, place.site.layer, out.shape[1]))
        return out


@dataclass(frozen=True, eq=False)
class Gates(Edit):
    """A factor of 1 on the output of each head, to take its gradient.

    Attributes:
        gates: (Hq,) by call name, made at the first call.
    """

    gates: dict[str, Tensor] = field(default_factory=dict)
    choice: Choice = ALL

    def _output(self, out: Tensor, call: AttentionCall, place: CallPlace) -> Tensor:
        if place.name not in self.gates:
            wide = torch.promote_types(out.dtype, torch.float32)
            self.gates[place.name] = torch.ones(out.shape[1], dtype=wide, device=out.device, requires_grad=True)
        return out * self.gates[place.name].to(out.dtype)[:, None, None]


@dataclass(frozen=True, eq=False)
class GradientProbe(Edit):
    """Adds 0 to the queries, keys, values or outputs of calls; the gradient of that 0 is the result.

    Args:
        what: "output", "query", "key" or "value"; keys and values are repeated for each query head.
        heads: by call name, heads whose own gradient stops here: only the 0 passes it on. None: all calls, and no
            gradient stops.

    Attributes:
        zeros: (B, Hq, L, D) by call name.
        seen: the tensors themselves, with their graphs.
    """

    what: str
    heads: Mapping[str, tuple[int, ...]] | None = None
    zeros: dict[str, Tensor] = field(default_factory=dict)
    seen: dict[str, Tensor] = field(default_factory=dict)
    choice: Choice = ALL

    @property
    def _stage(self) -> Stage:
        return {"output": Stage.OUTPUT, "value": Stage.VALUES}.get(self.what, Stage.PRODUCTS)

    def _parts(self, part: CallPart, place: CallPlace) -> list[CallPart]:
        return [replace(part, call=self._probed(part.call, place))]

    def _output(self, out: Tensor, call: AttentionCall, place: CallPlace) -> Tensor:
        return self._with_zero(out, place) if self.what == "output" else out

    def _probed(self, call: AttentionCall, place: CallPlace) -> AttentionCall:
        if self.what == "output":
            return call
        if self.heads is not None and place.name not in self.heads:
            return call
        heads = call.query.shape[1]
        wide = replace(call, key=by_query_head(call.key, heads), value=by_query_head(call.value, heads))
        return replace(wide, **{self.what: self._with_zero(getattr(wide, self.what), place)})  # type: ignore[arg-type]

    def _with_zero(self, tensor: Tensor, place: CallPlace) -> Tensor:
        self.seen.setdefault(place.name, tensor)
        if place.name not in self.zeros:
            self.zeros[place.name] = torch.zeros_like(tensor, requires_grad=True)
        if self.heads is not None:
            own = torch.zeros(tensor.shape[1], dtype=torch.bool, device=tensor.device)
            own[list(self.heads[place.name])] = True
            tensor = torch.where(own[:, None, None], tensor.detach(), tensor)
        return tensor + self.zeros[place.name]


def by_query_head(tensor: Tensor, heads: int) -> Tensor:
    """Queries, or keys and values (B, Hkv, L, D), repeated for each query head."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)
