"""The caches of all layers of a decoder."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..._masks import Mask
from .context import ContextLayer
from .fitting import LastAnswers
from .growing import GrowingLayer
from .layer import LayerCache
from .static import StaticLayer
from .streaming import StreamingLayer
from .window import WindowLayer


class KVCache:
    """One `LayerCache` for each layer of a decoder, and one `ContextLayer` for each layer's context.

    Give it to the decoder with each call, with the tokens that follow.

    Args:
        layers: a cache for each layer, of any kinds, each its own object.
        dtype: "int8" keeps keys and values in 8 bits, `Int8Rows`, with half the memory of bfloat16; the layers must be
            empty. For inference: keys or values that require a gradient raise an error. None keeps them as they are.

    Raises:
        TypeError: a layer of another type.
        ValueError: one object twice, another dtype, `dtype="int8"` with tokens in a layer or with a `RecurrentLayer`.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4))
        >>> decoder = saccade.nn.Decoder(config, layers=2)
        >>> cache = saccade.nn.KVCache.window(layers=2, window=4, sinks=1)
        >>> with torch.no_grad():
        ...     for length in (6, 1):
        ...         out = decoder(torch.randn(1, length, 16), cache=cache)
        >>> cache.length, cache.mask
        (7, Window(3, 0) | Global([0]))
    """

    def __init__(self, layers: Sequence[LayerCache], dtype: str | None = None):
        for number, layer in enumerate(layers):
            if not isinstance(layer, LayerCache):
                raise TypeError(f"layers: number {number} must be a LayerCache, got {type(layer).__name__}")
        if len({id(layer) for layer in layers}) < len(layers):
            raise ValueError("layers: a layer's cache serves that layer only, but one object came twice")
        self.layers = list(layers)
        self.contexts = [ContextLayer() for _ in layers]
        shared = LastAnswers()
        for layer in self.layers:
            layer._latest = shared
        if dtype is not None:
            for layer in self.layers:  # all, before the first is changed
                layer._check_dtype(dtype)
            for layer in self.layers:
                layer.round_to(dtype)

    @classmethod
    def growing(cls, layers: int, *, dtype: str | None = None) -> KVCache:
        """A `GrowingLayer` for each of so many layers."""
        return cls([GrowingLayer() for _ in range(layers)], dtype)

    @classmethod
    def static(cls, layers: int, capacity: int, *, dtype: str | None = None) -> KVCache:
        """A `StaticLayer` for each."""
        return cls([StaticLayer(capacity) for _ in range(layers)], dtype)

    @classmethod
    def window(cls, layers: int, window: int, sinks: int = 0, slack: int = 0, *, dtype: str | None = None) -> KVCache:
        """A `WindowLayer` for each."""
        return cls([WindowLayer(window, sinks, slack) for _ in range(layers)], dtype)

    @classmethod
    def streaming(
        cls, layers: int, window: int, sinks: int = 4, slack: int = 0, *, dtype: str | None = None
    ) -> KVCache:
        """A `StreamingLayer` for each."""
        return cls([StreamingLayer(window, sinks, slack) for _ in range(layers)], dtype)

    def reach(self, rows: int) -> int:
        """One past the furthest position that any of `rows` more rows gets in any layer."""
        return max((layer.reach(rows) for layer in self.layers), default=rows)

    @property
    def length(self) -> int | Tensor:
        """Tokens seen: an int where all items have as many, otherwise int64 (B,)."""
        return self.layers[0].length if self.layers else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values held, contexts' and unused slots' included."""
        return sum(held.nbytes for held in self._all())

    @property
    def mask(self) -> Mask | None:
        """The mask of the pairs that this cache hides although the parallel forward pass shows them.

        Decoding equals the parallel forward with this mask joined to its own (`&`); None hides nothing.

        Raises:
            ValueError: the layers differ; ask each.
        """
        masks = {layer.mask for layer in self.layers}
        if len(masks) > 1:
            raise ValueError("mask: the layers of this cache hide different pairs; use cache[layer].mask")
        return masks.pop() if masks else None

    def reorder(self, items: Tensor, contexts: Tensor | None = None) -> None:
        """Beam search: item b becomes a copy of item `items[b]` in every layer; as `LayerCache.reorder`.

        Args:
            contexts: the same for the contexts, where several items read one; None is `items`.
        """
        items = items.cpu() if isinstance(items, Tensor) else items  # read from a device once
        for held in self.layers:
            held.reorder(items)
        for context in self.contexts:
            context.reorder(items if contexts is None else contexts)

    def rollback(self, count: int | Tensor) -> None:
        """Forget the last tokens in every layer, or in none where one cannot; as `LayerCache.rollback`."""
        count = count.cpu() if isinstance(count, Tensor) else count
        for layer in self.layers:
            layer._rolled_back(count)
        for layer in self.layers:
            layer.rollback(count)

    def reset(self) -> None:
        """Forget everything."""
        for held in self._all():
            held.reset()

    def _all(self) -> list[LayerCache | ContextLayer]:
        return [*self.layers, *self.contexts]

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]
