"""Padding that a model knows by its token number: more of it behind a text moves no real output.

Shape legend: B batch, L length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ....support._numbers import rounded
from ...findings._finding import Finding, Inapplicable, Location, TargetError
from ...subject._inputs import NamedInputs
from ...subject._operations import WatchedOperations
from ...subject._subject import Subject
from ._common import NAME, LargestDifference, fitting, judged, largest

_COMPARED = ("eq", "ne")


def pad_ids(subject: Subject) -> Iterator[Finding]:
    """Of a model that takes no mask."""
    length = fitting(subject, 9)
    if subject.reading.masks or length < 5:
        return
    compared = _compared(subject, length)
    tables = [one.padding_idx for one in _tables(subject) if one.padding_idx is not None]
    numbers = dict.fromkeys([*compared, *tables[:1]])
    for number in (one for one in numbers if 0 <= one < subject.reading.vocabulary):
        found, counts = judged(subject, lambda one, pad=number: _moved(one, length, pad))  # type: ignore[misc]
        if found.relative > counts:
            yield _finding(number, found, number in compared, compared.get(number))
            return


def _tables(subject: Subject) -> list[nn.Embedding]:
    modules = [] if subject.module is None else subject.module.modules()
    return [one for one in modules if isinstance(one, nn.Embedding)]


def _compared(subject: Subject, length: int) -> dict[int, Location | None]:
    """The token numbers that the model compares its input with and calls padding, with the line."""
    inputs = subject.inputs(2, length)
    shape = inputs["tokens"].shape

    def judge(operation: Any, given: tuple[Any, ...], result: Any) -> int | None:
        if operation.overloadpacket.__name__ not in _COMPARED or len(given) < 2:
            return None
        tokens, number = given[0], given[1]
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.shape not in (shape, shape[::-1]):
            return None
        if isinstance(number, Tensor):
            number = number.item() if number.numel() == 1 else None
        return None if not isinstance(number, int) or isinstance(number, bool) else number + 1  # 0 is a number, too

    watch = WatchedOperations(judge)
    try:
        with torch.no_grad(), watch:
            subject.fresh()(inputs)
    except (Inapplicable, TargetError):
        return {}
    known = {one.padding_idx for one in _tables(subject)} | _named(subject)
    return {
        kept - 1: line
        for kept, line in reversed(watch.found)
        if kept - 1 in known or kept == 1 or (line is not None and "pad" in line.code)
    }


def _named(subject: Subject) -> set[int]:
    """Attributes of its modules that say what padding is."""
    modules = [] if subject.module is None else subject.module.modules()
    values = [value for one in modules for name, value in vars(one).items() if "pad" in name and type(value) is int]
    return set(values)


def _moved(subject: Subject, length: int, pad: int) -> LargestDifference:
    """How far the outputs of a text move when three padded tokens follow it."""
    drawn = subject.inputs(2, length)
    other = next(one for one in range(subject.reading.vocabulary - 1, -1, -1) if one != pad)
    tokens = drawn["tokens"].masked_fill(drawn["tokens"] == pad, other)
    short = length - 3
    padded = tokens.clone()
    padded[:, short:] = pad
    whole, alone = (NamedInputs({"tokens": one}, drawn.vocabulary) for one in (padded, tokens[:, :short]))
    with torch.no_grad():
        return largest(subject(whole).out[:, :short], subject(alone).out)


def _finding(pad: int, gap: LargestDifference, masked: bool, line: Location | None) -> Finding:
    why = "it hides padding by its number, and not from the queries" if masked else "nothing hides it"
    return Finding(
        NAME,
        NAME,
        "error" if masked else "warning",
        f"Output {gap.position}, a real one, changes by {gap.size:.3g} when three tokens of the padding number "
        f"{pad} follow: {why}.",
        "The result for a sequence changes with the length of the padding in its batch.",
        f"mask = (input_ids != {pad})[:, None, None, :]  # (batch, 1, 1, keys): hides keys, from all queries",
        {"pad": pad, "position": gap.position, "change": rounded(gap.size)},
        line,
    )
