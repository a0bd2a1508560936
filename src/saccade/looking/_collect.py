"""Run a language model on a text and keep its attention weights, on words.

Shapes: B batch, H query heads, L pieces (with the start token), W words (with the start token).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .._weights import attention_weights
from ..models import LanguageModel
from ..nn import Observation
from ._words import Word, group, split_words


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """What every head of a model did on one text, on words.

    ``weights[layer, head, q, k]`` is how much word ``q`` looked at word ``k``: summed over the pieces of the key
    word, averaged over the pieces of the query word, so every row sums to 1. Word 0 is the start token ``<s>``.
    """

    text: str
    words: tuple[Word, ...]
    weights: np.ndarray

    @property
    def layers(self) -> int:
        return int(self.weights.shape[0])

    @property
    def heads(self) -> int:
        return int(self.weights.shape[1])

    @property
    def pieces(self) -> int:
        """Pieces the tokenizer made of the text, without the start token."""
        return self.words[-1].last - 1

    def entropy(self) -> np.ndarray:
        """(layers, heads): the entropy in nats of a word's weights, averaged over the words (not ``<s>``)."""
        w = self.weights[:, :, 1:]
        return np.asarray(-np.where(w > 0, w * np.log(np.where(w > 0, w, 1)), 0).sum(-1).mean(-1))


def collect(lm: LanguageModel, text: str) -> AttentionMap:
    """The attention weights of every head of ``lm`` on ``text``.

    Raises ValueError for a text without a word and for one that is longer than the model's context.
    """
    spans = split_words(text)
    if not spans:
        raise ValueError("text: it holds no word; one word at least is needed")
    fit = words_that_fit(lm, text, spans)
    if fit < len(spans):
        raise ValueError(
            f"text: {len(spans):,} words came; this model reads {lm.model.config.context - 1:,} tokens at once, "
            f"which holds the first {fit:,} words"
        )
    encoding = lm.tokenizer.encode(text[: spans[-1][1]])  # blanks after the last word tell nothing
    words = group(text, encoding.spans, spans)
    mean, total = _word_matrices(words, len(encoding.ids) + 1)
    layers: dict[int, Tensor] = {}

    def keep(layer: int, weights: Tensor) -> None:
        layers[layer] = (mean @ weights[0].double().cpu() @ total).float()

    observe_weights(lm, torch.tensor([[lm.tokenizer.start, *encoding.ids]]), keep)
    weights = torch.stack([layers[i] for i in sorted(layers)]).numpy()
    return AttentionMap(text, tuple(words), weights)


def observe_weights(lm: LanguageModel, tokens: Tensor, visit: Callable[[int, Tensor], None]) -> None:
    """Run ``tokens`` (B, L) and call ``visit(layer, weights)`` with (B, H, L, L) weights, layer after layer."""

    def observe(layer: int, seen: Observation) -> None:
        weights = attention_weights(
            seen.query, seen.key, seen.mask, bias=seen.bias, scale=seen.scale, softcap=seen.softcap, sink=seen.sink
        )
        visit(layer, weights)

    training = lm.model.training
    lm.model.eval()
    try:
        with torch.no_grad():
            lm.model(tokens.to(next(lm.model.parameters()).device), observe=observe)
    finally:
        lm.model.train(training)


def words_that_fit(lm: LanguageModel, text: str, spans: list[tuple[int, int]] | None = None) -> int:
    """How many words of ``text``, counted from its start, the model's context holds beside the start token."""
    spans = split_words(text) if spans is None else spans
    room = lm.model.config.context - 1
    # Some 64 characters a token are plenty, so a whole library need not be encoded to learn that it is too long.
    pieces = lm.tokenizer.encode(text[: room * 64]).spans
    if len(pieces) <= room and len(text) > room * 64:
        pieces = lm.tokenizer.encode(text).spans
    if len(pieces) <= room:
        return len(spans)
    end = min(pieces[room - 1][1], pieces[room][0])  # a character whose bytes are cut in two does not fit
    return _last_that_fits(lm, text, spans, sum(stop <= end for _, stop in spans), room)


def _last_that_fits(lm: LanguageModel, text: str, spans: list[tuple[int, int]], guess: int, room: int) -> int:
    """A cut text may be encoded a little differently from a whole one: step back until it fits."""
    while guess > 1 and len(lm.tokenizer.encode(text[: spans[guess - 1][1]]).ids) > room:
        guess -= 1
    return guess


def _word_matrices(words: list[Word], length: int) -> tuple[Tensor, Tensor]:
    """(W, L) that averages over a word's pieces, and (L, W) that sums over them."""
    belongs = torch.zeros(len(words), length, dtype=torch.float64)
    for i, word in enumerate(words):
        belongs[i, word.first : word.last] = 1
    return belongs / belongs.sum(-1, keepdim=True), belongs.T
