"""What a reading says of masks and of what is returned, in words for the report."""

from __future__ import annotations

from .._reading import MaskReading, Reading

_AXES = {"B": "batch", "H": "heads", "L": "length", "D": "width", "Q": "queries", "K": "keys", "1": "1"}
_MEANING = {"attend": "True = attend", "ignore": "True = ignore", "additive": "added to the scores"}


def masks_in_words(reading: Reading) -> str:
    """ "; mask (batch, queries, keys) True = attend", for each mask argument."""
    return _of(reading.masks, _AXES) + _of(reading.own_masks, _AXES | {"K": "queries"})


def _of(masks: tuple[MaskReading, ...], axes: dict[str, str]) -> str:
    arguments = dict.fromkeys(str(mask.argument) for mask in masks)
    return "".join(f"; {name} {_shapes(masks, name, axes)}" for name in arguments)


def _shapes(masks: tuple[MaskReading, ...], name: str, axes: dict[str, str]) -> str:
    own = [mask for mask in masks if str(mask.argument) == name]
    shapes = " or ".join(f"({_shape(mask, axes)})" for mask in own)
    return f"{shapes} {_meaning(own[0])}"


def _shape(mask: MaskReading, axes: dict[str, str]) -> str:
    words = ", ".join(axes[letter] for letter in mask.axes)
    return words.replace("batch, heads", "batch x heads") if mask.merged else words


def _meaning(mask: MaskReading) -> str:
    return "real positions of each item" if mask.axes == "B" else _MEANING[mask.meaning]


def returned_in_words(reading: Reading) -> str:
    """ "; returns (output, weights (batch, heads, queries, keys))"; "" where it returns the output alone."""
    if reading.out is None:
        return ""
    if reading.weights is None:
        return f"; its output is {reading.out!r} of what it returns"
    axes = ", ".join(_AXES[letter] for letter in reading.weights_axes)
    parts = {reading.out: "output", reading.weights: f"weights ({axes})"}
    if set(parts) == {0, 1}:
        return f"; returns ({parts[0]}, {parts[1]})"
    return "; of what it returns, " + " and ".join(f"{where!r} is the {what}" for where, what in parts.items())
