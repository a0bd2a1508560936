"""Copies of modules to run and to change."""

from __future__ import annotations

import copy
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def copied(module: nn.Module) -> nn.Module:
    """A copy. What a module keeps with a graph (the weights of its last call, say) is copied without it.

    A function that a module keeps, and that reaches the module's parts as its variables, reaches the copy's:
    `copy.deepcopy` leaves functions as they are, and the copy would compute with parts of the original.
    """
    held = [value for one in module.modules() for value in tree_leaves(dict(vars(one)))]
    bound = [one for one in held if isinstance(one, Tensor) and not one.is_leaf]
    memo: dict[int, Any] = {id(one): one.detach().clone() for one in bound}
    new = copy.deepcopy(module, memo)
    for part in new.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, FunctionType) and any(_kept(cell, memo) for cell in value.__closure__ or ()):
                object.__setattr__(part, name, _rebound(value, memo))
    return new


def _kept(cell: CellType, memo: dict[int, Any]) -> bool:
    """Whether a variable of a function is something that was copied."""
    try:
        value = cell.cell_contents
    except ValueError:  # it is not bound
        return False
    return isinstance(value, (nn.Module, Tensor)) and id(value) in memo


def _rebound(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """The function over what was made of its variables."""
    cells = tuple(
        CellType(memo[id(cell.cell_contents)]) if _kept(cell, memo) else cell for cell in function.__closure__ or ()
    )
    new = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    new.__kwdefaults__ = function.__kwdefaults__
    return new
