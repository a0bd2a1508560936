"""Mask programs as masks that have kernels: causal, windows, documents, padding and combinations of these.

Proved from the program's structure, never from samples. A comparison of ints is read as a linear form `sum + constant`
compared with 0; the terms of the sum decide. A part that depends only on the key and the batch item is computed for
every key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._programs._language import Builder, Node, Program
from ._algebra import And, Or
from ._documents import Documents
from ._heads import PerHead
from ._mask import Mask
from ._mask_forms import SWAPPED, between, joined, one_window, window, without
from ._padding import Padding
from ._program_of_head import of_head
from ._relative import Causal, Prefix, Window
from ._residues import Chunks, Dilated
from ._sparse import Global
from ._traced import evaluated

_HEADS = 64  # whose masks are looked at one by one
_FAR = 1 << 40  # chunks: a side without an end
_OF_KEYS = frozenset({"k", "b", "table"})


class Sizes(NamedTuple):
    """The known sizes of a call: its number of keys, and the numbers of batch items and heads for which the program
    differs."""

    keys: int | None = None
    batch: int | None = None
    heads: int | None = None


def sizes_of(program: Program, tables: Sequence[Tensor]) -> tuple[int | None, int | None]:
    """Numbers of batch items and of heads, from the axes of the tables that they index; None if they index no table."""
    found: dict[str, int] = {}
    for node in (program.nodes[load] for load in program.loads):
        for axis, index in enumerate(node.args):
            leaf, size = program.nodes[index].op, tables[int(node.value or 0)].shape[axis]
            if leaf in ("b", "h"):
                found[leaf] = min(found.get(leaf, size), size)
    return found.get("b"), found.get("h")


def recognised(
    program: Program,
    tables: Sequence[Tensor],
    *,
    keys: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
) -> Mask | None:
    """The built-in mask that is equivalent to output 0 of the program, or None.

    The mask is equivalent at positions and keys from 0 on; documents end where their ids end.

    Args:
        tables: of the program, on the CPU.
        keys: the number of keys. Without it, some masks that depend only on keys are not recognised.
        batch, heads: numbers of items and heads between which the program differs; None: those of its tables.
    """
    if any(table.device.type != "cpu" for table in tables):
        return None
    known = sizes_of(program, tables)
    sizes = Sizes(keys, known[0] if batch is None else batch, known[1] if heads is None else heads)
    uses = program.depends[program.outputs[0]]
    if "h" not in uses:
        return _Reader(program, tables, sizes).mask(program.outputs[0])
    if sizes.heads is None or sizes.heads > _HEADS:
        return None
    parts = [_Reader(*of_head(program, tables, head), sizes).top() for head in range(sizes.heads)]
    masks = [part for part in parts if part is not None]
    return PerHead(masks) if len(masks) == len(parts) else None


class _Linear(NamedTuple):
    """A sum of nodes with factors, and a constant."""

    terms: dict[int, int]
    constant: int

    def plus(self, other: _Linear, factor: int = 1) -> _Linear:
        terms = dict(self.terms)
        for node, times in other.terms.items():
            terms[node] = terms.get(node, 0) + factor * times
        return _Linear({node: times for node, times in terms.items() if times}, self.constant + factor * other.constant)


class _Reader:
    """Reads one program whose output does not depend on h."""

    def __init__(self, program: Program, tables: Sequence[Tensor], sizes: Sizes):
        self.program, self.nodes, self.tables, self.sizes = program, program.nodes, tables, sizes
        self.depends = program.depends
        self._known: dict[int, Mask | None] = {}

    def top(self) -> Mask | None:
        return self.mask(self.program.outputs[0])

    def mask(self, node: int) -> Mask | None:
        """The mask that is equivalent to a boolean node, or None."""
        if node not in self._known:
            try:
                self._known[node] = self._mask(node)
            except ValueError:  # a number beyond those that masks take
                self._known[node] = None
        return self._known[node]

    def _mask(self, node: int) -> Mask | None:
        made = self.nodes[node]
        if made.op == "const":
            return Window(None, None) if made.value else ~Window(None, None)
        if made.op in ("and", "or", "xor") and self.sizes.keys is not None and self._uses(node) <= _OF_KEYS:
            return self._of_keys(node)
        if made.op in ("and", "or"):
            return self._several(made.op, self._flat(node, made.op))
        if made.op == "not":
            part = self.mask(made.args[0])
            return None if part is None else without(part)
        if made.op == "xor":
            left, right = (self.mask(arg) for arg in made.args)
            if left is None or right is None:
                return None
            return Or.of(And.of(left, without(right)), And.of(without(left), right))
        found = self._compared(made) if made.op in SWAPPED else None
        return self._of_keys(node) if found is None else found

    def _flat(self, node: int, op: str) -> list[int]:
        made = self.nodes[node]
        return [part for arg in made.args for part in self._flat(arg, op)] if made.op == op else [node]

    def _several(self, op: str, nodes: list[int]) -> Mask | None:
        if op == "or":
            chosen = self._global(nodes) or self._prefix(nodes)
            if chosen is not None:
                special, nodes = chosen
                rest = [self.mask(node) for node in nodes]
                known = [part for part in rest if part is not None]
                return joined(Or, [special, *known]) if len(known) == len(rest) else None
        parts = [self.mask(node) for node in nodes]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return joined(Or, known) if op == "or" else joined(And, one_window(known))

    # --- comparisons

    def _compared(self, made: Node) -> Mask | None:
        left, right = (self._linear(arg) for arg in made.args)
        if left is None or right is None:
            return None
        form = left.plus(right, -1)
        return self._first((self._distance, self._chunks, self._equal), made.op, form)

    def _linear(self, node: int) -> _Linear | None:
        """An int node as a linear form; None for floats."""
        made = self.nodes[node]
        if made.kind != "int":
            return None
        if made.op == "const":
            return _Linear({}, int(made.value or 0))
        if made.op in ("add", "sub", "neg"):
            parts = [self._linear(arg) for arg in made.args]
            if any(part is None for part in parts):
                return None
            first, *rest = (part for part in parts if part is not None)
            if made.op == "neg":
                return _Linear({}, 0).plus(first, -1)
            return first.plus(rest[0], 1 if made.op == "add" else -1)
        if made.op == "mul":
            values = [self.nodes[arg].value if self.nodes[arg].op == "const" else None for arg in made.args]
            for value, other in ((values[0], made.args[1]), (values[1], made.args[0])):
                form = None if value is None else self._linear(other)
                if form is not None and value is not None:
                    return _Linear({}, 0).plus(form, int(value))
        return _Linear({node: 1}, 0)

    def _distance(self, op: str, form: _Linear) -> Mask | None:
        """The mask that compares `factor * (k - q) + constant`, or an absolute value in place of the distance, with 0;
        None if no built-in mask is equivalent."""
        absolute = self._only("abs", form)
        if absolute is not None:
            inner = self._linear(self.nodes[absolute].args[0])
            times = form.terms[absolute]
            return None if inner is None or abs(times) != 1 else self._absolute(op, times, form.constant, inner)
        factor = self._along(form, "k", "q")
        return None if factor is None else between(op, factor, form.constant, window)

    def _absolute(self, op: str, factor: int, constant: int, inner: _Linear) -> Mask | None:
        """`factor * |inner| + constant` compared with 0, with a factor of 1 or -1."""
        if factor < 0:
            op, constant = SWAPPED[op], -constant
        limit = -constant  # |inner| op limit
        if op in ("gt", "ge", "ne"):
            part = self._absolute({"gt": "le", "ge": "lt", "ne": "eq"}[op], 1, constant, inner)
            return None if part is None else without(part)
        most = limit - 1 if op == "lt" else limit
        if most < 0:
            return ~Window(None, None)
        if op == "eq":
            ends = [self._either("eq", inner.plus(_Linear({}, end))) for end in {limit, -limit}]
            return None if None in ends else joined(Or, [end for end in ends if end is not None])
        low = self._either("ge", inner.plus(_Linear({}, most)))
        high = self._either("le", inner.plus(_Linear({}, -most)))
        return None if low is None or high is None else joined(And, one_window([low, high]))

    def _either(self, op: str, form: _Linear) -> Mask | None:
        return self._first((self._distance, self._chunks), op, form)

    def _chunks(self, op: str, form: _Linear) -> Mask | None:
        """Chunks of the key and the query: `k // size - q // size` compared with a constant."""
        if len(form.terms) != 2:
            return None
        for key, query in (tuple(form.terms), tuple(form.terms)[::-1]):
            size = self._quotient(key, "k")
            if size is not None and size == self._quotient(query, "q") and form.terms[key] == -form.terms[query]:

                def chunks(low: int | None, high: int | None, size: int = size) -> Mask | None:
                    if (low or 0) > 0 or (high or 0) < 0:
                        return None
                    return Chunks(size, _FAR if low is None else -low, _FAR if high is None else high)

                return between(op, form.terms[key], form.constant, chunks)
        return None

    def _equal(self, op: str, form: _Linear) -> Mask | None:
        """Documents, and every n-th key."""
        if op not in ("eq", "ne"):
            return None
        made = self._first((self._dilated, self._documents), form)
        return made if made is None or op == "eq" else without(made)

    def _first(self, readings: Sequence[Callable[..., Mask | None]], *form: Any) -> Mask | None:
        return next((mask for reading in readings if (mask := reading(*form)) is not None), None)

    def _dilated(self, form: _Linear) -> Mask | None:
        if len(form.terms) != 1 or form.constant:
            return None
        made = self.nodes[next(iter(form.terms))]
        step = self.nodes[made.args[1]].value if made.op == "mod" and self.nodes[made.args[1]].op == "const" else None
        inner = None if step is None or step < 1 else self._linear(made.args[0])
        if inner is None or step is None or self._along(inner, "k", "q") not in (1, -1):
            return None
        return Dilated(int(step)) if inner.constant % int(step) == 0 else None

    def _documents(self, form: _Linear) -> Mask | None:
        """`ids[q] == ids[k]`, or with the batch item before."""
        if len(form.terms) != 2 or form.constant or sorted(form.terms.values()) != [-1, 1]:
            return None
        loads = [self.nodes[node] for node in form.terms]
        if any(load.op != "load" for load in loads) or loads[0].value != loads[1].value:
            return None
        places = [[self.nodes[arg].op for arg in load.args] for load in loads]
        if sorted(places) not in ([["k"], ["q"]], [["b", "k"], ["b", "q"]]):
            return None
        ids = self._table(loads[0])
        return None if ids is None or ids.dtype == torch.bool or not ids.shape[-1] else Documents(ids.to(torch.int64))

    # --- unions

    def _prefix(self, nodes: list[int]) -> tuple[Mask, list[int]] | None:
        """The prefix mask of `q >= k` together with `k < length`, and the remaining nodes; None if there is none."""
        causal = next((node for node in nodes if isinstance(self.mask(node), Causal)), None)
        for node in nodes if causal is not None else ():
            length = self._below(node)
            if length is not None:
                return Prefix(length), [other for other in nodes if other not in (node, causal)]
        return None

    def _below(self, node: int) -> int | Tensor | None:
        """The number, or one for each item, that the key is below."""
        made = self.nodes[node]
        if made.op not in ("lt", "le", "gt", "ge"):
            return None
        left, right = (self._linear(arg) for arg in made.args)
        if left is None or right is None:
            return None
        form, op = left.plus(right, -1), made.op
        key = next((n for n in form.terms if self.nodes[n].op == "k"), -1)
        if key < 0 or abs(form.terms[key]) != 1:
            return None
        if form.terms[key] < 0:
            form, op = _Linear({}, 0).plus(form, -1), SWAPPED[op]
        if op not in ("lt", "le"):
            return None
        rest, more = {n: t for n, t in form.terms.items() if n != key}, int(op == "le") - form.constant
        if not rest:
            return max(more, 0)
        (load, times), *others = rest.items()
        lone = not others and times == -1 and self.nodes[load].op == "load"
        if not lone or [self.nodes[arg].op for arg in self.nodes[load].args] not in ([], ["b"]):
            return None
        table = self._table(self.nodes[load])
        if table is None:
            return None
        lengths = (table.to(torch.int64) + more).clamp(0, 2**53)
        return lengths if lengths.dim() else int(lengths)

    def _global(self, nodes: list[int]) -> tuple[Mask, list[int]] | None:
        """The mask of global tokens, from a condition on the key and the same condition on the query, and the remaining
        nodes; None if there is none."""
        if self.sizes.keys is None:
            return None
        for key in nodes:
            if self._uses(key) <= {"k", "table"} and "k" in self._uses(key):
                query = next((other for other in nodes if self._like(key, other)), None)
                if query is not None:
                    tokens = self._bits(key, 1)
                    if tokens is None:
                        return None
                    rest = [other for other in nodes if other not in (key, query)]
                    return Global(torch.nonzero(tokens[0]).flatten()), rest
        return None

    def _like(self, key: int, query: int) -> bool:
        """Whether node `key` is node `query` with k in place of q."""
        left, right = self.nodes[key], self.nodes[query]
        if left.op == "k":
            return right.op == "q"
        same = (left.op, left.value, left.kind) == (right.op, right.value, right.kind)
        return same and all(self._like(*pair) for pair in zip(left.args, right.args, strict=True))

    # --- keys alone

    def _of_keys(self, node: int) -> Mask | None:
        """The mask of a condition that depends only on the key and the batch item, computed for every key."""
        if self.sizes.keys is None or not self._uses(node) <= _OF_KEYS:
            return None
        batch = self.sizes.batch if "b" in self._uses(node) else 1
        length = self._below(node)
        if length is not None:
            lengths = torch.tensor([length]) if isinstance(length, int) else length
            return Padding(lengths.clamp(max=self.sizes.keys))
        bits = None if batch is None else self._bits(node, batch)
        return None if bits is None else Padding(bits)

    def _bits(self, node: int, batch: int) -> Tensor | None:
        part = Builder()
        copied = part.copy(self.program)
        items, keys = torch.arange(batch)[:, None], torch.arange(self.sizes.keys or 0)[None]
        try:
            bits = evaluated(part.program(copied[node]), self.tables, {"b": items, "k": keys})
        except IndexError:
            return None  # raised by the mask itself, where such a pair is looked at
        return bits.expand(batch, self.sizes.keys or 0)

    # --- parts of forms

    def _table(self, load: Node) -> Tensor | None:
        """The table that a load reads, of as many batch items as there are."""
        table = self.tables[int(load.value or 0)]
        if not load.args or self.nodes[load.args[0]].op != "b" or self.sizes.batch is None:
            return table
        return table[: self.sizes.batch] if table.shape[0] >= self.sizes.batch else None

    def _uses(self, node: int) -> frozenset[str]:
        return self.depends[node]

    def _only(self, op: str, form: _Linear) -> int | None:
        nodes = list(form.terms)
        return nodes[0] if len(nodes) == 1 and self.nodes[nodes[0]].op == op else None

    def _along(self, form: _Linear, plus: str, minus: str) -> int | None:
        """The factor, if the terms are `factor * (plus - minus)`."""
        named = {self.nodes[node].op: times for node, times in form.terms.items()}
        if len(form.terms) != 2 or set(named) != {plus, minus} or named[plus] != -named[minus]:
            return None
        return named[plus]

    def _quotient(self, node: int, leaf: str) -> int | None:
        """The divisor of `leaf // divisor`."""
        made = self.nodes[node]
        if made.op != "floor_div" or self.nodes[made.args[0]].op != leaf or self.nodes[made.args[1]].op != "const":
            return None
        size = int(self.nodes[made.args[1]].value or 0)
        return size if size > 0 else None
