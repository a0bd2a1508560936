"""Which of the things a target returns is the output, and which the attention weights.

Shape legend: B batch, H heads, Lq / Lk (Q, K) lengths, D width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

from torch import Tensor

from .._inputs import NamedInputs
from .._reading import Hints, Reading
from ._documentation import DocumentedSource
from ._trials import tensors_in

# What has the shape of weights and is none; "scores" is often what people call the weights.
_OTHERS = r".*(bias(es)?|logits?|lse|logsumexp|raw|mask|cache|past|state|positions?|pre_softmax|dots|similarity|sim).*"
_WEIGHTS = r".*(attn|attention|weight|prob|alpha|score).*|p|w|a|att"


def with_returns(
    reading: Reading, returned: Any, inputs: NamedInputs, source: DocumentedSource, hints: Hints
) -> Reading | None:
    """The reading with the places of output and weights; None if nothing returned has an output's shape."""
    tensors = dict(tensors_in(returned))
    out = hints.out if hints.out is not None else _output(reading, tensors, inputs)
    if out not in tensors or not _fits(tensors[out], reading, inputs):
        return None
    reading = replace(reading, out=out)
    if hints.weights is not None:
        axes = _axes(tensors[hints.weights], inputs, reading) if hints.weights in tensors else None
        return replace(reading, weights=hints.weights, weights_axes=axes or "BHQK")
    names = dict(enumerate(source.returned_names(len(tensors)))) if isinstance(returned, tuple) else {}
    for where, tensor in tensors.items():
        name = where if isinstance(where, str) else names.get(where or 0, "")
        axes = _axes(tensor, inputs, reading)
        if where != out and axes and _is_weights(name, tensor):
            return replace(reading, weights=where, weights_axes=axes)
    return reading


def _output(reading: Reading, tensors: dict[Any, Tensor], inputs: NamedInputs) -> int | str | None:
    fitting = [where for where, tensor in tensors.items() if _fits(tensor, reading, inputs)]
    wide = [where for where in fitting if tensors[where].shape[-1] == _width(reading)]
    return (wide or fitting or [None])[0]


def _fits(tensor: Tensor, reading: Reading, inputs: NamedInputs) -> bool:
    layout = reading.out_layout or reading.layout
    if tensor.dim() != len(layout) or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    sizes = _sizes(inputs)
    sizes["L"] = sizes["Q"]
    expected = [sizes[letter] for letter in layout if letter != "D"]
    return [size for size, letter in zip(tensor.shape, layout, strict=True) if letter != "D"] == expected


def _sizes(inputs: NamedInputs) -> dict[str, int]:
    query = inputs.tensors.get("query")
    heads = query.shape[1] if query is not None and query.dim() == 4 else 0
    return {"B": inputs.batch, "Q": inputs.length, "K": inputs.key_length, "H": heads}


def _axes(tensor: Tensor, inputs: NamedInputs, reading: Reading) -> str | None:
    """The letters of a tensor of attention weights, or None if it can be none."""
    sizes = _sizes(inputs)
    sizes["H"] = sizes["H"] or reading.heads or 0
    for axes in _known_axes():
        if len(axes) == tensor.dim() and all(
            size == sizes[letter] or (letter == "H" and not sizes["H"]) or (letter == "H" and size == 1)
            for size, letter in zip(tensor.shape, axes, strict=True)
        ):
            return axes
    return None


def _known_axes() -> Iterator[str]:
    yield from ("BHQK", "BQK", "HQK", "QK", "BQHK", "BHKQ", "BKQ", "KQ", "HBQK", "BQKH")
    yield from ("".join(letters) for letters in permutations("BHQK"))


def _is_weights(name: str, tensor: Tensor) -> bool:
    """Whether a returned tensor holds weights: by its name if the name is known, otherwise if no value is negative."""
    lowered = name.lower().strip("_")
    if re.fullmatch(_OTHERS, lowered):
        return False
    return re.fullmatch(_WEIGHTS, lowered) is not None or not bool((tensor < 0).any())


def _width(reading: Reading) -> int:
    """The width of the output."""
    return (reading.value_width if reading.form == "attention" else None) or reading.width
