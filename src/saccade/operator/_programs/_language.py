"""The language of score programs: its operations, each with its meaning, its derivative and its interval.

A program computes one value for each pair of a query and a key from six leaves: `score` (float), `b`, `h`, `q`, `k`
(batch item, query head, query position, key index; int) and tables (tensors read at computed indices). Operations are
held as numbered nodes, each made of earlier ones. Every reader walks them in order: `evaluate` computes with tensors
of PyTorch, `gradient` makes the program of the derivatives, `bounds` computes with intervals, and the native kernels
compute with vectors (`native/score_program.h` has the same operations under the same numbers).

Kinds of values: "float", "int" and "bool". Arithmetic between kinds is made explicit by the tracer (`to_float`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Kind = Literal["float", "int", "bool"]
Value = bool | int | float
LEAVES: dict[str, Kind] = {"score": "float", "b": "int", "h": "int", "q": "int", "k": "int"}


@dataclass(frozen=True)
class Node:
    """One value. `args` are numbers of earlier nodes; `value` is a constant, or the number of the table of a `load`."""

    op: str
    args: tuple[int, ...]
    kind: Kind
    value: Value | None = None


@dataclass(frozen=True, eq=False)
class Program:
    """Nodes in order of evaluation, and which of them are the results. Compared by identity."""

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]

    @cached_property
    def depends(self) -> tuple[frozenset[str], ...]:
        """For each node the leaves it depends on, and "table" where it depends on one."""
        found: list[frozenset[str]] = []
        for node in self.nodes:
            own = {node.op} if node.op in LEAVES else {"table"} if node.op == "load" else set()
            found.append(frozenset(own).union(*(found[arg] for arg in node.args)))
        return tuple(found)

    @property
    def loads(self) -> tuple[int, ...]:
        """The nodes that read tables."""
        return tuple(n for n, node in enumerate(self.nodes) if node.op == "load")


Interval = tuple[
    Any, Any
]  # lowest and highest value, arrays of float64 that broadcast; of a bool 0 and 1 for False and True


@dataclass(frozen=True)
class Operation:
    """One operation. `derivative(build, args, result, adjoint)` gives the adjoints of its float arguments."""

    number: int  # in native/score_program.h
    kind: Kind | None  # of the result; None: that of the last argument
    compute: Callable[..., Tensor]
    interval: Callable[..., Interval] | None = None  # None: everything
    derivative: Callable[..., Sequence[int | None]] | None = None  # None: zero, or no float argument
    fold: Callable[..., Value] | None = None  # of constants; None: by `compute`


@dataclass
class Builder:
    """Makes programs: equal nodes are kept once, constants are folded, and x + 0, x * 1 and the like are x."""

    nodes: list[Node] = field(default_factory=list)
    _known: dict[Node, int] = field(default_factory=dict)

    def add(self, node: Node) -> int:
        key = node if node.op != "const" else Node(f"const {node.value!r}", (), node.kind)  # 0.0 == -0.0, 1 == True
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(node)
        return self._known[key]

    def leaf(self, name: str) -> int:
        return self.add(Node(name, (), LEAVES[name]))

    def const(self, value: Value, kind: Kind) -> int:
        made: Value = float(value) if kind == "float" else bool(value) if kind == "bool" else int(value)
        return self.add(Node("const", (), kind, made))

    def load(self, table: int, kind: Kind, *index: int) -> int:
        """The entry of a table (of as many axes as indices) at int nodes."""
        return self.add(Node("load", index, kind, table))

    def of(self, op: str, *args: int) -> int:
        """`op` of nodes. Their kinds fit."""
        same = self._simpler(op, args)
        if same is not None:
            return same
        kind = OPERATIONS[op].kind or self.nodes[args[-1]].kind
        values = [self.value(arg) for arg in args]
        if all(value is not None for value in values):
            return self._folded(op, kind, args)
        return self.add(Node(op, tuple(args), kind))

    def value(self, node: int) -> Value | None:
        """A constant's value, else None."""
        return self.nodes[node].value if self.nodes[node].op == "const" else None

    def number(self, node: int) -> int:
        """The node as float."""
        kind = self.nodes[node].kind
        return node if kind == "float" else self.of("to_float", node)

    def program(self, *outputs: int) -> Program:
        """Only what the outputs need."""
        needed, order = set(outputs), []
        for n in range(len(self.nodes) - 1, -1, -1):
            if n in needed:
                needed.update(self.nodes[n].args)
                order.append(n)
        place = {old: new for new, old in enumerate(reversed(order))}
        nodes = tuple(
            Node(node.op, tuple(place[arg] for arg in node.args), node.kind, node.value)
            for node in (self.nodes[old] for old in reversed(order))
        )
        return Program(nodes, tuple(place[output] for output in outputs))

    def copy(self, program: Program) -> list[int]:
        """Take over another program's nodes; the numbers they have here."""
        here: list[int] = []
        for node in program.nodes:
            args = tuple(here[arg] for arg in node.args)
            again = node.op in LEAVES or node.op in ("const", "load")
            here.append(self.add(Node(node.op, args, node.kind, node.value)) if again else self.of(node.op, *args))
        return here

    def _folded(self, op: str, kind: Kind, args: Sequence[int]) -> int:
        dtypes = {"float": torch.float64, "int": torch.int64, "bool": torch.bool}
        given = [torch.tensor(self.value(arg), dtype=dtypes[self.nodes[arg].kind]) for arg in args]
        return self.const(OPERATIONS[op].compute(*given).item(), kind)

    def _simpler(self, op: str, args: Sequence[int]) -> int | None:
        """The argument that equals the result, where one does for every value, NaN and infinities included."""
        if op in ("add", "mul", "sub", "div") and self.nodes[args[0]].kind != "bool":
            first, second = self.value(args[0]), self.value(args[1])
            neutral = 0 if op in ("add", "sub") else 1
            if second == neutral:
                return args[0]
            if first == neutral and op in ("add", "mul"):
                return args[1]
        if op == "neg" and self.nodes[args[0]].op == "neg":
            return self.nodes[args[0]].args[0]
        if op == "where":
            known = self.value(args[0])
            if known is not None:
                return args[1] if known else args[2]
            if args[1] == args[2]:
                return args[1]
        if op in ("and", "or"):
            for one, other in (args, args[::-1]):
                known = self.value(one)
                if known is not None:
                    return (other if known else one) if op == "and" else (one if known else other)
        return None


