"""Classifies PyTorch functions by name and arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def name_of(func: Any) -> str:
    """`Tensor.__add__` -> "add", `Tensor.add_` -> "add", `x.mT` -> "mT"."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(func.__self__, "__name__", name)
    return str(name).strip("_")


def writes(func: Any) -> bool:
    """Whether a function writes into its first argument: `mul_`, `scores[...] = x`, `scores += x`."""
    name = getattr(func, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


_WRITING = frozenset("__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ipow__ __imod__".split())


def is_kernel(func: Any) -> bool:
    """Whether a function is a custom operator that computes attention, judged by its name."""
    if not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)):
        return False
    name = str(func).lower()
    return "attention" in name or "attn" in name


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors among arguments or results, including those in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for one in value:
            yield from tensors_in(one)
