"""Score programs for the native kernels: instructions by level, registers, and tables as addresses.

Each value is computed at the lowest level it can be: once for an item and head, a row, a key, a distance, or each pair
(`_program_writer.py`). Here indices of tables become flat, and gradients get their places.

Shape legend: B batch, Hq query heads, Lq / Lk lengths.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._biases import Placement
from ..._programs._language import (
    LEAVES,
    Builder,
    Node,
    Program,
    bounds,
    gradient,
)
from ..._scores._program import ProgramBias
from ._program_writer import NONE, TableForm, Writer

_LIMIT = 2.0**31
_MOST_PULLS = 8


class Extent(NamedTuple):
    """The ranges of the leaves of a program: numbers of items and heads, first and last query position and key
    index."""

    batch: int
    heads: int
    rows: tuple[int, int]
    keys: tuple[int, int]


class Unsayable(ValueError):
    """The kernels cannot run this program; the message says why."""


def forms_of(
    bias: ProgramBias, sizes: tuple[int, int, int, int], placement: Placement, origin: int
) -> tuple[tuple[TableForm, ...], Extent]:
    """The tables and the extent of a call of these sizes (B, Hq, Lq, Lk)."""
    batch, heads, rows, keys = sizes
    low, high = (placement, placement) if isinstance(placement, int) else (int(end) for end in placement.aminmax())
    tables = tuple(TableForm(table.kind, table.shape, table.start, _ends(table.tensor)) for table in bias.tables)
    return tables, Extent(batch, heads, (low + origin, rows - 1 + high + origin), (origin, origin + keys - 1))


def _ends(table: Tensor | None) -> tuple[int, int]:
    if table is None or table.dtype == torch.bool or not table.numel():
        return 0, 1
    low, high = table.aminmax()
    return int(low), int(high)


def narrow(table: Tensor) -> Tensor:
    """A table of ints in 32 bits, or of bools."""
    return table if table.dtype in (torch.bool, torch.int32) else table.to(torch.int32)


def unsayable(bias: ProgramBias, sizes: tuple[int, int, int, int], placement: Placement, origin: int) -> str | None:
    """Why the kernels cannot run this program, or None."""
    if any(not math.prod(table.shape) for table in bias.tables):
        return "a table of the score function is empty"
    tables, extent = forms_of(bias, sizes, placement, origin)
    if any(not -_LIMIT <= end < _LIMIT for table in tables for end in table.ends):
        return "a table of the score function holds ints beyond 32 bits"
    try:
        compiled(bias.program, tables, extent, False)
        compiled(bias.program, tables, extent, True)
    except Unsayable as error:
        return f"the score function is not for the kernels: {error}"
    return None


class Compiled(NamedTuple):
    """A program as the kernels take it."""

    module_program: Any
    # Backward: whether the gradients that are added to in place have entries of their own for each item, for each head.
    by_item: bool = True
    by_head: bool = True


@lru_cache(256)
def compiled(program: Program, tables: tuple[TableForm, ...], extent: Extent, derivative: bool) -> Compiled:
    """The program that the kernels run in the forward pass, or with `derivative` in the backward pass."""
    flat = _flattened(program, tables, extent)
    if derivative:
        return _backward(flat, tables, extent)
    result, *outside = flat.outputs
    writer = Writer(flat, keeps_score=False)
    out = writer.output(result)
    wrong = writer.output(outside[0]) if outside else NONE
    return Compiled(module.ScoreProgram(writer.numbers(tables, out, wrong, NONE, [])))


def _backward(flat: Program, tables: tuple[TableForm, ...], extent: Extent) -> Compiled:
    nodes = flat.nodes
    loads = [n for n in flat.loads if nodes[n].kind == "float"]
    if len(loads) > _MOST_PULLS:
        raise Unsayable(f"it reads tables of floats in {len(loads)} places, more than the {_MOST_PULLS} of the kernels")
    score = [n for n, node in enumerate(nodes) if node.op == "score"]
    in_place = _in_place(flat, loads, extent)
    places = [line.start if (line := in_place.get(int(nodes[n].value or 0))) else nodes[n].args[0] for n in loads]
    whole = gradient(flat, [*score, *loads], also=places)
    writer = Writer(whole, keeps_score=True)
    result, *rest = whole.outputs
    out = writer.output(result)
    slope = writer.output(rest[0]) if score else writer.constant(0.0)
    pulls, own = [], _places_in_copy([int(nodes[n].value or 0) for n in loads], tables, in_place)
    factors, places = rest[len(score) : len(score) + len(loads)], list(rest[len(score) + len(loads) :])
    for n, factor, place in zip(loads, factors, places, strict=True):
        number = int(nodes[n].value or 0)
        table = tables[number]
        at = writer.output(place)
        pulls.append((at, writer.output(factor), table.start, math.prod(table.shape), own.get(number, -1)))
    numbers = writer.numbers(tables, out, NONE, slope, pulls)
    by_item, by_head = (all(getattr(line, name) for line in in_place.values()) for name in ("by_item", "by_head"))
    return Compiled(module.ScoreProgram(numbers), by_item, by_head)


def _places_in_copy(loads: Sequence[int], tables: tuple[TableForm, ...], in_place: dict[int, _Line]) -> dict[int, int]:
    """The start of each table in a task's copy of the gradients. Tables that are added to in place have no copy."""
    places: dict[int, int] = {}
    end = 0
    for number in loads:
        if number not in places and number not in in_place:
            places[number] = end
            end += math.prod(tables[number].shape)
    return places


