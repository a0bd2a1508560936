"""A `Score` as a program, in plain PyTorch: what a tile reads of its tables, and the scores made of it.

Shapes of a tile: score (B, Hq, r, c); leaves b (B, 1, 1, 1), h (1, Hq, 1, 1), q (B|1, 1, r, 1), k (1, 1, 1, c), int64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from .._programs._language import Builder, Program, evaluate
from ._score import Entries, Leaves, ModifiedScores, Tensors, with_heads


@dataclass(frozen=True, eq=False)
class ProgramTable:
    """A captured tensor. Float tables stand one after another in the parameter, from `start` on."""

    kind: Literal["float", "int", "bool"]
    shape: tuple[int, ...]
    start: int = 0
    tensor: Tensor | None = None  # of ints and bools


class ProgramBias(ModifiedScores):
    """Scores changed by a program, whose output 0 is the new score.

    `parameter` is 1-D: the float tables, flattened, one after another.
    """

    def __init__(self, program: Program, tables: tuple[ProgramTable, ...], parameter: Tensor) -> None:
        self.program, self.tables, self.parameter = program, tables, parameter

    @classmethod
    def of(cls, program: Program, tables: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> ProgramBias:
        """The program with its tables as they are now; floats in `dtype`."""
        floats = [table.to(dtype).reshape(-1) for table in tables if table.is_floating_point()]
        parameter = floats[0] if len(floats) == 1 else torch.cat(floats) if floats else torch.empty(0, dtype=dtype)
        made, start = [], 0
        for table in tables:
            shape = tuple(table.shape)
            if table.is_floating_point():
                made.append(ProgramTable("float", shape, start))
                start += table.numel()
                continue
            kind: Literal["int", "bool"] = "bool" if table.dtype == torch.bool else "int"
            known = table if table.dtype in (torch.bool, torch.int32, torch.int64) else table.to(torch.int64)
            made.append(ProgramTable(kind, shape, 0, known.detach().contiguous()))
        return cls(program, tuple(made), parameter if floats else parameter.to(device))

    def _check(self, batch: int, heads: int, length_q: int, length_k: int) -> None:
        super()._check(batch, heads, length_q, length_k)
        wanted = sum(_size(table.shape) for table in self.tables if table.kind == "float")
        if self.parameter.shape != (wanted,):
            raise ValueError(f"bias: the tables of {self!r} need {wanted} entries, got {tuple(self.parameter.shape)}")

    def _of_heads(self, numbers: Sequence[int]) -> ProgramBias:
        chosen = copy.copy(self)
        chosen.__dict__.pop("_plan", None)
        device = self.parameter.device
        table = ProgramTable("int", (len(numbers),), 0, torch.tensor(list(numbers), device=device))
        chosen.tables = (*self.tables, table)
        chosen.program = with_heads(self.program, len(self.tables))
        return chosen

    @property
    def _may_hide(self) -> bool:
        constants = any(node.op == "const" and node.value == -math.inf for node in self.program.nodes)
        return constants or bool((self.parameter == -torch.inf).any())

    def _moved(self, device: torch.device | str) -> ProgramBias:
        moved = copy.copy(super()._moved(device))
        assert isinstance(moved, ProgramBias)
        moved.tables = tuple(
            table if table.tensor is None else replace(table, tensor=table.tensor.to(device)) for table in self.tables
        )
        return moved

    def _copied(self) -> ProgramBias:
        own = super()._copied()
        assert isinstance(own, ProgramBias)
        own.tables = tuple(
            table if table.tensor is None else replace(table, tensor=table.tensor.clone()) for table in self.tables
        )
        return own

    # --- one tile -------------------------------------------------------------------------------------------------

    @cached_property
    def _plan(self) -> _Plan:
        return _Plan.of(self.program)

    def _loads(self, parameter: Tensor, leaves: Leaves, visible: Tensor | None, dtype: torch.dtype) -> Tensors:
        plan, wide = self._plan, parameter.to(dtype)
        tiles = [entries(wide, place) for place in self._places(wide, leaves, visible)]
        return (*tiles, wide) if plan.late else tuple(tiles)

    def _pull_loads(self, cotangents: Tensors, parameter: Tensor, leaves: Leaves, visible: Tensor | None) -> Entries:
        places = self._places(parameter.to(cotangents[0].dtype), leaves, visible) if cotangents else []
        # Not zip(strict): behind the early loads stands the parameter, where the program has late ones.
        return Entries(
            [place.flatten() for place in places],
            [cotangent.flatten() for cotangent, _ in zip(cotangents, places, strict=False)],
            list(cotangents[len(places) :]),
        )

    def _places(self, parameter: Tensor, leaves: Leaves, visible: Tensor | None) -> list[Tensor]:
        """Where each early load of a float table reads in the parameter, (B, Hq, r, c|1) or (B, Hq, 1, c), int64."""
        plan = self._plan
        if not plan.early:
            return []
        read = self._reader(plan.indices, parameter.detach(), visible)
        indices = iter(evaluate(plan.indices, leaves, read, parameter.dtype))
        places = []
        for node in plan.early:
            table = int(self.program.nodes[node].value or 0)
            axes = [next(indices) for _ in self.program.nodes[node].args]
            places.append(_spread(self._flat(table, axes, visible), leaves))
        return places

    def _apply(self, score: Tensor, loads: Tensors, leaves: Leaves, visible: Tensor | None) -> Tensor:
        plan = self._plan
        held = {
            node: tile if visible is None else torch.where(visible, tile, 0.0)
            for node, tile in zip(plan.early, loads, strict=False)
        }
        late = self._reader(self.program, loads[-1] if loads else score.flatten(), visible)

        def load(node: int, indices: list[Tensor]) -> Tensor:
            return held[node] if node in held else late(node, indices)

        if visible is not None:
            score = torch.where(visible, score, 0.0)
        (new,) = evaluate(self.program, {**leaves, "score": score}, load, score.dtype)
        new = new.expand(score.shape)  # a program need not read the score
        return new if visible is None else torch.where(visible, new, 0.0)

    def _value(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        def load(node: int, indices: list[Tensor]) -> Tensor:
            number = int(self.program.nodes[node].value or 0)
            table = self.tables[number]
            place = self._flat(number, indices, None, like=k)
            return (self.parameter if table.tensor is None else table.tensor.flatten())[place]

        leaves = {"score": score, "b": b, "h": h, "q": q, "k": k}
        return evaluate(self.program, leaves, load, torch.promote_types(score.dtype, torch.float32), like=k)[0]

    def _reader(self, program: Program, parameter: Tensor, visible: Tensor | None) -> Callable[..., Tensor]:
        """The `load` of a program: entries of tables, checked at visible pairs."""

        def load(node: int, indices: list[Tensor]) -> Tensor:
            number = int(program.nodes[node].value or 0)
            table = self.tables[number]
            place = self._flat(number, indices, visible)
            read = entries(parameter if table.tensor is None else table.tensor.flatten(), place)
            if visible is not None and read.is_floating_point():
                read = torch.where(visible, read, 0.0)
            return read

        return load

    def _flat(self, number: int, indices: list[Tensor], visible: Tensor | None, like: Tensor | None = None) -> Tensor:
        """The place of entries in the parameter, or in the flattened table of ints, int64.

        Args:
            like: a tensor that constants are filled like, for compilers, where no index can be checked.
        """
        table = self.tables[number]
        place = torch.tensor(table.start, device=self._device) if like is None else torch.full_like(like, table.start)
        step = _size(table.shape)
        for axis, (index, size) in enumerate(zip(indices, table.shape, strict=True)):
            if like is None:
                _check_range(index, size, visible, number, table.shape, axis)
            step //= max(size, 1)
            place = place + index.clamp(0, max(size - 1, 0)) * step
        return place

    @property
    def _device(self) -> torch.device:
        return self.__dict__["parameter"].device if "parameter" in self.__dict__ else self._home

    def _form(self) -> ProgramBias:
        bare = super()._form()
        assert isinstance(bare, ProgramBias)
        bare._home = self.parameter.device
        return bare

    _home: torch.device = torch.device("cpu")

    def __repr__(self) -> str:
        count = operations(self.program)
        return f"Score(a program of {count} operation{'s' * (count != 1)})"


@dataclass(frozen=True)
class _Plan:
    """Which loads of float tables come before the scores, and which need them."""

    early: tuple[int, ...]
    late: tuple[int, ...]
    indices: Program  # the indices of the early ones, in order

    @classmethod
    def of(cls, program: Program) -> _Plan:
        depends = program.depends
        floats = [n for n in program.loads if program.nodes[n].kind == "float"]
        early = [n for n in floats if "score" not in depends[n]]
        build = Builder()
        here = build.copy(program)
        wanted = [here[arg] for n in early for arg in program.nodes[n].args]
        return cls(tuple(early), tuple(n for n in floats if n not in early), build.program(*wanted))


def operations(program: Program) -> int:
    """How many operations a program has: constants and leaves are none."""
    return sum(bool(node.args) or node.op == "load" for node in program.nodes)


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _spread(place: Tensor, leaves: Leaves) -> Tensor:
    """At the size of the batch, the heads and, at least, the rows or the keys.

    Sums to one number would depend on the number of threads; those that remain are the tile's rows or keys.
    """
    place = place[(None,) * (4 - place.dim())]
    rows = leaves["q"].shape[2] if place.shape[3] == 1 else place.shape[2]
    return place.expand(leaves["b"].shape[0], leaves["h"].shape[1], rows, place.shape[3])


def entries(table: Tensor, place: Tensor) -> Tensor:
    """Entries of a 1-D table; 0 where it has none, which no visible pair reads."""
    if not table.numel():
        return table.new_zeros(place.shape)
    return table.index_select(0, place.flatten().clamp(max=table.numel() - 1)).view(place.shape)


def _check_range(
    index: Tensor, size: int, visible: Tensor | None, table: int, shape: tuple[int, ...], axis: int
) -> None:
    if torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(index):
        return
    outside = (index < 0) | (index >= size)  # the program has wrapped negative ones
    if not outside.any():
        return
    if visible is not None:
        outside = outside & visible
        if not outside.any():
            return
    worst = int(index.expand(outside.shape)[outside][0])
    worst = worst - size if worst < 0 else worst
    raise IndexError(
        f"Score: index {worst} is out of range for axis {axis} (size {size}) of captured tensor {table}, shape {shape}"
        "; clamp the index: torch.where does not guard a read"
    )
