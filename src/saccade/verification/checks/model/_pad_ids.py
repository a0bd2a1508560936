"""Padding that a model recognises by its token id: more padding at the end must not change a real output.

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
from ...subject._token_models import EncoderDecoderModel
from ._common import NAME, LargestDifference, fitting, given, judged, largest, output

_COMPARED = ("eq", "ne")
_LENGTH, _DECODED = 9, 5  # of the tokens, and of the decoder's where the source is padded


def pad_ids(subject: Subject) -> Iterator[Finding]:
    """Padding given by ids: of a model without a mask argument, of an encoder-decoder's source and of its decoder's
    tokens."""
    if isinstance(subject.target, EncoderDecoderModel) and subject.target.masks[0] is None:
        yield from _side(subject, "source")
    if not subject.reading.masks and fitting(subject, _LENGTH) >= _LENGTH - 4:
        yield from _side(subject, "tokens")


def _side(subject: Subject, side: str) -> Iterator[Finding]:
    compared = _compared(subject, side)
    tables = [table.padding_idx for table in _tables(subject) if table.padding_idx is not None]
    numbers = dict.fromkeys([*compared, *tables[:1]])
    for number in (known for known in numbers if 0 <= known < subject.reading.vocabulary):
        gap, counts = judged(subject, lambda model, pad=number: _moved(model, side, pad))  # type: ignore[misc]
        if gap.relative > counts:
            yield _finding(side, number, gap, number in compared, compared.get(number))
            return


def _called(subject: Subject, side: str, tokens: Tensor) -> Tensor:
    """The outputs for these tokens; for `side` "source" those of the decoder, for this source and a few fixed
    tokens."""
    with torch.no_grad():
        if side == "tokens":
            return subject(NamedInputs({"tokens": tokens}, subject.reading.vocabulary)).out
        own = subject.inputs(len(tokens), fitting(subject, _DECODED), seed=1)
        return output(subject, given(subject, own, source=tokens))


def _tables(subject: Subject) -> list[nn.Embedding]:
    modules = [] if subject.module is None else subject.module.modules()
    return [module for module in modules if isinstance(module, nn.Embedding)]


def _compared(subject: Subject, side: str) -> dict[int, Location | None]:
    """The token numbers that the model compares its input with and calls padding, with the line."""
    read = _drawn(subject, side)
    shape = read.shape

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
        with watch:
            _called(subject.fresh(), side, read)
    except (Inapplicable, TargetError):
        return {}
    known = {table.padding_idx for table in _tables(subject)} | _named(subject)
    return {
        kept - 1: line
        for kept, line in reversed(watch.found)
        if kept - 1 in known or kept == 1 or (line is not None and "pad" in line.code)
    }


def _named(subject: Subject) -> set[int]:
    """The ids of padding in attributes of its modules."""
    modules = [] if subject.module is None else subject.module.modules()
    values = [
        value for module in modules for name, value in vars(module).items() if "pad" in name and type(value) is int
    ]
    return set(values)


def _drawn(subject: Subject, side: str) -> Tensor:
    length = subject.target.source.shape[1] if side == "source" else fitting(subject, _LENGTH)
    return subject.inputs(2, length)["tokens"]


def _moved(subject: Subject, side: str, pad: int) -> LargestDifference:
    """The change of a text's outputs when three padded tokens follow it."""
    drawn = _drawn(subject, side)
    other = next(token for token in range(subject.reading.vocabulary - 1, -1, -1) if token != pad)
    padded = drawn.masked_fill(drawn == pad, other)
    short = padded.shape[1] - 3
    padded[:, short:] = pad
    whole, alone = _called(subject, side, padded), _called(subject, side, padded[:, :short])
    return largest(whole[:, : alone.shape[1]], alone)


def _finding(side: str, pad: int, gap: LargestDifference, masked: bool, line: Location | None) -> Finding:
    why = "it hides padding by its number, and not from the queries" if masked else "nothing hides it"
    after, ids = (" its source", "src") if side == "source" else ("", "input_ids")
    return Finding(
        NAME,
        NAME,
        "error" if masked else "warning",
        f"Output {gap.position}, a real one, changes by {gap.size:.3g} when three tokens of the padding number "
        f"{pad} follow{after}: {why}.",
        "The result for a sequence changes with the length of the padding in its batch.",
        f"mask = ({ids} != {pad})[:, None, None, :]  # (batch, 1, 1, keys): hides keys, from all queries",
        {"pad": pad, "side": side, "position": gap.position, "change": rounded(gap.size)},
        line,
    )
