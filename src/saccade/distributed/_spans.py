"""Spans of rows, and the rows of a tensor that they name."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operator._masks._intervals import Span

Spans = tuple[Span, ...]


def size(spans: Spans) -> int:
    """Number of positions in spans."""
    return sum(stop - start for start, stop in spans)


def cut(tensor: Tensor, dim: int, spans: Spans) -> Tensor:
    """The rows `spans` along `dim`, one behind the other."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)


def put(whole: Tensor, dim: int, spans: Spans, part: Tensor) -> None:
    """Write the parts of `part`, one behind the other, to `spans` along `dim`."""
    done = 0
    for start, stop in spans:
        whole.narrow(dim, start, stop - start).copy_(part.narrow(dim, done, stop - start))
        done += stop - start


def within(spans: Spans, whole: Spans) -> Spans:
    """Where `spans` are in a tensor that has the rows `whole` one behind the other."""
    places, before = [], 0
    for first, last in whole:
        inside = [(max(a, first), min(b, last)) for a, b in spans]
        places += [(a - first + before, b - first + before) for a, b in inside if a < b]
        before += last - first
    return tuple(places)
