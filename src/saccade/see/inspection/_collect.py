"""Run a model on a text and keep its attention weights, between words.

Shape legend: B batch, H query heads, L tokens and W words, the special ones included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...make.models import Model
from ...operator._call import ObservedCall
from ...support._numbers import counted
from ._chance import UniformCalls
from ._models import TextModel, Tokens, weights_of
from ._published import as_text_model
from ._words import Word, group, split_words


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The attention weights of every head of a model on one text, between words.

    ``weights[layer, head, q, k]`` is how much word ``q`` attends to word ``k``: summed over the tokens of the key word
    and averaged over the tokens of the query word, so every row sums to 1. The special tokens of the model are words
    too:
    ``<s>`` is word 0 of Saccade's models. Where layers have different numbers of heads, missing heads are all 0.

    ``alike`` (layers, 1, q, k) is the same for a head with equal weights on all visible tokens: its weights by chance.

    For a part of a longer text ``at`` holds the numbers of its words in the whole text. Rows then sum to less than 1:
    weights on words outside the part are missing.

    Example:
        >>> from saccade.inspection import collect, open_model
        >>> seen = collect(open_model(), "The cat sat.")
        >>> [word.text for word in seen.words]
        ['<s>', 'The', 'cat', 'sat', '.']
        >>> seen.weights.shape, seen.size
        ((4, 8, 5, 5), '4 layers x 8 heads')
        >>> bool(abs(seen.weights.sum(-1) - 1).max() < 1e-5)
        True
    """

    text: str
    words: tuple[Word, ...]
    weights: np.ndarray
    alike: np.ndarray
    causal: bool = True  # whether no word attends to a later one
    by_layer: tuple[int, ...] = ()  # heads of each layer; () where all layers have equally many
    at: tuple[int, ...] = ()  # indices of the words in the whole text; () where the map is of the whole text

    @property
    def layers(self) -> int:
        return int(self.weights.shape[0])

    @property
    def heads(self) -> int:
        """The largest number of heads in a layer."""
        return int(self.weights.shape[1])

    def places(self) -> Iterator[tuple[int, int]]:
        """(layer, head) of every head."""
        for layer in range(self.layers):
            for head in range(self.by_layer[layer] if self.by_layer else self.heads):
                yield layer, head

    @property
    def count(self) -> int:
        """The number of heads."""
        return sum(1 for _ in self.places())

    @property
    def size(self) -> str:
        """The number of layers and heads in words."""
        if self.by_layer:
            return f"{counted(self.count, 'head')} in {counted(self.layers, 'layer')}"
        return f"{counted(self.layers, 'layer')} x {counted(self.heads, 'head')}"

    @property
    def pieces(self) -> int:
        """The number of tokens of the text, without special tokens."""
        return sum(word.last - word.first for word in self.words if not word.special)

    @property
    def ordinary(self) -> np.ndarray:
        """The indices of words that are not special tokens."""
        return np.flatnonzero([not word.special for word in self.words])

    @property
    def stretch(self) -> tuple[int, int]:
        """(start, stop): the words between the special tokens around the text."""
        return int(self.ordinary[0]), int(self.ordinary[-1]) + 1

    @property
    def seen_by(self) -> np.ndarray:
        """(W,): the number of visible words for each word."""
        size = len(self.words)
        return np.arange(1, size + 1) if self.causal else np.full(size, size)

    def entropy(self) -> np.ndarray:
        """(layers, heads): the entropy in nats of a word's weights, averaged over the words of the text."""
        w = self.weights[:, :, self.ordinary]
        return np.asarray(-np.where(w > 0, w * np.log(np.where(w > 0, w, 1)), 0).sum(-1).mean(-1))


