"""Whether a call fails because a table of learned positions ends: that limit is a part of the design."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...interception._tracing import FunctionCall, FunctionMode, TensorLabels
from ..findings._finding import TargetError
from ._inputs import NamedInputs
from ._steady import steady
from ._subject import Subject

_TAKING = frozenset("getitem narrow select index_select embedding take_along_dim".split())
_TURNING = frozenset(
    """to float double type type_as unsqueeze squeeze expand expand_as view reshape flatten unflatten permute transpose
    swapaxes contiguous clone repeat mul rmul dropout T mT H mH data""".split()
)


def ends_learned_positions(subject: Subject, inputs: NamedInputs) -> bool:
    """Whether a call raises while it looks up rows of a parameter, or combines looked-up rows with other tensors."""
    mode = _PositionRows(inputs["tokens"] if inputs.vocabulary else None)
    try:
        with mode:
            steady(subject, inputs)
    except TargetError:
        return mode.failed
    return False


class _PositionRows(FunctionMode):
    """Follows rows looked up in parameters through transposes and scalings."""

    def __init__(self, tokens: Tensor | None) -> None:
        super().__init__()
        self._tokens = tokens
        self._follows = TensorLabels[str]()  # "table": a whole one that was turned; "taken": rows of one
        self.failed = False

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = FunctionCall(func, args, kwargs)
        taking = call.name in _TAKING and any(map(self._is_table, call.given)) and not self._is_of_tokens(call.given)
        try:
            call.result = func(*args, **kwargs)
        except Exception:
            self.failed = taking or any(self._follows.get(tensor) == "taken" for tensor in call.given)
            raise
        first, others = call.given[:1], call.given[1:]
        alone = all(isinstance(tensor, nn.Parameter) or tensor.dim() == 0 for tensor in others)  # not: gain * x
        if taking or (call.name in _TURNING and any(self._follows.get(tensor) == "taken" for tensor in first)):
            self._follows.put_all(call.made, "taken")
        elif call.name in _TURNING and alone and any(map(self._is_table, first)):
            self._follows.put_all(call.made, "table")
        return call.result

    def _is_table(self, tensor: Tensor) -> bool:
        return self._follows.get(tensor) == "table" or _is_table(tensor)

    def _is_of_tokens(self, given: list[Tensor]) -> bool:
        """Whether rows are taken by token, or all the same one as for a segment, and not by place."""
        if self._tokens is None:
            return False
        tokens = self._tokens.flatten()
        places = [tensor.flatten() for tensor in given if tensor.dtype in (torch.int64, torch.int32)]
        return any(
            tensor.numel() == len(tokens)
            and (torch.equal(tensor.to(tokens), tokens) or bool((tensor == tensor[0]).all()))
            for tensor in places
        )


def _is_table(tensor: Tensor) -> bool:
    """A parameter that is not a mask, which holds two numbers; all zeros are a table before its training."""
    if not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        return False
    return len(tensor.unique()) != 2
