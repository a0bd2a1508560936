"""The cache of transformers in steps of native calls: buffers with room for the tokens to come, and masks.

Shape legend: R items, Hkv key-value heads, K keys, D width of a head.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ..operator._native_step import NotNative


class GrowingBuffers:
    """Keys and values of the cache layers of transformers, in buffers with room for the tokens to come.

    A layer of transformers' cache makes new tensors at each token. Here it gets views of a buffer, which is used again
    only while the layer still holds the very views that it was given: whatever else is put there is copied first.
    """

    def __init__(self) -> None:
        self._held: weakref.WeakKeyDictionary[Any, Buffer] = weakref.WeakKeyDictionary()

    def room(self, layer: Any) -> Buffer:
        """A buffer that holds the layer's keys and values, and has room for one more token.

        Raises:
            NotNative: for a layer of another kind, and for an empty one.
        """
        kind = type(layer)
        sliding = kind.__name__ == "DynamicSlidingWindowLayer"
        if kind.__module__ != "transformers.cache_utils" or not (sliding or kind.__name__ == "DynamicLayer"):
            raise NotNative("a cache of another kind")
        if (
            not layer.is_initialized
            or layer.keys.dim() != 4
            or (sliding and (layer.record_past or layer.sliding_window < 2))
        ):
            raise NotNative("a cache without tokens, or one that keeps what is behind its window")
        known = self._held.get(layer)
        if known is not None and known.keys is layer.keys and known.values is layer.values and known.stop < known.size:
            return known
        return Buffer(layer.keys, layer.values, layer.sliding_window - 1 if sliding else None)

    def ready(self, layer: Any) -> int:
        """Tokens of a layer and the next one, if it has a buffer with room for this one; else 0."""
        known = None if layer is None else self._held.get(layer)
        ready = (
            known is not None and known.keys is layer.keys and known.values is layer.values and known.stop < known.size
        )
        return known.held() if ready and known is not None else 0

    def grow(self, layer: Any, buffer: Buffer) -> None:
        """Give the layer the token that was written into its buffer."""
        buffer.grow(layer)
        if self._held.get(layer) is not buffer:
            self._held[layer] = buffer


class Buffer:
    """Tokens `start` to `stop` of two buffers (R, Hkv, size, D) are those of the layer."""

    def __init__(self, keys: Tensor, values: Tensor, most: int | None):
        self.start, self.stop, self.most = 0, keys.shape[2], most
        self.size = 2 * self.stop + 16
        self._whole = tuple(_grown(tensor, self.size) for tensor in (keys, values))
        self.keys, self.values = keys, values

    def held(self) -> int:
        """Tokens of the layer, the next one among them."""
        return self.stop + 1 - self.start

    def with_new(self) -> tuple[Tensor, Tensor]:
        """Views (R, Hkv, K + 1, D) of all tokens and the next one's slot."""
        key, value = (whole.narrow(2, self.start, self.held()) for whole in self._whole)
        return key, value

    def grow(self, layer: Any) -> None:
        """Give the layer the new token."""
        self.stop += 1
        if self.most is not None:
            self.start = max(self.start, self.stop - self.most)
            layer.cumulative_length += 1
        self.keys, self.values = (whole.narrow(2, self.start, self.stop - self.start) for whole in self._whole)
        layer.keys, layer.values = self.keys, self.values


def _grown(tensor: Tensor, size: int) -> Tensor:
    batch, heads, length, width = tensor.shape
    whole = tensor.new_empty(batch, heads, size, width)
    whole[:, :, :length] = tensor
    return whole


class SharedArguments:
    """The meaning of the mask and the positions that all layers of a step are given."""

    def __init__(self) -> None:
        self._known: tuple[Tensor, int | None, Tensor] | None = None
        self._waves: list[tuple[Any, list[int | None], tuple[Tensor, Tensor]]] = []

    def waves(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """cos and sin as float32 (items, D)."""
        versions = [_version(wave) for wave in given]
        for known, before, waves in self._waves:
            if known is given and None not in versions and before == versions:
                return waves
        cos, sin = (wave.flatten(0, -2).float().contiguous() for wave in given)
        self._waves = [*self._waves[-1:], (given, versions, (cos, sin))]  # of layers with windows, and of those without
        return cos, sin

    def first(self, mask: Tensor, items: int, keys: int) -> Tensor:
        """int64 (R,).

        Raises:
            NotNative: if the mask shows anything but a last run of the keys.
        """
        known, version = self._known, _version(mask)
        if known is None or known[0] is not mask or version is None or known[1] != version:
            if mask.dtype is not torch.bool or mask.dim() != 4 or mask.shape[1:3] != (1, 1):
                raise NotNative("a mask of another form")
            seen = mask[:, 0, 0]
            first = seen.shape[1] - seen.sum(1)
            whole = seen == (torch.arange(seen.shape[1]) >= first[:, None])
            if not bool(whole.all()) or not bool(seen[:, -1].all()):
                raise NotNative("a mask that hides more than first keys")
            self._known = known = mask, version, first.expand(items).contiguous()
        if mask.shape[3] != keys or len(known[2]) != items:
            raise NotNative("a mask of other keys")
        return known[2]


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # of such, writes are not counted
