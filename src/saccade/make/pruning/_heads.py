"""Parses the argument `heads`: layers by number, name or path."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

from ._layers import PrunableLayer, listed

LayerKey = int | str
Heads = str | Mapping[LayerKey, int | Iterable[int]] | Iterable[tuple[LayerKey, int]]


def chosen_heads(heads: Heads, layers: Sequence[PrunableLayer]) -> dict[PrunableLayer, list[int]]:
    """The heads to remove from each layer.

    Raises:
        TypeError: another type of value. ValueError: unknown layers or heads, an ambiguous name, all heads of a layer,
            or no heads.
    """
    by_layer: dict[PrunableLayer, set[int]] = {}
    for key, head in _pairs(heads):
        layer = _layer(key, layers)
        if layer.refusal:
            raise ValueError(f"heads: layer {layer.name} ({layer.path}) cannot lose heads: {layer.refusal}")
        head = _whole(head)
        if not 0 <= head < layer.heads:
            raise ValueError(f"heads: layer {layer.name} has the heads 0 to {layer.heads - 1}, got {head}")
        by_layer.setdefault(layer, set()).add(head)
    if not by_layer:
        raise ValueError("heads: none given; expected some, such as {4: [1, 3]} or '4.1,4.3'")
    for layer, given in by_layer.items():
        if len(given) == layer.heads:
            raise ValueError(
                f"heads: those are all {layer.heads} heads of layer {layer.name}; at least one must stay, since "
                "attention without heads is not supported"
            )
    return {layer: sorted(by_layer[layer]) for layer in layers if layer in by_layer}


def _pairs(heads: Heads) -> list[tuple[LayerKey, int]]:
    if isinstance(heads, str):
        return [_pair(part) for part in heads.split(",") if part.strip()]
    if isinstance(heads, Mapping):
        return [(key, head) for key, given in heads.items() for head in _several(given)]
    expected = "a mapping {layer: heads}, pairs (layer, head), or a str such as '4.1,5.3'"
    try:
        pairs = list(heads)
        return [(key, head) for key, head in pairs]
    except (TypeError, ValueError):
        raise TypeError(f"heads: expected {expected}, got {heads!r}") from None


def _several(given: object) -> Iterable[Any]:
    """The heads of one layer as an iterable: several, or a single number."""
    return given if isinstance(given, Iterable) and getattr(given, "ndim", None) != 0 else [given]


def _whole(head: object) -> int:
    """A head's number as an int, also from NumPy or PyTorch."""
    if isinstance(head, bool) or not isinstance(head, SupportsIndex):
        raise TypeError(f"heads: a head is an int, got {head!r}")
    return operator.index(head)


def _pair(part: str) -> tuple[LayerKey, int]:
    layer, point, head = part.strip().rpartition(".")
    if not point or not layer or not head.isdigit():
        raise ValueError(f"heads: expected layer.head, such as 4.1, got {part.strip()!r}")
    return layer, int(head)


def _layer(key: LayerKey, layers: Sequence[PrunableLayer]) -> PrunableLayer:
    """The layer with a number, a name, a path or a dotted part of one."""
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise TypeError(f"heads: a layer is a number, a name or a path, got {key!r}")
    fits = [layer for layer in layers if str(key) in (layer.name, layer.path)]
    if not fits and str(key).isdigit():
        fits = [layer for layer in layers if layer.number == int(key)]
    elif not fits:
        fits = [layer for layer in layers if f".{key}." in f".{layer.path}."]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise ValueError(f"heads: layer {key} is ambiguous, give one of {listed(fits)}")
    raise ValueError(f"heads: there is no layer {key}; the model has {listed(layers)}")
