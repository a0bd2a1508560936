"""A reading in words, for the report."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from ...support._numbers import joined
from ._kinds import name_of
from ._reading import MaskReading, Reading
from ._subject import Subject
from .discovery._needed import FilledCall, PositionalCall
from .discovery._signature import arguments_of

_AXES = {"B": "batch", "H": "heads", "L": "length"}
_INPUTS = {
    "attention": ("query", "key", "value"),
    "self": ("x",),
    "cross": ("x", "context"),
    "qkv": ("query", "key", "value"),
    "tokens": ("tokens",),
}


def call_in_words(subject: Subject) -> str:
    """ "forward(x, mask) with x (batch, length, 64)"."""
    reading = subject.reading
    places = _places(subject.target)
    wanted = _INPUTS[reading.form]
    is_own = reading.call is None or isinstance(reading.call, PositionalCall | FilledCall)
    by_place = places[: len(wanted)] if len(places) >= len(wanted) and is_own else wanted
    inputs = list(reading.names or by_place)
    masks = [_name(mask.argument, places) for mask in (*reading.own_masks, *reading.masks)]
    more = [f"{name}={_value(value)}" for name, value in reading.constants.items() if name not in masks]
    target = subject.target
    name = "forward" if subject.module is not None else name_of(target).rpartition(".")[2]
    heads = f", {reading.heads} heads" if reading.form == "attention" and "H" in reading.layout else ""
    called = f"{name}({', '.join([*inputs, *dict.fromkeys(masks), *more])}) with {_shapes(reading, inputs)}{heads}"
    return called + masks_in_words(reading) + returned_in_words(reading)


def _shapes(reading: Reading, inputs: list[str]) -> str:
    """ "x (batch, length, 64) and context (batch, length, 32)"; inputs of one shape are named together."""
    context = reading.context_width or reading.width
    widths = [reading.width, context, reading.value_width or context][: len(inputs)]
    if reading.form == "attention":
        widths = [reading.width] * len(inputs)
    parts = []
    for width in dict.fromkeys(widths):
        own = [name for name, wide in zip(inputs, widths, strict=True) if wide == width]
        shape = ", ".join(_AXES.get(axis) or str(width) for axis in reading.layout)
        parts.append(f"{joined(own)}{' each' if len(own) > 1 else ''} ({shape})")
    return " and ".join(parts)


def _places(target: Any) -> list[str]:
    """The names of positional parameters; [] if they cannot be read or are fewer than the inputs."""
    try:
        parameters = inspect.signature(getattr(target, "forward", target)).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def _name(argument: str | int, places: list[str]) -> str:
    if isinstance(argument, str):
        return argument
    return places[argument] if argument < len(places) else "mask"


def _value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor of shape {list(value.shape)}"
    return repr(value) if len(repr(value)) <= 40 else f"{type(value).__name__}(...)"


_MASK_AXES = {"B": "batch", "H": "heads", "L": "length", "D": "width", "Q": "queries", "K": "keys", "1": "1"}
_MEANING = {"attend": "True = attend", "ignore": "True = ignore", "additive": "added to the scores"}


def masks_in_words(reading: Reading) -> str:
    """ "; mask (batch, queries, keys) True = attend", for each mask argument."""
    return _each_mask(reading.masks, _MASK_AXES) + _each_mask(reading.own_masks, _MASK_AXES | {"K": "queries"})


def _each_mask(masks: tuple[MaskReading, ...], axes: dict[str, str]) -> str:
    arguments = dict.fromkeys(str(mask.argument) for mask in masks)
    return "".join(f"; {name} {_mask_shapes(masks, name, axes)}" for name in arguments)


def _mask_shapes(masks: tuple[MaskReading, ...], name: str, axes: dict[str, str]) -> str:
    own = [mask for mask in masks if str(mask.argument) == name]
    shapes = " or ".join(f"({_shape(mask, axes)})" for mask in own)
    return f"{shapes} {'real positions of each item' if own[0].axes == 'B' else _MEANING[own[0].meaning]}"


def _shape(mask: MaskReading, axes: dict[str, str]) -> str:
    words = ", ".join(axes[letter] for letter in mask.axes)
    return words.replace("batch, heads", "batch x heads") if mask.merged else words


def returned_in_words(reading: Reading) -> str:
    """ "; returns (output, weights (batch, heads, queries, keys))"; "" if only the output is returned."""
    if reading.out is None:
        return ""
    if reading.weights is None:
        return f"; its output is {reading.out!r} of what it returns"
    axes = ", ".join(_MASK_AXES[letter] for letter in reading.weights_axes)
    parts = {reading.out: "output", reading.weights: f"weights ({axes})"}
    if set(parts) == {0, 1}:
        return f"; returns ({parts[0]}, {parts[1]})"
    return "; of what it returns, " + " and ".join(f"{where!r} is the {what}" for where, what in parts.items())


def no_mask(subject: Subject) -> str:
    """ "it takes no mask", and the optional arguments of unknown purpose that were left at their None."""
    reading = subject.reading
    used = {*reading.names, *reading.constants, reading.causal_flag, reading.cache and reading.cache.argument}
    names = [
        argument.name
        for argument in (() if reading.call is not None else arguments_of(subject.target))
        if not argument.role and not argument.required and argument.default is None and argument.name not in used
    ]
    if not names:
        return "it takes no mask"
    which = f"argument {names[0]} was" if len(names) == 1 else f"arguments {', '.join(names)} were"
    return f"it takes no mask that was recognised: the {which} left out; if one is a mask, say --mask {names[0]}"