# --- derivatives ----------------------------------------------------------------------------------------------------
# Each gives the adjoints of the arguments; b is the builder, x the arguments, y the result, g its adjoint.


def _times(rule: Callable[[Builder, Sequence[int], int], int]) -> Callable[..., Sequence[int | None]]:
    """The derivative of a function of one argument."""
    return lambda b, x, y, g: (b.of("mul", g, rule(b, x, y)),)


def _divided(b: Builder, x: Sequence[int], y: int, g: int) -> Sequence[int | None]:
    first = b.of("div", g, x[1])
    return first, b.of("neg", b.of("mul", first, y))


def _greater(sign: str) -> Callable[..., Sequence[int | None]]:
    """The derivative of max or min: half to each where both are equal, as in PyTorch."""

    def rule(b: Builder, x: Sequence[int], y: int, g: int) -> Sequence[int | None]:
        half, zero = b.of("mul", g, b.const(0.5, "float")), b.const(0.0, "float")
        equal, first = b.of("eq", *x), b.of(sign, *x)
        return (
            b.of("where", equal, half, b.of("where", first, g, zero)),
            b.of("where", equal, half, b.of("where", first, zero, g)),
        )

    return rule


def _chosen(b: Builder, x: Sequence[int], y: int, g: int) -> Sequence[int | None]:
    zero = b.const(0.0, "float")
    return None, b.of("where", x[0], g, zero), b.of("where", x[0], zero, g)


def _power(b: Builder, x: Sequence[int], y: int, g: int) -> Sequence[int | None]:
    base, exponent = x
    one = b.const(1.0, "float")
    down = b.of("mul", exponent, b.of("pow", base, b.of("sub", exponent, one)))
    log = b.of("mul", y, b.of("log", base))
    zero = b.const(0.0, "float")
    safe = b.of("where", b.of("eq", base, zero), zero, log)  # PyTorch's: 0 at a base of 0
    return b.of("mul", g, down), None if b.value(exponent) is not None else b.of("mul", g, safe)


