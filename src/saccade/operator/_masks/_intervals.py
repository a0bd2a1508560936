"""Interval arithmetic on tiles: what a mask does to a rectangle, answered on the host without looking at its pairs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Kind = Literal["empty", "full", "partial"]
Span = tuple[int, int]  # half open: start <= index < stop


class Region(NamedTuple):
    """A rectangle of query rows by keys; `positions` are the positions of its rows. `item` or `head` None means all of
    them."""

    rows: Span
    positions: Span
    keys: Span
    item: int | None = None
    head: int | None = None

    def distances(self) -> tuple[int, int]:
        """Least and greatest `key - position` in the rectangle; every integer between them occurs."""
        return self.keys[0] - (self.positions[1] - 1), self.keys[1] - 1 - self.positions[0]


def band(low: int, high: int, least: int | None, most: int | None) -> Kind:
    """Whether `least <= x <= most` holds for all, no or some x in [low, high]; None means no bound."""
    if (most is not None and low > most) or (least is not None and high < least):
        return "empty"
    if (most is None or high <= most) and (least is None or low >= least):
        return "full"
    return "partial"


def chunks_apart(region: Region, size: int, left: int = 0, right: int = 0) -> Kind:
    """Whether "the key's chunk of `size` lies at most `left` before and `right` after the query's" holds for all, no or
    some pairs of a rectangle."""
    first, last = region.keys[0] // size, (region.keys[1] - 1) // size
    top, bottom = region.positions[0] // size, (region.positions[1] - 1) // size
    return band(first - bottom, last - top, -left, right)


def in_columns(keys: Span, stride: int, columns: int) -> Kind:
    """Whether "key is one of the last `columns` of a block of `stride`" holds for all, no or some keys of a span."""
    first, size = keys[0] % stride, keys[1] - keys[0]
    if first + size <= stride - columns:
        return "empty"
    return "full" if columns == stride or (first >= stride - columns and first + size <= stride) else "partial"


def counted(count: int, size: int) -> Kind:
    """The kind of a rectangle in which `count` of `size` pairs are kept."""
    return "empty" if count == 0 else "full" if count == size else "partial"


def both(kinds: Iterable[Kind]) -> Kind:
    """The kind of an intersection."""
    result: Kind = "full"
    for kind in kinds:
        if kind == "empty":
            return "empty"
        if kind == "partial":
            result = "partial"
    return result


def either(kinds: Iterable[Kind]) -> Kind:
    """The kind of a union."""
    result: Kind = "empty"
    for kind in kinds:
        if kind == "full":
            return "full"
        if kind == "partial":
            result = "partial"
    return result


def inverted(kind: Kind) -> Kind:
    """The kind of a complement."""
    if kind == "partial":
        return "partial"
    return "full" if kind == "empty" else "empty"


def throughout(kinds: Iterable[Kind]) -> Kind:
    """The kind that several batch items or heads share, or "partial" as soon as two of them differ."""
    shared: Kind | None = None
    for kind in kinds:
        if kind == "partial" or (shared is not None and kind != shared):
            return "partial"
        shared = kind
    return "empty" if shared is None else shared
