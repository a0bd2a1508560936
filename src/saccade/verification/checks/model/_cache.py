"""Decoding with a cache against one pass over all tokens.

Shape legend: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....support._numbers import rounded
from ...findings._finding import Finding, Location, TargetError, UnreadableResult
from ...subject._decoder import CachedDecoder, in_pieces
from ...subject._influence import is_causal
from ...subject._inputs import NamedInputs
from ...subject._subject import Subject
from ._common import LargestDifference, counting_line, error, fitting, judged, largest

_LONGEST_WINDOW = 64


def caches(subject: Subject) -> Iterator[Finding]:
    """Findings about decoding with a cache: token by token, in two parts, and with transformers' cache of fixed size if
    there is one."""
    if subject.reading.cache is None or not is_causal(subject):
        return
    window = _window(subject)
    length = fitting(subject, 9 if window is None else window + 5)
    inputs = subject.inputs(2, length)
    with torch.no_grad():
        ways: list[tuple[str, Sequence[int], Any]] = [("token by token", [1] * length, None)]
        ways += [("3 tokens, then one, then the rest at once", [3, 1, length - 4], None)] if length > 4 else []
        fixed = _fixed_size(subject, length)
        ways += [("token by token into a cache of fixed size", [1] * length, fixed)] if fixed is not None else []
        for words, sizes, make in ways:
            difference = _compared(subject, inputs, sizes, make)
            if difference is not None:
                yield _finding(words, length, window, counting_line(subject, inputs), *difference)
                return


def _compared(
    subject: Subject, inputs: NamedInputs, sizes: Sequence[int], make: Callable[[], Any] | None
) -> tuple[int, float, float] | None:
    """(first output that is wrong, the largest difference, relative), None if all are right."""
    apart = torch.zeros(inputs.length)

    def measure(subject: Subject) -> LargestDifference:
        stepped, whole = _in_steps(subject, inputs, sizes, make), subject(inputs).out
        apart.copy_((stepped - whole).abs().nan_to_num(nan=float("inf")).amax((0, 2)) / (whole.abs().max() or 1.0))
        return largest(stepped, whole)

    gap, counts = judged(subject, measure)
    if gap.relative <= counts:
        return None
    return int((apart > counts).nonzero()[0]), gap.size, gap.relative


def _in_steps(subject: Subject, inputs: NamedInputs, sizes: Sequence[int], make: Callable[[], Any] | None) -> Tensor:
    """(B, L, V): the tokens in parts of these sizes. `make` gives an empty cache in place of the target's own."""
    cache = subject.reading.cache
    assert cache is not None
    if make is not None:
        subject = replace(subject, reading=replace(subject.reading, cache=replace(cache, make=make)))
    try:
        return in_pieces(CachedDecoder(subject), inputs, sizes)
    except UnreadableResult as error:
        if error.__cause__ is None:
            raise
        raise TargetError("use_cache=True was passed, and no cache was returned", None) from error


def _window(subject: Subject) -> int | None:
    """The window of the model's layers, if texts of a test can be longer than it."""
    config = getattr(subject.target, "config", None)
    window = min((width for width in subject.reading.windows if width), default=getattr(config, "sliding_window", None))
    return window if isinstance(window, int) and 0 < window <= _LONGEST_WINDOW else None


def _fixed_size(subject: Subject, length: int) -> Callable[[], Any] | None:
    """A static cache of transformers, for models that say that they take one."""
    transformers = sys.modules.get("transformers")
    target: Any = subject.target
    if transformers is None or not isinstance(target, transformers.PreTrainedModel):
        return None
    if not getattr(target, "_can_compile_fullgraph", False):
        return None
    return lambda: transformers.StaticCache(config=target.config, max_cache_len=length + 2)


def _finding(
    words: str, length: int, window: int | None, line: Location | None, first: int, size: float, relative: float
) -> Finding:
    after = f", the first beyond the window of {window}" if window is not None and first == window else ""
    return error(
        f"Decoding {words} differs from one pass over the same {length} tokens, from output {first} on{after}: by "
        f"{size:.3g} at most ({relative:.2g} of the largest output).",
        "Generated text differs from what the model was trained to give, and grows worse with every token.",
        "position = past_length + torch.arange(L)  # new tokens stand behind the cached ones, and their keys too",
        {"how": words, "length": length, "first": first, "size": rounded(size), "relative": relative},
        line,
    )
