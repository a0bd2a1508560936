"""The smallest input that still shows a difference, by delta debugging (Zeller and Hildebrandt 2002)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

from ..findings._finding import Inapplicable, TargetError
from ._documents import Documents

T = TypeVar("T")
_SECONDS = 4.0  # then the smallest so far is given


def smallest(documents: Documents, shows: Callable[[Documents], T | None], shown: T) -> tuple[Documents, T]:
    """Fewer and shorter documents for which `shows` still gives something true, and what it gives; `shown` is that of
    all. Documents that raise do not count."""
    end = time.perf_counter() + _SECONDS
    changed = True
    while changed:
        changed = False
        for candidate in _smaller(documents):
            if time.perf_counter() > end:
                return documents, shown
            with suppress(Inapplicable, TargetError):
                if value := shows(candidate):
                    documents, shown, changed = candidate, value, True
                    break
    return documents, shown


def _smaller(documents: Documents) -> Iterator[Documents]:
    """The documents without one of them; then without a part of one, halves before single tokens."""
    if len(documents) > 1:
        yield from ([*documents[:at], *documents[at + 1 :]] for at in range(len(documents)))
    halves = {len(document) >> times for document in documents for times in range(1, 9)}
    pieces = sorted({1, 2, *halves} - {0}, reverse=True)  # pairs, too: some faults need an even number
    for piece in pieces:
        for at, document in enumerate(documents):
            if len(document) > piece:
                for start in range(0, len(document), piece):
                    kept = document[:start] + document[start + piece :]
                    if kept:
                        yield [*documents[:at], kept, *documents[at + 1 :]]