# --- intervals ------------------------------------------------------------------------------------------------------
# NaN never is an end: what an end cannot be computed of is everything.


def _sound(low: Any, high: Any) -> Interval:
    return np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)


def _corners(function: Callable[[Any, Any], Any]) -> Callable[..., Interval]:
    """The interval of a function that is monotone in each argument, in either direction."""

    def rule(x: Interval, y: Interval) -> Interval:
        ends = [function(a, b) for a in x for b in y]
        some = np.isnan(ends[0]) | np.isnan(ends[1]) | np.isnan(ends[2]) | np.isnan(ends[3])
        low, high = np.minimum.reduce(np.broadcast_arrays(*ends)), np.maximum.reduce(np.broadcast_arrays(*ends))
        return np.where(some, -np.inf, low), np.where(some, np.inf, high)

    return rule


def _rising(function: Callable[[Any], Any]) -> Callable[..., Interval]:
    return lambda x: _sound(function(x[0]), function(x[1]))


def _quotient(x: Interval, y: Interval) -> Interval:
    low, high = _corners(np.true_divide)(x, y)
    through = (y[0] <= 0) & (y[1] >= 0)
    return np.where(through, -np.inf, low), np.where(through, np.inf, high)


def _whole_quotient(rounded: Callable[[Any], Any]) -> Callable[..., Interval]:
    """Quotients of ints, whose divisors are at least 1 in magnitude."""

    def rule(x: Interval, y: Interval) -> Interval:
        low, high = _quotient(x, y)
        most = np.maximum(np.abs(x[0]), np.abs(x[1]))
        return np.maximum(rounded(low), -most), np.minimum(rounded(high), most)

    return rule


def _words(x: Interval, y: Interval) -> Interval:
    """Bits of ints stay within the next power of two."""
    least = np.minimum(x[0], y[0])
    power = np.exp2(np.ceil(np.log2(np.maximum(np.maximum(x[1], y[1]), -least) + 1)))
    return np.where(least < 0, -power, 0.0), power - 1


def _remainder(x: Interval, y: Interval) -> Interval:
    """The remainder by a positive constant: the arguments themselves within one period, else 0 to the divisor."""
    positive = y[0] > 0
    with np.errstate(invalid="ignore"):
        period = np.floor(x[0] / y[0])
        within = positive & (y[0] == y[1]) & (period == np.floor(x[1] / y[0]))
    low = np.where(within, x[0] - period * y[0], np.where(positive, 0.0, np.minimum(y[0], 0)))
    high = np.where(within, x[1] - period * y[0], np.maximum(y[1], 0))
    return _sound(low, high)


def _size(x: Interval) -> Interval:
    low, high = np.abs(x[0]), np.abs(x[1])
    return np.where((x[0] <= 0) & (x[1] >= 0), 0.0, np.minimum(low, high)), np.maximum(low, high)


def _less(x: Interval, y: Interval) -> Interval:
    return np.where(x[1] < y[0], 1, 0), np.where(x[0] < y[1], 1, 0)


def _at_most(x: Interval, y: Interval) -> Interval:
    return np.where(x[1] <= y[0], 1, 0), np.where(x[0] <= y[1], 1, 0)


def _same(x: Interval, y: Interval) -> Interval:
    surely = (x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0])
    return np.where(surely, 1, 0), np.where((x[0] <= y[1]) & (y[0] <= x[1]), 1, 0)


def _not(x: Interval) -> Interval:
    return 1 - x[1], 1 - x[0]


def _either(x: Interval, y: Interval) -> Interval:
    never = (x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0])
    surely = (x[0] == x[1]) & (y[0] == y[1]) & (x[0] != y[0])
    return np.where(surely, 1, 0), np.where(never, 0, 1)


def _choice(c: Interval, x: Interval, y: Interval) -> Interval:
    low = np.where(c[0] == 1, x[0], np.where(c[1] == 0, y[0], np.minimum(x[0], y[0])))
    return low, np.where(c[0] == 1, x[1], np.where(c[1] == 0, y[1], np.maximum(x[1], y[1])))