# --- entries along the keys -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    """A load whose index is start + k: `start` is a node without k. `pairs`: no two pairs of a head read one entry."""

    start: int
    pairs: bool
    by_item: bool
    by_head: bool


def _in_place(flat: Program, loads: Sequence[int], extent: Extent) -> dict[int, _Line]:
    """The tables whose gradients tasks may add to side by side: each is read once, along the keys, and pairs differ."""
    numbers = [int(flat.nodes[n].value or 0) for n in loads]
    lines = {
        number: _line(flat, n, extent) for number, n in zip(numbers, loads, strict=True) if numbers.count(number) == 1
    }
    return {number: line for number, line in lines.items() if line is not None and line.pairs}


def _line(flat: Program, load: int, extent: Extent) -> _Line | None:
    """The index of a load as start + k; None if the index has another form."""
    index = flat.nodes[load].args[0]
    factors = _linear(flat, index)
    if factors is None or factors["k"] != 1:
        return None
    node = flat.nodes[index]
    if node.op != "add" or flat.nodes[node.args[1]].op != "k" or "k" in flat.depends[node.args[0]]:
        return None
    keys, rows = extent.keys[1] - extent.keys[0] + 1, extent.rows[1] - extent.rows[0] + 1
    # Strides that grow from axis to axis: every entry is read by one pair alone.
    row = abs(factors["q"]) >= keys
    head, item = abs(factors["h"]), abs(factors["b"])
    by_head = extent.heads == 1 or head >= abs(factors["q"]) * rows
    by_item = extent.batch == 1 or item >= max(head * extent.heads, abs(factors["q"]) * rows)
    return _Line(node.args[0], row, by_item, by_head)


def _linear(program: Program, index: int) -> dict[str, int] | None:
    """The factors of b, h, q and k in an index that is a sum of multiples of them and a constant; None otherwise."""
    found: list[dict[str, int] | None] = []
    nothing = dict.fromkeys(("b", "h", "q", "k", "1"), 0)
    for node in program.nodes[: index + 1]:
        args = [found[arg] for arg in node.args]
        one, other = args[0] if args else None, args[1] if len(args) > 1 else None
        if node.kind != "int":
            found.append(None)
        elif node.op in nothing:
            found.append({**nothing, node.op: 1})
        elif node.op == "const":
            found.append({**nothing, "1": int(node.value or 0)})
        elif node.op in ("add", "sub") and one and other:
            sign = 1 if node.op == "add" else -1
            found.append({name: one[name] + sign * other[name] for name in nothing})
        elif node.op == "neg" and one:
            found.append({name: -one[name] for name in nothing})
        elif node.op == "mul" and one and other and not any(other[name] for name in "bhqk"):
            found.append({name: one[name] * other["1"] for name in nothing})
        else:
            found.append(None)
    return found[index]


