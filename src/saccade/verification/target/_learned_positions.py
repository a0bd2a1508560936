"""Whether a call fails because a table of learned positions ends: that limit is a part of the design."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..findings._finding import TargetError
from ._inputs import NamedInputs
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


def ends_learned_positions(subject: Subject, inputs: NamedInputs) -> bool:
    """Whether the call raises where rows of a parameter are taken, or where those that were taken meet something."""
    mode = _PositionRows(inputs["tokens"] if inputs.vocabulary else None)
    try:
        with mode:
            steady(subject, inputs)
    except TargetError:
        return mode.failed
    return False


class _PositionRows(TorchFunctionMode):
    """Follows what is taken out of parameters by place, and no further than it is turned and scaled."""

    def __init__(self, tokens: Tensor | None) -> None:
        super().__init__()
        self._tokens = tokens
        self._tables: dict[int, Tensor] = {}  # whole ones that were turned; kept alive, so that no other takes the id
        self._taken: dict[int, Tensor] = {}
        self.failed = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = list(_tensors((args, kwargs)))
        name = getattr(func, "__name__", "")
        taking = name in _TAKING and any(map(self._is_table, given)) and not self._is_of_tokens(given)
        try:
            result = func(*args, **(kwargs or {}))
        except Exception:
            self.failed = taking or any(id(one) in self._taken for one in given)
            raise
        turned = name in _TURNING and any(id(one) in self._taken for one in given[:1])
        for one in _tensors(result) if taking or turned else ():
            self._taken[id(one)] = one
        alone = all(isinstance(one, nn.Parameter) or one.dim() == 0 for one in given[1:])  # not: gain * x
        if name in _TURNING and not turned and alone and any(map(self._is_table, given[:1])):
            self._tables.update({id(one): one for one in _tensors(result)})
        return result

    def _is_table(self, tensor: Tensor) -> bool:
        return id(tensor) in self._tables or _is_table(tensor)

    def _is_of_tokens(self, given: list[Tensor]) -> bool:
        """Whether rows are taken by token, or all the same one as for a segment, and not by place."""
        if self._tokens is None:
            return False
        tokens = self._tokens.flatten()
        places = [one.flatten() for one in given if one.dtype in (torch.int64, torch.int32)]
        return any(
            one.numel() == len(tokens) and (torch.equal(one.to(tokens), tokens) or bool((one == one[0]).all()))
            for one in places
        )


def _is_table(tensor: Tensor) -> bool:
    """A parameter that is not a mask, which holds two numbers; all zeros are a table before its training."""
    if not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        return False
    return len(tensor.unique()) != 2


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
