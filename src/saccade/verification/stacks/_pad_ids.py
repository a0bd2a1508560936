"""Padding that a model without a mask argument recognises by its token id.

Shape legend: B batch, L length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..findings._finding import Inapplicable, Location, TargetError
from ..subject._inputs import NamedInputs
from ..subject._operations import WatchedOperations
from ..subject._subject import Subject


class PadId(NamedTuple):
    """A token id that stands for padding, and the line that compares tokens with it."""

    number: int
    location: Location | None


def pad_id(subject: Subject, source: Tensor | None = None) -> PadId | None:
    """The id with which the model compares its tokens, or those of its `source` (B, S); None if it compares none that
    its modules or its line call padding."""
    length = min(7, subject.reading.max_length or 7)
    read = subject.inputs(2, length)["tokens"] if source is None else source

    def compared(operation: Any, given: tuple[Any, ...], _: Any) -> int | None:
        if operation.overloadpacket.__name__ not in ("eq", "ne") or len(given) < 2:
            return None
        tokens, number = given[:2]
        if not isinstance(tokens, Tensor) or tokens.is_floating_point():
            return None
        if tokens.shape not in (read.shape, read.shape[::-1]):
            return None
        if isinstance(number, Tensor):
            number = number.item() if number.numel() == 1 else None
        return number + 1 if type(number) is int else None  # what is 0 is not kept

    watched = WatchedOperations(compared)
    tokens = subject.inputs(len(read), length)["tokens"] if source is not None else read
    more = {} if source is None else {"source": source}
    try:
        with watched, torch.no_grad():
            subject.fresh().with_constants(**more)(NamedInputs({"tokens": tokens}, subject.reading.vocabulary))
    except (Inapplicable, TargetError):
        return None
    named = _named(subject)
    for kept, line in watched.found:
        is_named = kept == 1 or kept - 1 in named or (line is not None and "pad" in line.code)
        if is_named and 0 <= kept - 1 < subject.reading.vocabulary:
            return PadId(kept - 1, line)
    return None


def _named(subject: Subject) -> set[int]:
    """The ids of padding in attributes of its modules."""
    modules = [] if subject.module is None else list(subject.module.modules())
    tables = [part.padding_idx for part in modules if isinstance(part, nn.Embedding) and part.padding_idx is not None]
    named = [value for part in modules for name, value in vars(part).items() if "pad" in name and type(value) is int]
    return {*tables, *named}