def _between(low: float, high: float) -> Callable[..., Interval]:
    return lambda *x: (np.full_like(x[0][0], low, dtype=float), np.full_like(x[0][0], high, dtype=float))


def _negative(x: Interval) -> Interval:
    return -x[1], -x[0]


def _truth(x: Interval) -> Interval:
    return np.where((x[0] > 0) | (x[1] < 0), 1, 0), np.where((x[0] == 0) & (x[1] == 0), 0, 1)


# --- the table ------------------------------------------------------------------------------------------------------


def _sigmoid_slope(b: Builder, x: Sequence[int], y: int) -> int:
    return b.of("mul", y, b.of("sub", b.const(1.0, "float"), y))


def _tanh_slope(b: Builder, x: Sequence[int], y: int) -> int:
    return b.of("sub", b.const(1.0, "float"), b.of("mul", y, y))


def _root_slope(b: Builder, x: Sequence[int], y: int) -> int:
    return b.of("div", b.const(0.5, "float"), y)


def _truncated(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, torch.where(y == 0, 1, y), rounding_mode="trunc")


def _floored(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, torch.where(y == 0, 1, y), rounding_mode="floor")


def _modulo(x: Tensor, y: Tensor) -> Tensor:
    return torch.remainder(x, torch.where(y == 0, 1, y))


# The arithmetic of ints and floats has the same names; the kind of the arguments says which.
OPERATIONS: dict[str, Operation] = {
    "add": Operation(0, None, torch.add, lambda x, y: _sound(x[0] + y[0], x[1] + y[1]), lambda b, x, y, g: (g, g)),
    "sub": Operation(
        1, None, torch.sub, lambda x, y: _sound(x[0] - y[1], x[1] - y[0]), lambda b, x, y, g: (g, b.of("neg", g))
    ),
    "mul": Operation(
        2, None, torch.mul, _corners(np.multiply), lambda b, x, y, g: (b.of("mul", g, x[1]), b.of("mul", g, x[0]))
    ),
    "div": Operation(3, "float", torch.true_divide, _quotient, _divided),
    "min": Operation(
        4, None, torch.minimum, lambda x, y: (np.minimum(x[0], y[0]), np.minimum(x[1], y[1])), _greater("lt")
    ),
    "max": Operation(
        5, None, torch.maximum, lambda x, y: (np.maximum(x[0], y[0]), np.maximum(x[1], y[1])), _greater("gt")
    ),
    "neg": Operation(6, None, torch.neg, _negative, lambda b, x, y, g: (b.of("neg", g),)),
    "abs": Operation(7, None, torch.abs, _size, _times(lambda b, x, y: b.of("sign", x[0]))),
    "sign": Operation(8, None, torch.sign, _rising(np.sign)),
    "exp": Operation(9, "float", torch.exp, _rising(np.exp), _times(lambda b, x, y: y)),
    "log": Operation(10, "float", torch.log, _rising(np.log), lambda b, x, y, g: (b.of("div", g, x[0]),)),
    "sqrt": Operation(11, "float", torch.sqrt, _rising(np.sqrt), _times(_root_slope)),
    "sin": Operation(12, "float", torch.sin, _between(-1, 1), _times(lambda b, x, y: b.of("cos", x[0]))),
    "cos": Operation(13, "float", torch.cos, _between(-1, 1), _times(lambda b, x, y: b.of("neg", b.of("sin", x[0])))),
    "tanh": Operation(14, "float", torch.tanh, _rising(np.tanh), _times(_tanh_slope)),
    "sigmoid": Operation(15, "float", torch.sigmoid, _between(0, 1), _times(_sigmoid_slope)),
    "pow": Operation(16, "float", torch.pow, None, _power),
    "floor": Operation(17, "float", torch.floor, _rising(np.floor)),
    "ceil": Operation(18, "float", torch.ceil, _rising(np.ceil)),
    "round": Operation(19, "float", torch.round, _rising(np.round)),
    "trunc": Operation(20, "float", torch.trunc, _rising(np.trunc)),
    # Of ints. A divisor of 0 counts as 1: PyTorch raises an error, and a masked pair may not.
    "floor_div": Operation(21, "int", _floored, _whole_quotient(np.floor)),
    "trunc_div": Operation(22, "int", _truncated, _whole_quotient(np.trunc)),
    "mod": Operation(23, "int", _modulo, _remainder),
    "bit_and": Operation(24, "int", torch.bitwise_and, _words),
    "bit_or": Operation(25, "int", torch.bitwise_or, _words),
    "bit_xor": Operation(26, "int", torch.bitwise_xor, _words),
    "eq": Operation(27, "bool", torch.eq, _same),
    "ne": Operation(28, "bool", torch.ne, lambda x, y: _not(_same(x, y))),
    "lt": Operation(29, "bool", torch.lt, _less),
    "le": Operation(30, "bool", torch.le, _at_most),
    "gt": Operation(31, "bool", torch.gt, lambda x, y: _less(y, x)),
    "ge": Operation(32, "bool", torch.ge, lambda x, y: _at_most(y, x)),
    "and": Operation(33, "bool", torch.logical_and, lambda x, y: (np.minimum(x[0], y[0]), np.minimum(x[1], y[1]))),
    "or": Operation(34, "bool", torch.logical_or, lambda x, y: (np.maximum(x[0], y[0]), np.maximum(x[1], y[1]))),
    "xor": Operation(35, "bool", torch.logical_xor, _either),
    "not": Operation(36, "bool", torch.logical_not, _not),
    "where": Operation(37, None, torch.where, _choice, _chosen),
    "to_float": Operation(38, "float", lambda x: x.to(torch.float64), lambda x: x),
    "to_int": Operation(39, "int", lambda x: x.to(torch.int64), _rising(np.trunc)),
    "to_bool": Operation(40, "bool", lambda x: x != 0, _truth),
    "is_nan": Operation(41, "bool", torch.isnan, _between(0, 1)),
    "detach": Operation(42, "float", Tensor.detach, lambda x: x),  # its derivative is 0
}
LEAF_NUMBERS = {name: 64 + n for n, name in enumerate(LEAVES)}
CONST, LOAD = 70, 71


