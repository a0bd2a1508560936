"""The effect of a PyTorch function on scores, and its axis, from its name and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SOFTMAX = frozenset({"softmax", "log_softmax", "softmin"})
TIMES = frozenset({"mul", "multiply", "imul", "rmul"})
OVER = frozenset({"div", "divide", "true_divide", "truediv", "itruediv", "idiv", "rtruediv"})
MINUS = frozenset({"sub", "isub", "subtract"})
PLUS = MINUS | {"add", "iadd", "radd", "rsub"}
CASTS = frozenset("to type type_as float double half bfloat16 contiguous clone detach cpu".split())
EXP = frozenset({"exp", "exp2"})
MASKS = frozenset({"masked_fill", "where", "tril", "triu", "setitem", "index_put", "masked_scatter"})


def kind_of(name: str, args: tuple[Any, ...]) -> str:
    """The effect of a product or sum on scores or weights."""
    numbers = [arg for arg in args if not (isinstance(arg, Tensor) and arg.numel() > 1)]
    if len(numbers) == len(args) - 1:
        return "scale" if name in TIMES | OVER else ""
    if name in OVER:
        return "normalise"
    if name in TIMES:
        return "scale" if any(is_learned(arg) for arg in args[1:]) else "mask"
    return "mask" if any(isinstance(arg, Tensor) and _hides(arg) for arg in args[1:]) else "bias"


def is_of_rows(scores: Any, other: Any) -> bool:
    """Whether `other` has one number for each row of scores, or column."""
    both = isinstance(scores, Tensor) and isinstance(other, Tensor) and other.dim() == scores.dim() > 1
    return both and 1 in (other.shape[-1], other.shape[-2]) and other.numel() < scores.numel()


def as_number(given: Any) -> float | None:
    if isinstance(given, Tensor):
        return float(given) if given.numel() == 1 and not given.is_complex() else None
    return float(given) if isinstance(given, (int, float)) else None


def is_learned(given: Any) -> bool:
    return isinstance(given, Tensor) and given.requires_grad


def _hides(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and bool((tensor.detach() <= -1e3).any())


def is_triangle(given: Any) -> bool:
    """Whether an argument is a causal mask of zeros and ones, which hides nothing when it is added to scores."""
    if not isinstance(given, Tensor) or given.dim() < 2 or given.shape[-1] != given.shape[-2] or given.shape[-1] < 3:
        return False
    numbers = given.detach()
    ones = numbers.abs() == 1
    if not bool((ones | (numbers == 0)).all()):
        return False
    whole = torch.ones_like(ones)
    return any(torch.equal(ones, triangle) for at in (-1, 0, 1) for triangle in (whole.tril(at), whole.triu(at)))


def softmax_axis_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: Tensor) -> int:
    axis = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    if not isinstance(axis, int):  # as F.softmax chooses where it is not told
        axis = 0 if tensor.dim() in (0, 1, 3) else 1
    return axis % max(tensor.dim(), 1)


def axis_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], at: int, default: int) -> int:
    axis = args[at] if len(args) > at else kwargs.get("dim", kwargs.get("axis", default))
    return int(axis)


def axes_of(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: Tensor) -> list[int]:
    at = 2 if name in ("norm", "vector_norm") else 1
    given = args[at] if len(args) > at else kwargs.get("dim", kwargs.get("axis"))
    if given is None:
        return list(range(tensor.dim()))
    return [axis % tensor.dim() for axis in (given if isinstance(given, (tuple, list)) else [given])]
