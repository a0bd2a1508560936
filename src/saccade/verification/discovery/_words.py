"""A reading as a sentence for the report."""

from __future__ import annotations

from .._reading import MaskReading, Reading

_AXES = {"B": "batch", "H": "heads", "L": "length", "D": "width", "Q": "queries", "K": "keys", "1": "1"}
_MEANING = {"attend": "True = attend", "ignore": "True = ignore", "additive": "added to the scores"}
_INPUTS = {
    "attention": ("query", "key", "value"), "qkv": ("query", "key", "value"), "cross": ("x", "context"), "self": ("x",),
    "tokens": ("tokens",),
}  # fmt: skip


def in_words(reading: Reading) -> str:
    """ "(x, mask): x (batch, length, 24), mask (batch, keys) True = attend; returns (output, weights)"."""
    names = reading.names or _INPUTS[reading.form]
    arguments = list(dict.fromkeys(str(mask.argument) for mask in reading.masks))
    flag = [reading.causal_flag] if reading.causal_flag else []
    masks = "".join(f", {name} {_shapes(reading, name)}" for name in arguments)
    return f"({', '.join([*names, *arguments, *flag])}): {_joined(names)} {_shape(reading)}{masks}; {_returns(reading)}"


def _joined(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _shape(reading: Reading) -> str:
    sizes = {"D": str(reading.width) if reading.form != "attention" else "width"}
    return f"({', '.join(sizes.get(letter, _AXES[letter]) for letter in reading.layout)})"


def _shapes(reading: Reading, name: str) -> str:
    own = [mask for mask in reading.masks if str(mask.argument) == name]
    shapes = " or ".join(f"({', '.join(_AXES[letter] for letter in mask.axes)})" for mask in own)
    return f"{shapes} {_meaning(own[0])}"


def _meaning(mask: MaskReading) -> str:
    return "real positions of each item" if mask.axes == "B" else _MEANING[mask.meaning]


def _returns(reading: Reading) -> str:
    if reading.out is None:
        return "returns the output"
    if reading.weights is None:
        return f"its output is item {reading.out!r} of what it returns"
    axes = ", ".join(_AXES[letter] for letter in reading.weights_axes)
    parts = {reading.out: "output", reading.weights: f"weights ({axes})"}
    if set(parts) == {0, 1}:
        return f"returns ({parts[0]}, {parts[1]})"
    return "of what it returns, " + " and ".join(f"{where!r} is the {what}" for where, what in parts.items())
