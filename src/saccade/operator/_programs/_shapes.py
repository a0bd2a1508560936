"""Calls of PyTorch that change shapes: views, reductions over few values, stacks, and lookups by function."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._arrays import Recording, Symbol, array_of, like, made, named, symbol
from ._aten import REDUCTIONS
from ._language import Builder
from ._values import Array, Index, NotTraceable, Value, from_start, kind_of

_MOST = 64  # entries that a reduction is unrolled over
VIEWS = (
    "view reshape expand permute transpose t unsqueeze squeeze select narrow ravel flatten unflatten unbind split "
    "chunk movedim swapaxes diagonal expand_as view_as T mT broadcast_to".split()
)


def view(recording: Recording, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Symbol:
    """Another shape of the same entries: PyTorch says where in the memory of a contiguous array each of them lies."""
    array, build = array_of(recording, args[0]), recording.build
    count = math.prod(array.shape)
    source = torch.empty(count, dtype=torch.bool).view(array.shape)
    result = func(source, *args[1:], **kwargs)
    if isinstance(result, list | tuple):
        return type(result)(_placed(recording, array, part, args[0].dtype, build) for part in result)  # type: ignore
    return _placed(recording, array, result, args[0].dtype, build)


def iterated(recording: Recording, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return iter(view(recording, torch.unbind, args, kwargs))


def _placed(recording: Recording, array: Array, result: Tensor, dtype: torch.dtype, build: Builder) -> Symbol:
    strides, start = result.stride(), int(result.storage_offset())

    def at(index: Index) -> int:
        place = _place_in_memory(build, [(step, node) for step, node in zip(strides, index, strict=True)], start)
        return array.at(_split(place, array.shape))

    return symbol(recording, made(result.shape, array.kind, at), dtype)


def _place_in_memory(build: Builder, parts: Sequence[tuple[int, int]], start: int) -> Value:
    """`start` plus products of a number and a node."""
    total = Value(build, build.const(start, "int"))
    for step, node in parts:
        if step:
            total = Value(build, node) * step + total
    return total


def _split(place: Value, shape: tuple[int, ...]) -> Index:
    """A place in a contiguous array as an index for each axis."""
    index: list[int] = []
    for size in reversed(shape):
        if size == 1:
            index.append(place.const(0).node)
        elif len(index) + 1 == len(shape):
            index.append(place.node)
        else:
            index.append(place.two("mod", size).node)
            place = place.two("floor_div", size)
    return tuple(reversed(index))


def stacked(recording: Recording, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Symbol:
    shaped = like(func, args, kwargs)
    axis = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % shaped.dim()
    parts, build, kind = [array_of(recording, part) for part in args[0]], recording.build, kind_of(shaped.dtype)

    def at(index: Index) -> int:
        which, rest = Value(build, index[axis]), (*index[:axis], *index[axis + 1 :])
        result = Value(build, parts[-1].at(rest)).to(kind)
        for place in range(len(parts) - 2, -1, -1):
            result = which.equals(place).where(Value(build, parts[place].at(rest)).to(kind), result)
        return result.node

    return symbol(recording, made(shaped.shape, kind, at), shaped.dtype)


def reduced(recording: Recording, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Symbol:
    name = named(func, args)[0]
    shaped, build = like(func, args, kwargs), recording.build
    array, kind = array_of(recording, args[0]), kind_of(shaped.dtype)
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    axes = tuple(range(len(array.shape))) if given is None or given == [] else given
    axes = tuple(axis % max(len(array.shape), 1) for axis in ((axes,) if isinstance(axes, int) else axes))
    kept = (len(args) > 2 and bool(args[2])) or bool(kwargs.get("keepdim"))
    sizes = [array.shape[axis] for axis in axes] if array.shape else []
    if math.prod(sizes) > _MOST:
        raise NotTraceable(f"torch.{name} over {math.prod(sizes)} values (at most {_MOST})")

    def at(index: Index) -> int:
        free = iter(index)
        own: list[Any] = [
            (next(free) if kept else None) if axis in axes else next(free) for axis in range(len(array.shape))
        ]
        values = []
        for places in itertools.product(*map(range, sizes)):
            for axis, place in zip(axes, places, strict=False):
                own[axis] = build.const(place, "int")
            value = Value(build, array.at(tuple(own)))
            values.append(value.to("bool") if name in ("any", "all") else value.to(kind))
        return _over(name, values, build).to(kind).node

    return symbol(recording, made(shaped.shape, kind, at), shaped.dtype)


def _over(name: str, values: Sequence[Value], build: Builder) -> Value:
    start, step = REDUCTIONS[name]
    if not values:
        if start is None:
            raise NotTraceable(f"torch.{name} of nothing")
        return Value(build, build.const(start, "bool" if isinstance(start, bool) else "float"))
    total = values[0]
    for value in values[1:]:
        total = step(total, value)
    return total / len(values) if name == "mean" else total


def gathered(recording: Recording, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Symbol:
    """`table[index]` in its other forms: take (of all entries), embedding and index_select (of rows)."""
    name = named(func, args)[0]
    table, index = args[0], args[2 if name == "index_select" else 1]
    if func is F.embedding:
        table, index = index, table
    options = (*args[3:], *kwargs.values(), args[1] if name == "index_select" else 0)
    if any(isinstance(option, Tensor) or option not in (None, False, 0, -1, 2.0) for option in options):
        raise NotTraceable(f"torch.{name} with these arguments")
    entries, places, build = array_of(recording, table), array_of(recording, index), recording.build
    rows = (1,) if name == "index_select" and not places.shape else places.shape

    def at(given: Index) -> int:
        own, rest = given[: len(rows)], given[len(rows) :]
        place = Value(build, places.at(own if places.shape else ()))
        if name == "take":
            return entries.at(_split(from_start(place, math.prod(entries.shape)), entries.shape))
        return entries.at((from_start(place, entries.shape[0]).node, *rest))

    shape = rows if name == "take" else (*rows, *entries.shape[1:])
    return symbol(recording, made(shape, entries.kind, at), table.dtype)