# --- readers --------------------------------------------------------------------------------------------------------


def evaluate(
    program: Program,
    leaves: dict[str, Tensor],
    load: Callable[[int, list[Tensor]], Tensor],
    dtype: torch.dtype,
    like: Tensor | None = None,
    known: dict[int, Tensor] | None = None,
) -> list[Tensor]:
    """The outputs, computed with tensors that broadcast: floats in `dtype`, ints in int64.

    Args:
        leaves: what the program names of `LEAVES`.
        load: `load(node, indices)` gives the entries of the table of that node; ints in int64, floats in `dtype`.
        like: a tensor that constants are filled like, for compilers that take no new tensors; None: of their own.
        known: values of nodes that are not computed again.
    """
    device = next(iter(leaves.values())).device if leaves else torch.device("cpu")
    dtypes = {"float": dtype, "int": torch.int64, "bool": torch.bool}
    values: list[Tensor] = []
    for n, node in enumerate(program.nodes):
        if known is not None and n in known:
            values.append(known[n])
            continue
        args = [values[arg] for arg in node.args]
        if node.op == "const":
            if like is None:
                values.append(torch.tensor(node.value, dtype=dtypes[node.kind], device=device))
            else:
                values.append(torch.full_like(like, node.value, dtype=dtypes[node.kind]))  # type: ignore[arg-type]
        elif node.op in LEAVES:
            values.append(leaves[node.op])
        elif node.op == "load":
            values.append(load(n, args))
        else:
            values.append(OPERATIONS[node.op].compute(*args))
        if values[-1].dtype != dtypes[node.kind]:
            values[-1] = values[-1].to(dtypes[node.kind])
    return [values[output] for output in program.outputs]


