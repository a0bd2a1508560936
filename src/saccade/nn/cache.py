"""Keys and values of the tokens decoded so far.

Shapes: B batch, Hkv key/value heads, L length, D key width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._biases import Bias
from .._masks import Mask, Padding


class Seen(NamedTuple):
    """What one attention call gets."""

    key: Tensor
    value: Tensor
    mask: Mask | None
    bias: Tensor | Bias | None


class LayerCache:
    """The keys and values one layer has seen: each (B, Hkv, length, D), keys already turned by their positions."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.key is None else self.key.shape[2]

    def offset(self, length: int, padding: Padding | None = None) -> int | Tensor:
        return self.length

    def append(
        self, key: Tensor, value: Tensor, mask: Mask | None, bias: Tensor | Bias | None = None,
        padding: Padding | None = None,
    ) -> Seen:  # fmt: skip
        """Add the keys and values of new tokens and return those of all tokens."""
        if self.key is None or self.value is None:
            self.key, self.value = key, value
        else:
            _check_fits("key", self.key, key)
            _check_fits("value", self.value, value)
            self.key = torch.cat((self.key, key), dim=2)
            self.value = torch.cat((self.value, value), dim=2)
        if padding is not None:
            real = padding._with(queries=padding.keys)
            mask = real if mask is None else mask & real
        return Seen(self.key, self.value, mask, bias)


class GrowingLayer(LayerCache):
    pass


class ContextLayer:
    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None

    def get(self, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        if self.kept is None:
            self.kept = project()
        return self.kept


class KVCache:
    """One `LayerCache` for each layer of a decoder. Fill it by handing it to the decoder again and again."""

    def __init__(self, layers: list[LayerCache]):
        self.layers = layers
        self.contexts = [ContextLayer() for _ in layers]

    @classmethod
    def growing(cls, layers: int) -> KVCache:
        return cls([GrowingLayer() for _ in range(layers)])

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        return self.layers[0].length if self.layers else 0

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]


def _check_fits(name: str, old: Tensor, new: Tensor) -> None:
    expected = (old.shape[0], old.shape[1], old.shape[3])
    came = (new.shape[0], new.shape[1], new.shape[3])
    if came != expected:
        raise ValueError(
            f"cache: it holds {name}s of (batch, heads, width) {expected}, but new ones of {came} came: "
            "a cache serves one batch and one module"
        )