# --- flat tables ------------------------------------------------------------------------------------------------------


def _flattened(program: Program, tables: tuple[TableForm, ...], extent: Extent) -> Program:
    """The program with one index for each table instead of one for each axis; ints are proved to fit 32 bits.

    A second output, if there is one, is True where an index lies outside of its table.
    """
    last = extent.batch - 1, extent.heads - 1
    leaves: dict[str, Any] = {
        "b": (np.float64(0), np.float64(last[0])),
        "h": (np.float64(0), np.float64(last[1])),
        "q": tuple(np.float64(end) for end in extent.rows),
        "k": tuple(np.float64(end) for end in extent.keys),
    }

    def ends(node: Node) -> Any:
        table = tables[int(node.value or 0)]
        return tuple(np.float64(end) for end in table.ends) if table.kind != "float" else (-np.inf, np.inf)

    reach = bounds(program, leaves, ends)
    for node, (low, high) in zip(program.nodes, reach, strict=True):
        if node.kind == "int" and not (low >= -_LIMIT and high < _LIMIT):
            raise Unsayable(f"its {node.op} may leave 32 bits")
    build = Builder()
    here: list[int] = []
    outside = build.const(False, "bool")
    for node in program.nodes:
        args = [here[arg] for arg in node.args]
        if node.op == "load":
            table = tables[int(node.value or 0)]
            index = build.const(0, "int")
            for place, arg, size in zip(args, node.args, table.shape, strict=True):
                wrong = _outside(build, place, reach[arg], size)
                outside = outside if wrong is None else build.of("or", outside, wrong)
                index = build.of("add", build.of("mul", index, build.const(size, "int")), place)
            here.append(build.load(int(node.value or 0), node.kind, index))
        elif node.op == "pow":
            here.append(_power(build, *args))
        elif node.op in LEAVES or node.op == "const":
            here.append(build.add(Node(node.op, (), node.kind, node.value)))
        else:
            here.append(build.of(node.op, *args))
    result = here[program.outputs[0]]
    return build.program(result) if build.value(outside) is False else build.program(result, outside)


def _outside(build: Builder, index: int, reach: Any, size: int) -> int | None:
    """Node that is True if an index lies outside of an axis of this size; None if it never does. The tracer has wrapped
    negative indices."""
    if reach[0] >= 0 and reach[1] < size:
        return None
    below, above = build.of("lt", index, build.const(0, "int")), build.of("ge", index, build.const(size, "int"))
    return build.of("or", below, above)


def _power(build: Builder, base: int, exponent: int) -> int:
    """x ** n by products for small whole n, square roots, and exponentials of a constant's logarithm."""
    power, known = build.value(exponent), build.value(base)
    if known is not None and known > 0:
        return build.of("exp", build.of("mul", exponent, build.const(math.log(known), "float")))
    if power == 0.5:
        return build.of("sqrt", base)
    if power is None or power != int(power) or not 0 < abs(power) <= 8:
        return build.of("pow", base, exponent)
    made = base
    for _ in range(abs(int(power)) - 1):
        made = build.of("mul", made, base)
    return made if power > 0 else build.of("div", build.const(1.0, "float"), made)


def _load() -> tuple[Any, str | None]:
    """The compiled module, or why there is none."""
    name = f"{__package__.partition('.')[0]}._native"
    try:
        return importlib.import_module(name), None
    except ModuleNotFoundError as error:
        if error.name == name:
            return None, "this installation has no native build (it was made without a C++ compiler)"
        return None, f"the native build is broken: {error}"
    except ImportError as error:
        return None, f"the native build is broken: {error}"


module, missing = _load()
