"""The lines of a target that make positions, use them and lose them, found by tracing one call.

Shape legend: L length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...interception._tracing import FunctionCall, FunctionMode, TensorLabels
from ...support._restored import seeded
from ..findings._finding import Inapplicable, Location, TargetError
from ..subject._inputs import NamedInputs
from ..subject._operations import location_here, module_here
from ..subject._subject import Subject

_COUNTING = ("arange", "linspace", "range", "cumsum")
_TABLE = r"(^|[._])(pos|position|positions|pe|wpe)([._]|$)|position|pos_"
_EMPTY = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
_FAR = 1e3  # what is larger hides and does not count positions


@dataclass
class PositionLines:
    """Lines, in the order in which they ran."""

    made: list[Location] = field(default_factory=list)  # of the module that asked for it
    used: list[Location] = field(default_factory=list)  # where positions meet the input
    lost: list[Location] = field(default_factory=list)  # where each position becomes the same, or meets no position


def positions(subject: Subject, inputs: NamedInputs, **call: Any) -> PositionLines:
    """The lines of one call; empty if it cannot be traced."""
    copy = subject.fresh()
    tables: list[Tensor] = []
    if copy.module is not None:
        tables += [buffer for buffer in copy.module.buffers() if buffer.is_floating_point()]
        tables += [table for name, table in copy.module.named_parameters() if re.search(_TABLE, name)]
    follower = PositionFollower(inputs.tensors.values(), inputs.length, tables)
    try:
        with seeded(0), torch.no_grad(), follower:
            copy(inputs, **call)
    except (Inapplicable, TargetError):
        pass
    return follower.found


class PositionFollower(FunctionMode):
    """Follows `data` (tensors from the input) and positions: counts of positions, and `tables` of them."""

    def __init__(self, data: Iterable[Tensor], length: int, tables: Iterable[Tensor] = ()):
        super().__init__()
        self.found = PositionLines()
        self._length = length
        self._comes = TensorLabels[str]()  # "data" or "position"
        self._comes.put_all(tables, "position")
        self._comes.put_all(data, "data")

    def sees(self, call: FunctionCall) -> None:
        own = [tensor for tensor in call.given if self._comes.get(tensor) == "position"]
        following = call.name not in _EMPTY and not call.name.startswith("new_")
        if following and any(self._comes.get(tensor) == "data" for tensor in call.given):
            self._comes.put_all(call.made, "data")
            for tensor in own:
                self._meets(tensor)
        elif own:
            before = any(map(self._varies, own))
            self._comes.put_all(call.made, "position")
            if before and call.made and not any(map(self._varies, call.made)):
                self._add(self.found.lost, location_here())
        elif call.name in _COUNTING and call.made:
            self._comes.put_all(call.made, "position")
            self._add(self.found.made, module_here())

    def _meets(self, tensor: Tensor) -> None:
        if tensor.dtype == torch.bool or not tensor.is_floating_point() or (tensor.abs() > _FAR).any():
            return
        if self._varies(tensor):
            self._add(self.found.used, location_here())
        elif tensor.dim():
            self._add(self.found.lost, location_here())

    def _varies(self, tensor: Tensor) -> bool:
        """Whether a tensor differs between positions."""
        axes = [axis for axis, size in enumerate(tensor.shape) if size == self._length]
        return any(bool((tensor != tensor.narrow(axis, 0, 1)).any()) for axis in axes)

    @staticmethod
    def _add(lines: list[Location], line: Location | None) -> None:
        if line is not None:
            lines.append(line)
