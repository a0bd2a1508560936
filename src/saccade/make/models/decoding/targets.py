"""One step of an encoder-decoder: targets go on by a token, and read their sources.

Shape legend: N rows, B sources, L new tokens, Ls length of sources, V vocabulary, E width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ....operator._masks import Padding
from ....operator.nn import KVCache
from ..token_layout import Memory


class ReadingModel(Protocol):
    """A model whose decoder reads a memory: an `EncoderDecoder`."""

    def next_logits(self, ids: Tensor, context: Tensor, padding: Padding | None, cache: KVCache) -> Tensor:
        """Read `ids (N, L)`, which continue the cache, and `context (B, Ls, E)`; logits (N, V) of what follows."""
        ...

    def cache(self) -> KVCache:
        """An empty cache of targets and sources."""
        ...


class TargetStep:
    """Steps of a decoder that reads sources; row n begins as the target of source n.

    Keys and values of a source are computed once and held once, however many rows read it, as long as rows of one
    source stand side by side and each source has as many. Otherwise each row reads a copy of its own.

    Args:
        model: with logits of each next token.
        memory: of the sources.
    """

    def __init__(self, model: ReadingModel, memory: Memory):
        self.model, self.cache = model, model.cache()
        self._context, self._real = memory.last_hidden_state, memory.layout.real
        self._padding = None if self._real is None else Padding(self._real)
        self._source = torch.arange(memory.layout.batch)  # of each row

    def step(self, ids: Tensor) -> Tensor:
        """Read `ids (N, L)`: logits (N, V)."""
        return self.model.next_logits(ids, self._context, self._padding, self.cache)

    def reorder(self, items: Tensor) -> None:
        """Row n becomes a copy of row `items[n]`."""
        items = items.cpu()
        rows = self._source[items]
        chosen, counts = rows.unique_consecutive(return_counts=True)
        if (counts != counts[0]).any():
            chosen = rows
        if not torch.equal(chosen, torch.arange(len(self._context))):
            places = chosen.to(self._context.device)
            self._context = self._context[places]
            self._real = None if self._real is None else self._real[places.to(self._real.device)]
            self._padding = None if self._real is None else Padding(self._real)
        if not torch.equal(items, torch.arange(len(self._source))):
            self.cache.reorder(items, chosen)
        self._source = torch.arange(len(chosen)).repeat_interleave(len(rows) // max(len(chosen), 1))
