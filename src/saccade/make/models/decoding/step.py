"""One step of decoding: tokens in, logits of what comes next out.

Shape legend: N items that are decoded side by side, L new tokens of each, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ....operator.nn import KVCache


class DecodingStep(Protocol):
    """What a loop of decoding needs of a model: it holds everything that came before."""

    def step(self, ids: Tensor) -> Tensor:
        """Read `ids (N, L)`, which continue the earlier tokens; logits (N, V) of each item's next token."""
        ...

    def reorder(self, items: Tensor) -> None:
        """Item n becomes a copy of item `items[n]`, int64 (N',); the batch may grow or shrink."""
        ...


class Decoding(Protocol):
    """A model that reads tokens with a cache: a `GeneratingModel`, a `DecoderLM`."""

    def next_logits(self, ids: Tensor, attention_mask: Tensor | None, cache: KVCache) -> Tensor:
        """Read `ids (N, L)`, which continue what the cache holds; logits (N, V) of what follows the last column."""
        ...

    def cache(self) -> KVCache:
        """An empty cache."""
        ...


class DecoderStep:
    """Steps of a decoder with a cache. The first one reads the prompts, which may be padded on either side.

    Args:
        model: with logits of each next token.
        attention_mask: (N, L) of the prompts, 1 for real tokens and 0 for padding; None: all are real.
        cache: an empty one of any kind; None is the model's own, which keeps everything.
    """

    def __init__(self, model: Decoding, attention_mask: Tensor | None = None, cache: KVCache | None = None):
        self.model, self.cache = model, model.cache() if cache is None else cache
        self._mask = attention_mask

    def step(self, ids: Tensor) -> Tensor:
        """Read `ids (N, L)`: logits (N, V)."""
        mask, self._mask = self._mask, None
        if mask is not None:
            ids, mask = padded_on_the_left(ids, mask)
        return self.model.next_logits(ids, mask, self.cache)

    def reorder(self, items: Tensor) -> None:
        """Item n becomes a copy of item `items[n]`."""
        self.cache.reorder(items)


def padded_on_the_left(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and mask (N, L) with each item's padding before its tokens, so that all items end in the last column.

    Raises:
        ValueError: an item of padding alone, after which nothing can follow.
    """
    if not isinstance(mask, Tensor) or mask.shape != ids.shape or bool(mask[:, -1].all()):
        return ids, mask  # the model says what is wrong with it
    empty = (~(mask != 0).any(1)).nonzero()
    if empty.numel():
        raise ValueError(f"attention_mask: item {int(empty[0])} has no real token; leave it out of the batch")
    length = ids.shape[1]
    behind = (mask != 0).flip(1).int().argmax(1)  # columns after the last real token
    places = (torch.arange(length, device=ids.device) - behind[:, None]) % length
    return ids.gather(1, places), mask.gather(1, places)


@dataclass(frozen=True, eq=False)
class Generated:
    """Generated texts of a batch, the best of each item first.

    Attributes:
        ids: (B, n, L), only the new tokens, the end token included; after them the padding token.
        lengths: (B, n), the number of new tokens; 0 where an item has fewer than n texts.
        scores: (B, n): of a search as in `BeamSearch`, of drawn texts the mean log-probability of their tokens;
            -inf where there is no text.

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
