"""Copying tasks: the next symbol follows from the previous symbol, or from the position.

Shape legend: B examples, n length of a word, L length of an example.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .examples import UNASKED, Examples, SyntheticTask, distinct

NOTHING, SEPARATOR = 0, 1  # padding at the end; separator between word and copy


@dataclass(frozen=True)
class Copy(SyntheticTask):
    """A word of distinct symbols, of random length, repeated after a separator.

        b d a | b d a        answers: b after |, d after b, a after d

    The position of the copy varies, so that the next symbol is the one that followed the same symbol before: lookup by
    content. There is no target after the last symbol.

    Jelassi et al., "Repeat After Me: Transformers are Better than State Space Models at Copying" (2024), section 2;
    there symbols may repeat, so a position is identified by several of them. Here a single one is enough.

    Args:
        symbols: number of symbols; a word has no symbol twice.
        least, most: bounds of the uniformly distributed length of a word.
    """

    name: ClassVar[str] = "copy"
    title: ClassVar[str] = "a random word after a separator"
    source: ClassVar[str] = "Jelassi et al., Repeat After Me (2024), section 2"

    symbols: int = 30
    least: int = 4
    most: int = 24

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= self.symbols:
            raise ValueError(
                f"least: expected 1 <= least <= most <= symbols, got {self.least}, {self.most} and {self.symbols}"
            )

    @property
    def vocabulary(self) -> int:
        return self.symbols + 2

    @property
    def length(self) -> int:
        return 2 * self.most

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the remaining symbols: the mean of 1/k."""
        lengths = range(self.least, self.most + 1)
        right = sum(sum(1 / left for left in range(1, n + 1)) for n in lengths)
        return right / sum(lengths)

    def draw(self, count: int, random: torch.Generator) -> Examples:
        words = 2 + distinct(count, self.symbols, self.most, random)
        many = torch.randint(self.least, self.most + 1, (count, 1), generator=random)
        places = torch.arange(2 * self.most).expand(count, -1)
        answered = (places >= many) & (places < 2 * many)
        copied = words.gather(1, (places - many - 1).clamp(0, self.most - 1))
        tokens = torch.where(places < many, words.gather(1, places.clamp(max=self.most - 1)), copied)
        tokens = tokens.masked_fill(places == many, SEPARATOR).masked_fill(places >= 2 * many, NOTHING)
        targets = words.gather(1, (places - many).clamp(0, self.most - 1)).masked_fill(~answered, UNASKED)
        return Examples(tokens, targets, torch.zeros(count, dtype=torch.int64))


@dataclass(frozen=True)
class Duplication(SyntheticTask):
    """0w0w: a word of fixed length, whose symbols may repeat, twice.

        0 b d b 0 b d b      answers: b after the second 0, then d, then b

    Only the position determines the next symbol. Kitaev, Kaiser and Levskaya, "Reformer" (2020), section 5, with words
    of 511 symbols out of 127, and examples of 1,024 tokens.

    Args:
        symbols: number of symbols, numbered from 1.
        word: n.
    """

    name: ClassVar[str] = "duplication"
    title: ClassVar[str] = "0w0w"
    source: ClassVar[str] = "Kitaev et al., Reformer (2020), section 5"

    symbols: int = 31
    word: int = 31

    def __post_init__(self) -> None:
        if self.symbols < 1 or self.word < 1:
            raise ValueError(f"word: expected symbols and word of at least 1, got {self.symbols} and {self.word}")

    @property
    def vocabulary(self) -> int:
        return self.symbols + 1

    @property
    def length(self) -> int:
        return 2 * self.word + 1

    @property
    def chance(self) -> float:
        """Accuracy of a uniform guess. Remembering which symbols occurred, but not where, gives slightly more."""
        return 1 / self.symbols

    def draw(self, count: int, random: torch.Generator) -> Examples:
        words = torch.randint(1, self.symbols + 1, (count, self.word), generator=random)
        zeros = torch.zeros(count, 1, dtype=torch.int64)
        tokens = torch.cat((zeros, words, zeros, words[:, :-1]), 1)
        return Examples(tokens, _targets_at_end(words, self.length), torch.zeros(count, dtype=torch.int64))


def _targets_at_end(words: Tensor, length: int) -> Tensor:
    """Targets that end with `words`, and are ignored before."""
    unasked = torch.full((len(words), length - words.shape[1]), UNASKED)
    return torch.cat((unasked, words), 1)
