"""Where a target makes positions, uses them and loses them: followed through one call by what does not come from its
input.

Shape legend: L length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..._seeding import seeded
from ..findings._finding import Inapplicable, Location, TargetError
from ..target._current_line import location_here, module_here
from ..target._inputs import NamedInputs
from ..target._subject import Subject

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
    """Of one call; nothing where it cannot be followed."""
    one = subject.fresh()
    tables = (
        []
        if one.module is None
        else [
            *(buffer for buffer in one.module.buffers() if buffer.is_floating_point()),
            *(table for name, table in one.module.named_parameters() if re.search(_TABLE, name)),
        ]
    )
    follower = PositionFollower(inputs.tensors.values(), inputs.length, tables)
    try:
        with seeded(0), torch.no_grad(), follower:
            one(inputs, **call)
    except (Inapplicable, TargetError):
        pass
    return follower.found


class PositionFollower(TorchFunctionMode):
    """Follows `data` (what comes from the input) and positions: what counts, and `tables` of them."""

    def __init__(self, data: Iterable[Tensor], length: int, tables: Iterable[Tensor] = ()):
        super().__init__()
        self.found = PositionLines()
        self._length = length
        self._data = {id(one): one for one in data}
        self._own = {id(one): one for one in tables}  # tensors are kept, so that no number is given to two of them

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(getattr(func, "__name__", func)).strip("_")
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        with torch._C.DisableTorchFunction():
            self._sees(name, given, made)
        return result

    def _sees(self, name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        own = [one for one in given if id(one) in self._own]
        if any(id(one) in self._data for one in given) and name not in _EMPTY and not name.startswith("new_"):
            self._data |= {id(one): one for one in made}
            for one in own:
                self._meets(one)
        elif own:
            self._own |= {id(one): one for one in made}
            before = any(self._varies(one) for one in own)
            if before and made and not any(self._varies(one) for one in made):
                self._add(self.found.lost, location_here())
        elif name in _COUNTING and made:
            self._own |= {id(one): one for one in made}
            self._add(self.found.made, module_here())

    def _meets(self, one: Tensor) -> None:
        if one.dtype == torch.bool or not one.is_floating_point() or (one.abs() > _FAR).any():
            return
        if self._varies(one):
            self._add(self.found.used, location_here())
        elif one.dim():
            self._add(self.found.lost, location_here())

    def _varies(self, one: Tensor) -> bool:
        """Whether it is not the same at all positions."""
        axes = [axis for axis, size in enumerate(one.shape) if size == self._length]
        return any(bool((one != one.narrow(axis, 0, 1)).any()) for axis in axes)

    @staticmethod
    def _add(lines: list[Location], line: Location | None) -> None:
        if line is not None:
            lines.append(line)
