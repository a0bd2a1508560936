"""The user's adapter: a function in our layout, whose form follows from the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from ...findings._finding import Undecided
from .._reading import Hints, MaskReading, Reading
from . import _sizes
from ._documentation import DocumentedSource
from ._forms import HEADS, WIDTH
from ._returns import with_returns
from ._trials import TargetTrials

_FORMS = {("query", "key", "value"): "attention", ("x", "context"): "cross", ("x",): "self", ("tokens",): "tokens"}


def adapted(target: Any, adapter: Callable[..., Any], hints: Hints) -> Reading:
    """The reading that calls `adapter(target, ...)`.

    Raises:
        Undecided: its parameters are none of the forms, or no call of it works.
    """
    names = list(inspect.signature(adapter).parameters)[1:]
    inputs = tuple(name for name in names if name != "mask")
    if inputs not in _FORMS:
        raise Undecided(
            f"the adapter takes ({', '.join(names)}) after the target, expected (query, key, value), (x), (x, context) "
            "or (tokens), each with or without mask"
        )
    trials = TargetTrials(target)
    for reading in _candidates(target, _FORMS[inputs], inputs, hints):
        reading = replace(reading, call=adapter)
        given = trials.inputs(reading)
        returned = trials.returned(reading, given, f"width {reading.width}")
        source = DocumentedSource.of(adapter)
        complete = None if returned is None else with_returns(reading, returned, given, source, hints)
        if complete is not None:
            masks = (MaskReading("mask", "BHQK", "attend"),) if "mask" in names else ()
            return replace(complete, masks=masks, assumed=("it is called through the adapter",))
    errors = list(trials.errors.values())
    if len({error.error for error in errors}) == 1:
        raise errors[0]
    raise Undecided(
        f"no call of the adapter works ({'; '.join(error.error for error in errors[:2])})",
        [("its width", "--embed-dim N")],
    )


def _candidates(target: Any, form: Any, names: tuple[str, ...], hints: Hints) -> Iterator[Reading]:
    module = isinstance(target, nn.Module)
    heads = hints.num_heads or (_sizes.heads(target) if module else None)
    if form == "tokens":
        yield Reading("tokens", "BL", 0, names=names, vocabulary=50)
        return
    if form == "attention":
        head_width = next(_sizes.head_widths(target), None) if module else None
        yield Reading(form, "BHLD", hints.embed_dim or head_width or WIDTH, heads or HEADS, names=names)
    else:
        for width in _sizes.widths(target, hints.embed_dim):
            for other in _sizes.context_widths(target, width) if form == "cross" else [None]:
                yield Reading(form, "BLD", width, heads, context_width=other, names=names)
    if form == "attention":
        for width in _sizes.widths(target, hints.embed_dim):
            yield Reading("qkv", "BLD", width, heads, names=names)
