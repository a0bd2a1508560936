"""Tensors that stand for values of a program, and indices into them.

A symbol is an ordinary tensor of ones, whose shape and dtype are those of the value. What PyTorch itself computes with
it says the shape and dtype of a result. A symbol of a shape other than () is an array of values, such as the row
`table[h]` of a captured tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ._aten import ALIASES
from ._language import Builder
from ._values import Array, Index, NotTraceable, Value, kind_of, lowest, remembered, selected


class Recording(Protocol):
    """The parts of a trace in progress that symbols use."""

    build: Builder
    fill: int
    dtypes: set[torch.dtype]  # of floats that were computed

    def table(self, tensor: Tensor) -> Array: ...
    def sized(self, tensor: Tensor) -> None: ...


class Symbol(Tensor):
    """Values of a program, seen as a tensor."""

    recording: Recording
    array: Array

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Symbol({self.array.kind}, {self.array.shape})"


def symbol(recording: Recording, array: Array, dtype: torch.dtype) -> Symbol:
    """An array of values as a tensor."""
    ones = torch.full((), recording.fill, dtype=dtype)
    result: Symbol = Tensor._make_subclass(Symbol, ones.expand(array.shape) if array.shape else ones)
    result.recording = recording
    result.array = array
    return result


def leaf(recording: Recording, name: str, dtype: torch.dtype) -> Symbol:
    """One of b, h, q, k and the score."""
    node = recording.build.leaf(name)
    return symbol(recording, Array((), kind_of(dtype), lambda _: node), dtype)


def name_of(func: Any) -> str:
    """PyTorch's name of the called function; for a property, the name of the property."""
    name = str(getattr(func, "__name__", func)).partition(".")[0]
    return str(func.__self__.__name__) if name == "__get__" else name


def named(func: Any, args: Sequence[Any]) -> tuple[str, Sequence[Any]]:
    """The name of an operation here, and its arguments in the order of the function of that name."""
    name = name_of(func)
    if name.startswith("__") and name.endswith("__"):
        plain = name[2:-2]
        if plain in ALIASES:
            return ALIASES[plain], args
        if plain[:1] == "i" and plain[1:] in ALIASES and plain != "invert":
            return f"{ALIASES[plain[1:]]}_", args
        if plain[:1] == "r" and plain[1:] in ALIASES:
            return ALIASES[plain[1:]], args[::-1]
        return name, args
    if func is Tensor.where:
        return name, (args[1], args[0], *args[2:])
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor):
        return f"{name}imum", args
    if name.endswith("_") and name[:-1] in ALIASES:
        return f"{ALIASES[name[:-1]]}_", args
    return ALIASES.get(name, name), args


def made(shape: Sequence[int], kind: Any, at: Callable[[Index], int]) -> Array:
    """An array whose values are worked out once; a single one at once, in the order in which the function does."""
    if not shape:
        node = at(())
        return Array((), kind, lambda _: node)
    return Array(tuple(shape), kind, remembered(at))


def array_of(recording: Recording, value: Any) -> Array:
    if isinstance(value, Symbol):
        if value.recording is not recording:
            raise NotTraceable("a value kept from an earlier call of the function")
        return value.array
    if isinstance(value, Tensor):
        if value.dim():
            recording.sized(value)
        return recording.table(value)
    build = recording.build
    if isinstance(value, np.generic):
        value = value.item()
    kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
    if not isinstance(value, bool | int | float):
        raise NotTraceable(f"a {type(value).__name__} in arithmetic")
    node = build.const(value, kind)  # type: ignore[arg-type]
    return Array((), kind, lambda _: node)  # type: ignore[arg-type]


def like(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The result of PyTorch for ordinary tensors of these shapes and dtypes."""
    result = func(*map(_shadow, args), **{name: _shadow(value) for name, value in kwargs.items()})
    if not isinstance(result, Tensor):
        raise NotTraceable(f"torch.{getattr(func, '__name__', func)} with these arguments")
    return result


def _shadow(value: Any) -> Any:
    if isinstance(value, Symbol):
        return value
    if isinstance(value, Tensor):
        ones = torch.ones((), dtype=value.dtype)
        return ones.expand(value.shape) if value.dim() else ones
    if isinstance(value, list | tuple):
        return type(value)(map(_shadow, value))
    return torch.device("cpu") if isinstance(value, torch.device) else value


def indexed(recording: Recording, tensor: Tensor, index: Any) -> Symbol:
    """`tensor[index]`, where the tensor or the index holds symbols."""
    parts = list(index) if isinstance(index, tuple) else [index]
    axes, build = tensor.dim(), recording.build
    if any(part is Ellipsis for part in parts):
        at = next(place for place, part in enumerate(parts) if part is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (axes - sum(part is not None and part is not Ellipsis for part in parts))
    parts += [slice(None)] * (axes - sum(part is not None for part in parts))
    if sum(part is not None for part in parts) > axes:
        raise IndexError(f"too many indices for a tensor of {axes} axes")
    places = [_place(recording, part) for part in parts]
    certain = all(isinstance(place, Value) and place.constant is None and lowest(place) >= 0 for place in places)
    # Where every index counts from the start for sure, the sizes of the axes do not matter.
    array = recording.table(tensor) if certain and not isinstance(tensor, Symbol) else array_of(recording, tensor)
    taken = selected(array, build, places)
    return symbol(recording, made(taken.shape, taken.kind, taken.at), tensor.dtype)


def _place(recording: Recording, part: Any) -> Value | slice | None:
    if part is None or isinstance(part, slice):
        return part
    if isinstance(part, bool) or not isinstance(part, int | Tensor):
        raise NotTraceable(f"an index that is a {type(part).__name__}")
    array = array_of(recording, part)
    if array.shape and math.prod(array.shape) != 1:
        raise NotTraceable("an index of several values")
    if array.shape or array.kind != "int":
        raise NotTraceable(f"an index that is a {array.kind} of shape {array.shape}")
    return Value(recording.build, array.at(()))