def gradient(program: Program, wanted: Sequence[int], also: Sequence[int] = ()) -> Program:
    """The program whose outputs are the result, its derivatives with respect to the `wanted` nodes, and `also` nodes.

    A derivative that is 0 everywhere is the constant 0.
    """
    build = Builder()
    here = build.copy(program)
    result = here[program.outputs[0]]
    adjoints: dict[int, int] = {result: build.const(1.0, "float")}
    for n in range(result, -1, -1):
        node = build.nodes[n]
        rule = OPERATIONS[node.op].derivative if node.op in OPERATIONS else None
        if n not in adjoints or rule is None or node.kind != "float":
            continue
        for arg, adjoint in zip(node.args, rule(build, node.args, n, adjoints[n]), strict=True):
            if adjoint is not None and build.nodes[arg].kind == "float" and build.value(adjoint) != 0:
                adjoints[arg] = build.of("add", adjoints[arg], adjoint) if arg in adjoints else adjoint
    zero = build.const(0.0, "float")
    return build.program(result, *(adjoints.get(here[n], zero) for n in wanted), *(here[n] for n in also))


def bounds(
    program: Program,
    leaves: dict[str, Interval],
    tables: Callable[[Node], Interval] | None = None,
    *,
    entries: Callable[[Node, Sequence[Interval]], Interval] | None = None,
    rounding: float = 0.0,
) -> list[Interval]:
    """The lowest and the highest value of every node, where leaves lie within these intervals (arrays that broadcast).

    What may be NaN has an infinite end, or is made of what has: a comparison with it is not decided.

    Args:
        tables: the ends of what a `load` reads; None: nothing is known of it.
        entries: the same, given the intervals of its indices.
        rounding: by how much a float32 differs from the exact value, relatively; intervals are widened by it, and by
            what overflows and underflows. 0: exact numbers.
    """
    found: list[Interval] = []
    sure: list[Any] = []  # whether the value is a number
    with np.errstate(all="ignore"):
        for node in program.nodes:
            args = [found[arg] for arg in node.args]
            if node.op == "load" and entries is not None:
                interval = entries(node, args)
            else:
                interval = _interval(node, args, leaves, tables)
            doubts = [sure[arg] for arg in node.args if program.nodes[arg].kind == "float" and sure[arg] is not True]
            numbers = np.logical_and.reduce(np.broadcast_arrays(*doubts)) if doubts else True
            if node.kind == "float":
                low, high = interval
                if rounding and node.op not in _EXACT:
                    whole = node.op == "to_float" and np.all((np.abs(low) < 2**24) & (np.abs(high) < 2**24))
                    low, high = interval = (low, high) if whole else _widened(low, high, rounding)
                numbers = numbers & np.isfinite(low) & np.isfinite(high)
            elif doubts:
                low, high = _unknown(node.kind)
                interval = np.where(numbers, interval[0], low), np.where(numbers, interval[1], high)
                numbers = True
            found.append(interval)
            sure.append(True if numbers is not True and np.all(numbers) else numbers)
    return found


# Of floats: operations that do not round.
_EXACT = frozenset("const score load neg abs sign min max where floor ceil round trunc detach".split())
_LEAST, _MOST = 2.0**-126, 2.0**127  # of normal numbers; beyond half of the greatest sums may overflow


def _widened(low: Any, high: Any, rounding: float) -> Interval:
    low, high = low - rounding * np.abs(low) - _LEAST, high + rounding * np.abs(high) + _LEAST
    return np.where(low < -_MOST, -np.inf, low), np.where(high > _MOST, np.inf, high)


def _interval(
    node: Node,
    args: Sequence[Interval],
    leaves: dict[str, Interval],
    tables: Callable[[Node], Interval] | None,
) -> Interval:
    rule = OPERATIONS[node.op].interval if node.op in OPERATIONS else None
    if node.op == "const" and node.value == node.value:
        return np.float64(node.value), np.float64(node.value)
    if node.op in LEAVES:
        return leaves.get(node.op, _unknown(node.kind))
    if node.op == "load" and tables is not None:
        return tables(node)
    return rule(*args) if rule is not None else _unknown(node.kind)


def _unknown(kind: Kind) -> Interval:
    return (np.float64(0), np.float64(1)) if kind == "bool" else (np.float64(-math.inf), np.float64(math.inf))
