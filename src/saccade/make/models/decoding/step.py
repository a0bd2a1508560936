"""One step of decoding: from new tokens to the logits of the next one. `TargetStep` is that of an encoder-decoder.

Shape legend: N items or rows decoded in parallel, B sources, L new tokens of each, Ls length of sources, V vocabulary.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ....operator._masks import Padding
from ....operator.nn import KVCache, packed_weights
from ..token_layout import Memory

MANY = 1000  # tokens at once that justify packing weights


class DecodingStep(Protocol):
    """The interface of a decoding loop to a model: it holds all previous tokens."""

    def step(self, ids: Tensor) -> Tensor:
        """Logits (N, V) of each item's next token. `ids (N, L)` continue the previous tokens."""
        ...

    def reorder(self, items: Tensor) -> None:
        """Item n becomes a copy of item `items[n]`, int64 (N',); the batch may grow or shrink."""
        ...


class DecodingModel(Protocol):
    """A model that decodes with a cache: a `GeneratingModel` or a `DecoderLM`."""

    def next_logits(self, ids: Tensor, attention_mask: Tensor | None, cache: KVCache) -> Tensor:
        """Logits (N, V) of the token after the last column. `ids (N, L)` continue the tokens in the cache."""
        ...

    def cache(self) -> KVCache:
        """An empty cache."""
        ...


class DecoderStep:
    """Decoding steps of a decoder with a cache. The first step takes the prompts, which may be padded on either side.

    Args:
        model: the decoder.
        attention_mask: (N, L) of the prompts, 1 for real tokens and 0 for padding; None: all are real.
        cache: an empty one of any kind; None uses the model's own, which keeps all tokens.
    """

    def __init__(self, model: DecodingModel, attention_mask: Tensor | None = None, cache: KVCache | None = None):
        self.model, self.cache = model, model.cache() if cache is None else cache
        self._mask = attention_mask

    def step(self, ids: Tensor) -> Tensor:
        """Logits (N, V) of the next tokens, after new tokens `ids (N, L)`."""
        mask, self._mask = self._mask, None
        if mask is not None:
            ids, mask = padded_on_the_left(ids, mask)
        pack = ids.numel() >= MANY and isinstance(self.model, nn.Module)
        with packed_weights(self.model) if pack else nullcontext():  # type: ignore[arg-type]
            return self.model.next_logits(ids, mask, self.cache)

    def reorder(self, items: Tensor) -> None:
        """Item n becomes a copy of item `items[n]`."""
        self.cache.reorder(items)


def padded_on_the_left(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move padding to the left in ids and mask (N, L), so that all items end in the last column.

    Raises:
        ValueError: an item without real tokens.
    """
    if not isinstance(mask, Tensor) or mask.shape != ids.shape or bool(mask[:, -1].all()):
        return ids, mask  # the model raises the error
    empty = (~(mask != 0).any(1)).nonzero()
    if empty.numel():
        raise ValueError(f"attention_mask: item {int(empty[0])} has no real token; leave it out of the batch")
    length = ids.shape[1]
    behind = (mask != 0).flip(1).int().argmax(1)  # columns after the last real token
    places = (torch.arange(length, device=ids.device) - behind[:, None]) % length
    return ids.gather(1, places), mask.gather(1, places)


@dataclass(frozen=True, eq=False)
class Generated:
    """Generated texts of a batch, best first for each item.

    Attributes:
        ids: (B, n, L), only new tokens, end token included; then the padding token.
        lengths: (B, n), the number of new tokens; 0 for missing texts, if an item has fewer than n.
        scores: (B, n): after beam search as in `BeamSearch`, after sampling the mean log-probability of the tokens;
            -inf for missing texts.

    Example:
        >>> import torch, saccade
        >>> texts = saccade.models.Generated(
        ...     torch.tensor([[[5, 7, 1], [6, 1, 0]]]), torch.tensor([[3, 2]]), torch.tensor([[-0.1, -0.9]])
        ... )  # what `generate` of an encoder-decoder returns
        >>> texts.texts()
        [[[5, 7, 1], [6, 1]]]
    """

    ids: Tensor
    lengths: Tensor
    scores: Tensor

    def texts(self) -> list[list[list[int]]]:
        """The tokens of each text of each item, without padding."""
        ids, lengths = self.ids.tolist(), self.lengths.tolist()
        return [[row[:n] for row, n in zip(*item, strict=True)] for item in zip(ids, lengths, strict=True)]


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
