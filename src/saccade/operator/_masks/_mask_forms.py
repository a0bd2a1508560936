"""Masks of comparisons with a number: windows and chunks by their lowest and highest distance, and sets of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from ._algebra import And, Not, Or
from ._mask import Mask
from ._relative import Causal, Window
from ._residues import Chunks

SWAPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def between(op: str, factor: int, constant: int, make: Callable[[int | None, int | None], Mask | None]) -> Mask | None:
    """`factor * x + constant` compared with 0, as `make(lowest x, highest x)`."""
    if factor < 0:
        op, factor, constant = SWAPPED[op], -factor, -constant
    if op == "ne":
        part = between("eq", factor, constant, make)
        return None if part is None else without(part)
    if op == "eq":
        if constant % factor:
            return ~Window(None, None)
        return make(-constant // factor, -constant // factor)
    if op == "lt":
        return make(None, -(constant // factor) - 1)
    if op == "le":
        return make(None, (-constant) // factor)
    return make((-constant) // factor + 1, None) if op == "gt" else make(-(constant // factor), None)


def window(low: int | None, high: int | None) -> Mask:
    """Pairs with `low <= k - q <= high`; a window's own sides contain the query's position."""
    parts: list[Mask] = []
    if low is not None and low > 0:
        parts.append(~sides(None, low - 1))
        low = None
    if high is not None and high < 0:
        parts.append(~sides(high + 1, None))
        high = None
    if low is not None or high is not None or not parts:
        parts.append(sides(low, high))
    return joined(And, parts)


def sides(low: int | None, high: int | None) -> Mask:
    return Causal() if (low, high) == (None, 0) else Window(None if low is None else -low, high)


def one_window(parts: Sequence[Mask]) -> list[Mask]:
    """Parts of an intersection: windows as one, before the others, and chunks of one size as one."""
    flat = [each for part in parts for each in (part.parts if isinstance(part, And) else (part,))]
    windows = [part for part in flat if isinstance(part, Causal | Window)]
    chunks: dict[int, Chunks] = {}
    for part in flat:
        if isinstance(part, Chunks):
            other = chunks.get(part.size, part)
            chunks[part.size] = Chunks(part.size, min(part.left, other.left), min(part.right, other.right))
    lefts = [part.left for part in windows if isinstance(part, Window) and part.left is not None]
    rights = [0 if isinstance(part, Causal) else part.right for part in windows]
    closed = [right for right in rights if right is not None]
    whole = [sides(-min(lefts) if lefts else None, min(closed) if closed else None)] if windows else []
    return [*whole, *chunks.values(), *(part for part in flat if not isinstance(part, Causal | Window | Chunks))]


def without(mask: Mask) -> Mask:
    return Not.of(mask)


def joined(kind: type[And] | type[Or], parts: Sequence[Mask]) -> Mask:
    distinct = list(dict.fromkeys(parts))
    return distinct[0] if len(distinct) == 1 else reduce(kind.of, distinct)
