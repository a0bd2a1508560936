"""Words matched to the tokens of a model, and the word that each word attends to most.

Attention between words (Clark et al. 2019, section 4.1): weights are summed over the tokens of the key word and
averaged over the tokens of the query word.

Shape legend: Hq query heads, L tokens with the special ones, U units, N query units.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...operator._call import ObservedCall
from ..inspection import TextModel, weights_of

_ENTRIES = 2**24  # weights formed at once: 64 MiB of float32
TOLERATED = 0.05  # share of words without a token up to which a file is accepted


class AlignedText(NamedTuple):
    """A text as a model reads it. A unit is a word, or several words that share a token.

    The tokens of unit u are ``starts[u] <= i < starts[u + 1]``; special tokens belong to none.
    """

    ids: tuple[int, ...]
    starts: tuple[int, ...]  # U + 1
    unit_of: tuple[int | None, ...]  # by word; None for a word to which the tokenizer gives no token

    @property
    def units(self) -> int:
        return len(self.starts) - 1

    @property
    def missing(self) -> int | None:
        """The first word without a token, if any."""
        return next((word for word, unit in enumerate(self.unit_of) if unit is None), None)


def align(model: TextModel, text: str, words: Sequence[tuple[int, int]]) -> AlignedText:
    """Match the words ``text[start:stop]``, in order, to tokens of ``model``; blanks belong to the word after them.

    Each word is a pair (start, stop) of character positions.
    """
    encoding = model.encode(text)
    ahead = len(model.before)
    owners = _owners(words, encoding.spans)
    units: list[list[int]] = []  # the words of each unit
    starts: list[int] = []
    waiting = 0  # the first token that no word has yet
    for piece, (first, last) in enumerate(owners):
        if first >= last:
            continue
        if units and first <= units[-1][-1]:
            units[-1] = [*range(units[-1][0], max(last, units[-1][-1] + 1))]
        else:
            units.append([*range(first, last)])
            starts.append(ahead + waiting)
        waiting = piece + 1
    unit_of: list[int | None] = [None] * len(words)
    for unit, held in enumerate(units):
        for word in held:
            unit_of[word] = unit
    ids = (*model.before, *encoding.ids, *model.after)
    return AlignedText(ids, (*starts, ahead + len(encoding.ids)), tuple(unit_of))


def _owners(words: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each token the range (first, last) of words that share characters with it."""
    starts, stops = [start for start, _ in words], [stop for _, stop in words]
    return [(bisect_right(stops, start), bisect_left(starts, stop)) for start, stop in spans]


def most_attended(call: ObservedCall, aligned: AlignedText, queries: Sequence[int]) -> np.ndarray:
    """(Hq, N): the unit to which each unit of ``queries`` attends most, apart from itself and special tokens.

    -1 where all weight is on itself and on special tokens. Of several with the same weight, the first.
    """
    heads, length = call.query.shape[1], call.key.shape[2]
    longest = max(aligned.starts[u + 1] - aligned.starts[u] for u in queries)
    step = max(1, _ENTRIES // (heads * length * longest))
    parts = [_most(call, aligned, queries[i : i + step]) for i in range(0, len(queries), step)]
    return np.concatenate(parts, 1)


def _most(call: ObservedCall, aligned: AlignedText, queries: Sequence[int]) -> np.ndarray:
    pieces = [range(aligned.starts[u], aligned.starts[u + 1]) for u in queries]
    weights = weights_of(call, rows=[row for held in pieces for row in held])[0].double().cpu()
    of_query = torch.repeat_interleave(torch.tensor([len(held) for held in pieces]))
    by_query = weights.new_zeros(weights.shape[0], len(queries), weights.shape[2]).index_add_(1, of_query, weights)
    sizes = torch.tensor([aligned.starts[u + 1] - aligned.starts[u] for u in range(aligned.units)])
    inside = by_query[..., aligned.starts[0] : aligned.starts[-1]]
    of_key = torch.repeat_interleave(sizes)
    words = weights.new_zeros(*by_query.shape[:2], aligned.units).index_add_(2, of_key, inside)
    words[:, torch.arange(len(queries)), torch.tensor(queries)] = 0
    best = words.numpy().argmax(-1)  # averaging over the query's tokens does not change which is largest
    return np.where(words.numpy().max(-1) > 0, best, -1)


def align_all(
    model: TextModel, texts: Iterable[tuple[str, str, Sequence[tuple[int, int]], Sequence[str]]], source: str
) -> tuple[list[AlignedText], UnmatchedWords]:
    """`align` each (name, text, words, forms), and count words without a token; ValueError if there are too many."""
    missing, aligned = UnmatchedWords(source, model.name), []
    for name, text, words, forms in texts:
        aligned.append(align(model, text, words))
        missing.add(name, forms, aligned[-1])
    missing.check()
    return aligned, missing


class UnmatchedWords:
    """Counts the words without a token; a file with many of them does not match the tokenizer."""

    def __init__(self, source: str, model: str):
        self.source, self.model = source, model
        self.words = self.missing = 0
        self._first = ""

    def add(self, sentence: str, forms: Sequence[str], aligned: AlignedText) -> None:
        gone = sum(unit is None for unit in aligned.unit_of)
        if gone and not self._first:
            at = aligned.missing
            assert at is not None
            self._first = f"sentence {sentence}, token {at + 1} {forms[at]!r}"
        self.words += len(aligned.unit_of)
        self.missing += gone

    def check(self) -> None:
        """ValueError if more than a twentieth of the words have no token."""
        if self.missing > TOLERATED * self.words:
            raise ValueError(
                f"{self.source}: does not match the tokens of {self.model}: {self.missing:,} of {self.words:,} words "
                f"have no token, the first is {self._first}"
            )
