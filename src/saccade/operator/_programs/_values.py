"""Nodes of a program as Python values, so that decompositions read like formulas; and arrays of nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ._language import OPERATIONS, Builder, Kind, Value as Constant

_RANK: dict[Kind, int] = {"bool": 0, "int": 1, "float": 2}
_FURTHEST = 2.0**53  # of indices


class NotTraceable(Exception):
    """The language of score programs cannot say what a function does.

    Attributes:
        reason: the operation, in a few words.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def kind_of(dtype: torch.dtype) -> Kind:
    """The kind of value that holds numbers of this dtype."""
    if dtype == torch.bool:
        return "bool"
    if dtype.is_complex:
        raise NotTraceable("complex numbers")
    return "float" if dtype.is_floating_point else "int"


class Value:
    """A node with Python's operators. Kinds are promoted as PyTorch does: bool, int, float."""

    __slots__ = ("build", "node")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, build: Builder, node: int):
        self.build = build
        self.node = node

    @property
    def kind(self) -> Kind:
        return self.build.nodes[self.node].kind

    @property
    def constant(self) -> Constant | None:
        return self.build.value(self.node)

    def const(self, value: Constant) -> Value:
        kind: Kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
        return Value(self.build, self.build.const(value, kind))

    def to(self, kind: Kind) -> Value:
        return self if kind == self.kind else Value(self.build, self.build.of(f"to_{kind}", self.node))

    def one(self, op: str) -> Value:
        return Value(self.build, self.build.of(op, self.node))

    def floating(self, op: str) -> Value:
        """A function of a float."""
        return self.to("float").one(op)

    def two(self, op: str, other: Operand, least: Kind = "bool") -> Value:
        """An operation on both, promoted to one kind, which is at least `least`."""
        right = other if isinstance(other, Value) else self.const(other)
        kind = max(self.kind, right.kind, least, key=_RANK.__getitem__)
        return Value(self.build, self.build.of(op, self.to(kind).node, right.to(kind).node))

    def __add__(self, other: Operand) -> Value:
        return self.two("add", other, "int")

    def __sub__(self, other: Operand) -> Value:
        return self.two("sub", other, "int")

    def __mul__(self, other: Operand) -> Value:
        return self.two("mul", other, "int")

    def __truediv__(self, other: Operand) -> Value:
        return self.two("div", other, "float")

    def __neg__(self) -> Value:
        return self.one("neg") if self.kind != "bool" else -self.to("int")

    def __radd__(self, other: Constant) -> Value:
        return self.const(other) + self

    def __rsub__(self, other: Constant) -> Value:
        return self.const(other) - self

    def __rmul__(self, other: Constant) -> Value:
        return self.const(other) * self

    def __rtruediv__(self, other: Constant) -> Value:
        return self.const(other) / self

    def __lt__(self, other: Operand) -> Value:
        return self.two("lt", other, "int")

    def __le__(self, other: Operand) -> Value:
        return self.two("le", other, "int")

    def __gt__(self, other: Operand) -> Value:
        return self.two("gt", other, "int")

    def __ge__(self, other: Operand) -> Value:
        return self.two("ge", other, "int")

    def equals(self, other: Operand) -> Value:
        right = other if isinstance(other, Value) else self.const(other)
        if self.kind == right.kind == "bool":
            return ~self.logical("xor", right)
        return self.two("eq", right, "int")

    def differs(self, other: Operand) -> Value:
        right = other if isinstance(other, Value) else self.const(other)
        if self.kind == right.kind == "bool":
            return self.logical("xor", right)
        return self.two("ne", right, "int")

    def logical(self, op: str, other: Operand) -> Value:
        right = other if isinstance(other, Value) else self.const(other)
        return Value(self.build, self.build.of(op, self.to("bool").node, right.to("bool").node))

    def __and__(self, other: Operand) -> Value:
        return self.logical("and", other)

    def __or__(self, other: Operand) -> Value:
        return self.logical("or", other)

    def __invert__(self) -> Value:
        return self.to("bool").one("not")

    def where(self, chosen: Operand, other: Operand) -> Value:
        """`chosen` where this is true."""
        first = chosen if isinstance(chosen, Value) else self.const(chosen)
        second = other if isinstance(other, Value) else self.const(other)
        kind = max(first.kind, second.kind, key=_RANK.__getitem__)
        parts = self.to("bool").node, first.to(kind).node, second.to(kind).node
        return Value(self.build, self.build.of("where", *parts))


Operand = Value | bool | int | float
Index = tuple[int, ...]  # a node for each axis


class Array(NamedTuple):
    """Values of a shape, each worked out when asked for: `at(index)` gives the node of one of them."""

    shape: tuple[int, ...]
    kind: Kind
    at: Callable[[Index], int]

    def entry(self, build: Builder, index: Index) -> int:
        """The value at an index into a shape that this one broadcasts to."""
        own = index[len(index) - len(self.shape) :]
        zero = build.const(0, "int")
        return self.at(tuple(zero if size == 1 else at for size, at in zip(self.shape, own, strict=True)))


def remembered(at: Callable[[Index], int]) -> Callable[[Index], int]:
    """The same, each value worked out once."""
    known: dict[Index, int] = {}

    def find(index: Index) -> int:
        if index not in known:
            known[index] = at(index)
        return known[index]

    return find


def selected(array: Array, build: Builder, index: Sequence[object]) -> Array:
    """`array[index]`, for an index of nodes (`Value`), slices and None, as many as there are axes.

    A node selects along an axis; one that may be negative counts from the end, as in PyTorch.
    """
    shape: list[int] = []
    axes: list[Callable[[Index], int]] = []
    sizes = iter(array.shape)
    for part in index:
        place = len(shape)
        if part is None:
            shape.append(1)
            continue
        size = next(sizes)
        if isinstance(part, Value):
            node = from_start(part, size).node
            axes.append(lambda _, node=node: node)  # type: ignore[misc]
        else:
            assert isinstance(part, slice)
            start, stop, step = part.indices(size)
            shape.append(len(range(start, stop, step)))
            axes.append(
                lambda at, place=place, start=start, step=step: (
                    (  # type: ignore[misc]
                        Value(build, at[place]) * step + start
                    ).node
                )
            )
    return Array(tuple(shape), array.kind, remembered(lambda at: array.at(tuple(axis(at) for axis in axes))))


def from_start(index: Value, size: int) -> Value:
    """An index that counts from the start, of one that may be negative."""
    known = index.constant
    if known is not None:
        if not -size <= known < size:
            raise IndexError(f"index {known} is out of bounds for an axis of size {size}")
        return index.const(int(known) % size)
    if lowest(index) >= 0:
        return index
    return (index < 0).where(index + size, index)


def lowest(value: Value) -> float:
    """A bound from below, where b, h, q and k are at least 0."""
    return _ends(value.build, value.node)[0]


def _ends(build: Builder, node: int) -> tuple[float, float]:
    made = build.nodes[node]
    if made.op == "const":
        held = float(made.value or 0)
        return held, held
    if made.op in ("b", "h", "q", "k"):
        return 0.0, _FURTHEST
    rule = OPERATIONS[made.op].interval if made.op in OPERATIONS else None
    if rule is None or made.kind == "float":
        return -math.inf, math.inf
    low, high = rule(*(_ends(build, arg) for arg in made.args))
    return float(low), float(high)
