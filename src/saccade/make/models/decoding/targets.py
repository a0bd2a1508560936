"""One decoding step of an encoder-decoder: continues targets, which attend to their sources.

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
    """A model whose decoder attends to encoded sources: an `EncoderDecoder`."""

    def next_logits(self, ids: Tensor, context: Tensor, padding: Padding | None, cache: KVCache) -> Tensor:
        """Logits (N, V) of the next token: `ids (N, L)` continue the cache, `context (B, Ls, E)` is attended to."""
        ...

    def cache(self) -> KVCache:
        """An empty cache of targets and sources."""
        ...


class TargetStep:
    """Decoding steps of a decoder with sources. At first row n is the target of source n.

    Keys and values of a source are computed and stored once for all of its rows, as long as rows of a source are
    adjacent and all sources have equally many. Otherwise each row gets its own copy.

    Args:
        model: the encoder-decoder.
        memory: the encoded sources.
    """

    def __init__(self, model: ReadingModel, memory: Memory):
        self.model, self.cache = model, model.cache()
        self._context, self._real = memory.last_hidden_state, memory.layout.real
        self._padding = None if self._real is None else Padding(self._real)
        self._source = torch.arange(memory.layout.batch)  # of each row

    def step(self, ids: Tensor) -> Tensor:
        """Logits (N, V) of the next tokens, after new tokens `ids (N, L)`."""
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
