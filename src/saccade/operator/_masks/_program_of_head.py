"""The program of one head: what depends on the head becomes constant."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._programs._language import Builder, Node, Program


def of_head(program: Program, tables: Sequence[Tensor], head: int) -> tuple[Program, Sequence[Tensor]]:
    """The program of one head: its tables indexed, and what is constant then folded."""
    build, held = Builder(), list(tables)
    here: list[int] = []
    for node in program.nodes:
        args = tuple(here[arg] for arg in node.args)
        if node.op == "h":
            here.append(build.const(head, "int"))
        elif node.op == "load":
            here.append(_loaded(build, node, args, held))
        elif node.op in ("b", "q", "k", "const"):
            here.append(build.add(node))
        else:
            here.append(build.of(node.op, *args))
    return build.program(here[program.outputs[0]]), held


def _loaded(build: Builder, node: Node, args: tuple[int, ...], tables: list[Tensor]) -> int:
    """A load whose constant indices are taken out of the table."""
    values = [build.value(arg) for arg in args]
    table = tables[int(node.value or 0)]
    for axis in range(len(args) - 1, -1, -1):
        value = values[axis]
        if value is not None:
            if not 0 <= value < table.shape[axis]:
                return build.load(int(node.value or 0), node.kind, *args)  # an error where it is evaluated
            table = table.select(axis, int(value))
    if not table.dim():
        return build.const(table.item(), node.kind)
    if all(value is None for value in values):
        return build.load(int(node.value or 0), node.kind, *args)
    number = next((n for n, other in enumerate(tables) if _same_memory(other, table)), len(tables))
    if number == len(tables):
        tables.append(table)
    return build.load(number, node.kind, *(arg for arg, value in zip(args, values, strict=True) if value is None))


def _same_memory(left: Tensor, right: Tensor) -> bool:
    same = left.shape == right.shape and left.stride() == right.stride() and left.dtype == right.dtype
    return same and left.data_ptr() == right.data_ptr()
