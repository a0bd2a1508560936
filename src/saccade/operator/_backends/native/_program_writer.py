"""Instructions of a score program by level, and registers for values of pairs: the numbers of native/score_program.h.

Values that depend on `k - q` alone are recognised by their slope: how they change where query and key move on together
by one. `q` and `k` have slope 1, `k - q` has slope 0.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..._programs._language import CONST, LEAF_NUMBERS, LEAVES, LOAD, OPERATIONS, Node, Program

UNIFORM, ROW, KEY, DISTANCE, PAIR = range(5)
# Operations of the kernels alone: a row's part of the distances, a copy, and entries that lie along the keys.
_ALONG, _COPY, _LINE = 72, 73, 74
_KINDS = {"float": 0, "int": 1, "bool": 2}
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")

Operand = tuple[int, int]  # level, index
NONE: Operand = (-1, 0)


class TableForm(NamedTuple):
    """The properties of a table that the instructions depend on; `ends` are the least and the greatest int."""

    kind: str
    shape: tuple[int, ...]
    start: int
    ends: tuple[int, int]


def slopes(program: Program) -> list[int | None]:
    """For each value of the program: its change when the query and key positions both increase by one. None if the
    change is not constant."""
    found: list[int | None] = []
    for node in program.nodes:
        args = [found[arg] for arg in node.args]
        values = [program.nodes[arg] for arg in node.args]
        found.append(_slope(node, args, values))
    return found


def _slope(node: Node, args: Sequence[int | None], values: Sequence[Node]) -> int | None:
    if node.op in ("q", "k"):
        return 1
    if node.op == "score":
        return None
    if None in args and node.op != "where":
        return None
    known = [arg if arg is not None else 0 for arg in args]
    if node.op in ("add", "sub"):
        return known[0] + known[1] if node.op == "add" else known[0] - known[1]
    if node.op == "neg":
        return -known[0]
    if node.op == "to_float":
        return known[0]
    if node.op == "mul":
        for one, other in ((0, 1), (1, 0)):
            if values[one].op == "const" and float(values[one].value or 0).is_integer():
                return int(values[one].value or 0) * known[other]
    if node.op in ("min", "max") and known[0] == known[1]:
        return known[0]
    if node.op in _COMPARED and known[0] == known[1]:
        return 0
    if node.op == "where":
        return args[1] if args[0] == 0 and args[1] == args[2] else None
    return 0 if not any(known) else None


@dataclass
class _Written:
    level: int
    op: int
    kind: int
    args: list[Operand]
    number: int = 0
    to: int = -1


@dataclass
class Writer:
    """Translates a program to instructions of the kernels.

    Values that differ by pair share registers; register 0 is the score.
    """

    program: Program
    keeps_score: bool  # the score's register is used for nothing else
    code: list[_Written] = field(default_factory=list)

    def __post_init__(self) -> None:
        slope = slopes(self.program)
        self.levels = [self._level(depends, slope[n]) for n, depends in enumerate(self.program.depends)]
        self._lines = {n: start for n in self.program.loads if (start := self._start(n)) is not None}
        self._places: dict[tuple[int, int], int] = {}  # (node, level) -> instruction; -1 the score
        self._outputs: list[int] = []

    def _start(self, load: int) -> int | None:
        """For a load that depends on the pair and whose index is `k` plus a node with one value per row: that node.
        Otherwise None."""
        node = self.program.nodes[self.program.nodes[load].args[0]]
        if self.levels[load] != PAIR or node.op != "add" or self.program.nodes[node.args[1]].op != "k":
            return None
        return node.args[0] if self.levels[node.args[0]] <= ROW else None

    @staticmethod
    def _level(depends: frozenset[str], slope: int | None) -> int:
        query, key = "q" in depends, "k" in depends
        if "score" in depends or (query and key and slope != 0):
            return PAIR
        return DISTANCE if query and key else ROW if query else KEY if key else UNIFORM

    def output(self, node: int) -> Operand:
        """A placeholder operand of an output, (level, instruction); `numbers` replaces it with the place."""
        level = self.levels[node]
        place = self._emit(node, level)
        if place == -1 and self.keeps_score:
            place = self._write(_Written(PAIR, _COPY, 0, [(PAIR, -1)]))
        if level == PAIR:
            self._outputs.append(place)
        return level, place

    def constant(self, value: float) -> Operand:
        """A placeholder of a constant that is not a node."""
        return UNIFORM, self._write(_Written(UNIFORM, CONST, 0, [], _bits(value, "float")))

    def _write(self, instruction: _Written) -> int:
        self.code.append(instruction)
        return len(self.code) - 1

    def _emit(self, n: int, level: int) -> int:
        known = self._places.get((n, level))
        if known is not None:
            return known
        node = self.program.nodes[n]
        if node.op == "score":
            place = -1
        elif node.op == "const":
            place = self._write(_Written(level, CONST, 0, [], _bits(node.value, node.kind)))
        elif node.op in LEAVES:
            place = self._write(_Written(level, LEAF_NUMBERS[node.op], 0, []))
        else:
            line = self._lines.get(n) if level == PAIR else None
            args = [self._argument(arg, level) for arg in (node.args if line is None else (line,))]
            if line is not None:
                place = self._write(_Written(level, _LINE, 0, args, int(node.value or 0)))
            elif node.op == "load":
                place = self._write(_Written(level, LOAD, 0, args, int(node.value or 0)))
            else:
                kind = _KINDS[self.program.nodes[node.args[-1]].kind]
                place = self._write(_Written(level, OPERATIONS[node.op].number, kind, args))
        self._places[n, level] = place
        return place

    def _argument(self, n: int, level: int) -> Operand:
        own = self.levels[n]
        if own == UNIFORM:
            return UNIFORM, self._emit(n, UNIFORM)
        if level != PAIR:
            return level, self._emit(n, level)
        if own != DISTANCE:
            return own, self._emit(n, own)
        along = self._places.get((n, PAIR))
        if along is None:
            along = self._write(_Written(PAIR, _ALONG, 0, [(DISTANCE, self._emit(n, DISTANCE))]))
            self._places[n, PAIR] = along
        return PAIR, along

    def numbers(
        self,
        tables: tuple[TableForm, ...],
        result: Operand,
        outside: Operand,
        slope: Operand,
        pulls: list[tuple[Operand, Operand, int, int, int]],
    ) -> list[int]:
        """The program as native/score_program.h reads it."""
        counts = self._allocate()
        numbers = [*counts, len(tables), *(_KINDS[table.kind] for table in tables)]
        for operand in (result, outside, slope):
            numbers += self._placed(operand)
        numbers.append(len(pulls))
        for at, factor, *rest in pulls:
            numbers += [*self._placed(at), *self._placed(factor), *rest]
        numbers.append(len(self.code))
        for x in self.code:
            args = [self._placed(arg) for arg in x.args] + [NONE] * (3 - len(x.args))
            numbers += [x.level, x.op, x.kind, x.to, *(number for arg in args for number in arg), x.number]
        return numbers

    def _placed(self, operand: Operand) -> Operand:
        level, place = operand
        return operand if level < 0 else (PAIR, 0) if place == -1 else (level, self.code[place].to)

    def _allocate(self) -> list[int]:
        """The register of each result, and the number of values of each level. A register is free after its last
        reader."""
        counts = [0] * 5
        last = {place: n for n, x in enumerate(self.code) for level, place in x.args if level == PAIR}
        last |= dict.fromkeys(self._outputs, len(self.code))
        free: list[int] = []
        if not self.keeps_score and -1 not in last:
            heapq.heappush(free, 0)
        counts[PAIR] = 1
        for n, x in enumerate(self.code):
            if x.level != PAIR:
                x.to = counts[x.level]
                counts[x.level] += 1
                continue
            for place in {place for level, place in x.args if level == PAIR}:
                if last[place] == n and not (place == -1 and self.keeps_score):
                    heapq.heappush(free, 0 if place == -1 else self.code[place].to)
            if free:
                x.to = heapq.heappop(free)
            else:
                x.to = counts[PAIR]
                counts[PAIR] += 1
        counts[UNIFORM] = max(counts[UNIFORM], 1)
        return counts


def _bits(value: Any, kind: str) -> int:
    if kind == "bool":
        return -1 if value else 0
    if kind == "int":
        return int(value)
    with np.errstate(over="ignore"):
        return int(struct.unpack("<i", struct.pack("<f", float(np.float32(value))))[0])
