"""A reading in words, for the report."""

from __future__ import annotations

from ._subject import Subject

_AXES = {"B": "batch", "H": "heads", "L": "length"}
_INPUTS = {
    "attention": ("query", "key", "value"), "self": ("x",), "cross": ("x", "context"), "qkv": ("query", "key", "value"),
    "tokens": ("tokens",),
}  # fmt: skip


def call_in_words(subject: Subject) -> str:
    """ "forward(x, mask) with x (batch, length, 64)"."""
    reading = subject.reading
    inputs = reading.names or _INPUTS[reading.form]
    masks = [f"{mask.argument}" if isinstance(mask.argument, str) else "mask" for mask in reading.masks]
    more = [f"{name}={value!r}" for name, value in reading.constants.items()]
    name = (
        "forward" if subject.module is not None else getattr(subject.target, "__name__", type(subject.target).__name__)
    )
    shape = ", ".join(_AXES.get(axis) or str(reading.width) for axis in reading.layout)
    subjects = inputs[0] if len(inputs) == 1 else f"{', '.join(inputs[:-1])} and {inputs[-1]}"
    each = " each" if len(inputs) > 1 else ""
    heads = f", {reading.heads} heads" if reading.form == "attention" and reading.heads else ""
    return f"{name}({', '.join([*inputs, *dict.fromkeys(masks), *more])}) with {subjects}{each} ({shape}){heads}"