def collect(model: TextModel | Model, text: str) -> AttentionMap:
    """Run ``model`` on ``text`` and return the attention weights of every head.

    Raises:
        ValueError: a text without a word, or one that is longer than the model's context.

    Example:
        >>> from saccade.inspection import collect, open_model
        >>> seen = collect(open_model(), "The cat sat on the mat.")
        >>> print(seen.weights[2, 1, 5, :6].round(2))  # layer 2, head 1: the second "the" looks at "sat"
        [0.01 0.07 0.06 0.85 0.01 0.  ]
    """
    model = as_text_model(model)
    tokens, words = read(model, text)
    mean, total = word_matrices(words, words[-1].last)
    weights, alike = (
        np.zeros((model.layers, heads, len(words), len(words)), np.float32) for heads in (max(model.heads), 1)
    )
    evens = UniformCalls()

    def keep(layer: int, call: ObservedCall) -> None:
        of_call = weights_of(call)
        check_finite(layer, of_call)
        for out, part in ((weights, of_call), (alike, weights_of(evens.of(call)).mean(1, keepdim=True))):
            out[layer, : part.shape[1]] = (mean @ part[0].double().cpu() @ total).float().numpy()

    model.run(model.whole(tokens.ids), keep)
    by_layer = () if len(set(model.heads)) == 1 else model.heads
    return AttentionMap(text, tuple(words), weights, alike, model.causal, by_layer)


def check_finite(layer: int, weights: Tensor) -> None:
    """Raise ValueError if the model overflowed: weights that are NaN have no findings."""
    if not bool(weights.isfinite().all()):
        raise ValueError(
            f"layer {layer}: the attention weights are not finite: the model overflows, as with huge parameters"
        )


def read(model: TextModel, text: str) -> tuple[Tokens, list[Word]]:
    """The tokens of ``text`` and its words, with the special tokens around it.

    Raises ValueError for a text without a word and for one that is longer than the model's context.
    """
    spans = split_words(text)
    if not spans:
        raise ValueError(f"text: expected at least one word, got {text!r:.40}")
    fit = words_that_fit(model, text, spans)
    if fit < len(spans):
        raise ValueError(
            f"text: it has {len(spans):,} words and marks, and this model reads {model.room:,} tokens at once, "
            f"which holds the first {fit:,} of them"
        )
    tokens = model.encode(text[: spans[-1][1]])  # without blanks after the last word
    before, after = ([model.written(token) for token in around] for around in (model.before, model.after))
    special = [i for i, token in enumerate(tokens.ids) if token in model.special]
    return tokens, group(text, tokens.spans, spans, before=before, after=after, special=special)


def observe_weights(lm: TextModel | Model, tokens: Tensor, visit: Callable[[int, Tensor], None]) -> None:
    """Run ``tokens`` (B, L) and call ``visit(layer, weights)`` with (B, H, L, L) weights, layer after layer."""
    as_text_model(lm).run(tokens, lambda layer, call: visit(layer, weights_of(call)))


def words_that_fit(model: TextModel | Model, text: str, spans: list[tuple[int, int]] | None = None) -> int:
    """The number of words of ``text``, from its start, that fit the model's context with its special tokens.

    Args:
        spans: the words as (start, stop); None: `split_words` of the text.
    """
    model = as_text_model(model)
    spans = split_words(text) if spans is None else spans
    room = model.room
    if room is None:
        return len(spans)
    if not room:
        return 0
    # A cut at 64 characters a token: a whole library need not be encoded to find that it is too long.
    pieces = model.encode(text[: room * 64]).spans
    if len(pieces) <= room and len(text) > room * 64:
        pieces = model.encode(text).spans
    if len(pieces) <= room:
        return len(spans)
    end = min(pieces[room - 1][1], pieces[room][0])  # excludes a character whose bytes are cut in two
    return _last_that_fits(model, text, spans, sum(stop <= end for _, stop in spans), room)


def _last_that_fits(model: TextModel, text: str, spans: list[tuple[int, int]], guess: int, room: int) -> int:
    """A cut text may be encoded differently from the whole: take words off until it fits."""
    while guess > 1 and len(model.encode(text[: spans[guess - 1][1]]).ids) > room:
        guess -= 1
    return guess


def word_matrices(words: list[Word], length: int) -> tuple[Tensor, Tensor]:
    """(W, L) that averages over a word's tokens, and (L, W) that sums over them."""
    belongs = torch.zeros(len(words), length, dtype=torch.float64)
    for i, word in enumerate(words):
        belongs[i, word.first : word.last] = 1
    return belongs / belongs.sum(-1, keepdim=True), belongs.T
