"""Whether a call fails because a table of learned positions ends: that limit is a part of the design."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..findings._finding import TargetError
from ._inputs import Inputs
from ._steady import steady
from ._subject import Subject

_TAKING = ("__getitem__", "narrow", "select", "index_select", "embedding", "take_along_dim")
_TURNING = (
    "to",
    "float",
    "double",
    "type",
    "type_as",
    "unsqueeze",
    "squeeze",
    "expand",
    "expand_as",
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "permute",
    "transpose",
    "swapaxes",
    "contiguous",
    "clone",
    "repeat",
    "mul",
    "__mul__",
    "__rmul__",
    "dropout",
    "__get__",
)


def ends_learned_positions(subject: Subject, inputs: Inputs) -> bool:
    """Whether the call raises where rows of a parameter are taken, or where those that were taken meet something."""
    mode = _Rows()
    try:
        with mode:
            steady(subject, inputs)
    except TargetError:
        return mode.failed
    return False


class _Rows(TorchFunctionMode):
    """Follows what is taken out of parameters by place, and no further than it is turned and scaled."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: dict[int, Tensor] = {}  # kept alive, so that no other tensor takes the id
        self.failed = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = list(_tensors((args, kwargs)))
        name = getattr(func, "__name__", "")
        taking = name in _TAKING and any(map(_is_table, given))
        try:
            result = func(*args, **(kwargs or {}))
        except Exception:
            self.failed = taking or any(id(one) in self._taken for one in given)
            raise
        turned = name in _TURNING and any(id(one) in self._taken for one in given[:1])
        for one in _tensors(result) if taking or turned else ():
            self._taken[id(one)] = one
        return result


def _is_table(tensor: Tensor) -> bool:
    """A parameter that is not a mask."""
    if not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        return False
    return not bool(((tensor == 0) | (tensor == 1) | (tensor == -torch.inf)).all())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
