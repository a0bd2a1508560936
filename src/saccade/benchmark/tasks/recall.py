"""Recall tasks: which token followed a given token before.

Shape legend: B examples, P pairs, L length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .examples import UNASKED, Examples, SyntheticTask, distinct

FILLER = 0  # between queries


@dataclass(frozen=True)
class Recall(SyntheticTask):
    """Multi-query associative recall: pairs of key and value, then every key again, at some distance.

        k1 v1 k2 v2 k3 v3 k2 _ _ _ k1 _ k3 _      answers: v2 after k2, v1 after k1, v3 after k3

    Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models" (2023), section 3.1 and
    appendix on the synthetic: keys are the lower half of the vocabulary, values the upper one, neither twice in an
    example; queries stand at even places after the pairs, the slot g = 1, 2, ... with a probability proportional to
    g^(power - 1), each slot once. As in Arora et al., "Simple Linear Attention Language Models Balance the
    Recall-Throughput Tradeoff" (2024), figure 2, examples of few and of many pairs are mixed, and told apart.

    Args:
        vocabulary: an even number; 0 is the filler, the lower half are keys, the upper half values.
        length: L, even, at least 4 times the pairs.
        pairs: possible numbers of pairs, equally likely.
        power: of the distribution of distances; 1 is uniform.
    """

    name: ClassVar[str] = "recall"
    title: ClassVar[str] = "multi-query associative recall"
    source: ClassVar[str] = "Arora et al., Zoology (2023), section 3.1"

    vocabulary: int = 64
    length: int = 64
    pairs: tuple[int, ...] = (4, 8, 16)
    power: float = 0.01

    def __post_init__(self) -> None:
        most = max(self.pairs, default=0)
        if min(self.pairs, default=0) < 1 or 4 * most > self.length or self.length % 2:
            raise ValueError(
                f"length: expected an even number of at least 4 * {most} for pairs={self.pairs}, got {self.length}"
            )
        if self.vocabulary % 2 or self.vocabulary // 2 <= most:
            raise ValueError(f"vocabulary: expected an even number above 2 * {most}, got {self.vocabulary}")

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the values of the example: the mean of 1/P over all answers."""
        return len(self.pairs) / sum(self.pairs)

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(f"{pairs} pairs" for pairs in self.pairs)

    def draw(self, count: int, random: torch.Generator) -> Examples:
        groups = torch.randint(len(self.pairs), (count,), generator=random)
        tokens = torch.full((count, self.length), FILLER)
        targets = torch.full((count, self.length), UNASKED)
        for number, pairs in enumerate(self.pairs):
            rows = (groups == number).nonzero()[:, 0]
            if len(rows):
                tokens[rows], targets[rows] = self._of(pairs, len(rows), random)
        return Examples(tokens, targets, groups)

    def _of(self, pairs: int, count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.vocabulary // 2
        keys = 1 + distinct(count, half - 1, pairs, random)
        values = half + distinct(count, half, pairs, random)
        tokens = torch.full((count, self.length), FILLER)
        targets = torch.full((count, self.length), UNASKED)
        tokens[:, : 2 * pairs] = torch.stack((keys, values), 2).flatten(1)
        slots = torch.arange(1, (self.length - 2 * pairs) // 2 + 1, dtype=torch.float64) ** (self.power - 1)
        chosen = torch.multinomial(slots.expand(count, -1), pairs, generator=random)
        places = 2 * pairs + 2 * chosen
        return tokens.scatter(1, places, keys), targets.scatter(1, places, values)


@dataclass(frozen=True)
class Induction(SyntheticTask):
    """A special token is among random ones, and again at the end: which token followed it before?

        b d * a c b c d *      answer: a after the last *

    Olsson et al., "In-context Learning and Induction Heads" (2022); in this form Fu et al., "Hungry Hungry Hippos"
    (2022), section 3.1 (there of 20 symbols and 30 tokens).

    Args:
        symbols: number of random tokens, numbered from 1; the special one is 0.
        length: L.
    """

    name: ClassVar[str] = "induction"
    title: ClassVar[str] = "what followed a special token before"
    source: ClassVar[str] = "Olsson et al., In-context Learning and Induction Heads (2022)"

    symbols: int = 31
    length: int = 64

    def __post_init__(self) -> None:
        if self.symbols < 1 or self.length < 3:
            raise ValueError(f"length: expected at least 3, and a symbol, got {self.length} and {self.symbols}")

    @property
    def vocabulary(self) -> int:
        return self.symbols + 1

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    def draw(self, count: int, random: torch.Generator) -> Examples:
        tokens = torch.randint(1, self.symbols + 1, (count, self.length), generator=random)
        place = torch.randint(self.length - 2, (count, 1), generator=random)
        tokens.scatter_(1, place, 0)
        tokens[:, -1] = 0
        targets = torch.full((count, self.length), UNASKED)
        targets[:, -1] = tokens.gather(1, place + 1)[:, 0]
        return Examples(tokens, targets, torch.zeros(count, dtype=torch.int64))


@dataclass(frozen=True)
class Needle(SyntheticTask):
    """A key and its value among noise, and the key again at the end: accuracy by distance.

        . . k v . . . . . . k      answer: v after the last k, at the distance of 8 between the two k

    Noise, keys and values use different tokens, so that only memory over many irrelevant tokens is tested. After
    "needle in a haystack" tests of language models (Kamradt 2023).

    Args:
        kinds: number of different keys, and of different values.
        noise: number of different noise tokens.
        length: L.
        distances: ascending upper bounds of the groups; the last is L - 1. All groups are equally likely, and all
            distances within a group. The smallest distance is 2.
    """

    name: ClassVar[str] = "needle"
    title: ClassVar[str] = "one key and value among noise, by distance"
    source: ClassVar[str] = "Kamradt, Needle in a Haystack (2023)"

    kinds: int = 16
    noise: int = 32
    length: int = 64
    distances: tuple[int, ...] = (7, 15, 31, 63)

    def __post_init__(self) -> None:
        ascending = all(low < high for low, high in zip((1, *self.distances), self.distances, strict=False))
        if not self.distances or not ascending or self.distances[-1] != self.length - 1:
            raise ValueError(
                f"distances: expected ascending distances from 2, the last of length - 1 = {self.length - 1}, "
                f"got {self.distances}"
            )
        if self.kinds < 1 or self.noise < 1:
            raise ValueError(f"kinds, noise: expected at least 1 each, got kinds={self.kinds} and noise={self.noise}")

    @property
    def vocabulary(self) -> int:
        return self.noise + 2 * self.kinds

    @property
    def chance(self) -> float:
        return 1 / self.kinds

    @property
    def groups(self) -> tuple[str, ...]:
        lows = (2, *(distance + 1 for distance in self.distances[:-1]))
        return tuple(f"{low} to {high} back" for low, high in zip(lows, self.distances, strict=True))

    def draw(self, count: int, random: torch.Generator) -> Examples:
        tokens = torch.randint(self.noise, (count, self.length), generator=random)
        key = self.noise + torch.randint(self.kinds, (count, 1), generator=random)
        value = self.noise + self.kinds + torch.randint(self.kinds, (count, 1), generator=random)
        groups = torch.randint(len(self.distances), (count,), generator=random)
        bounds = torch.tensor((1, *self.distances))
        low, high = bounds[groups] + 1, bounds[groups + 1]
        share = torch.rand(count, generator=random, dtype=torch.float64)
        distance = low + (share * (high - low + 1)).long()
        place = (self.length - 1 - distance)[:, None]
        tokens = tokens.scatter(1, place, key).scatter(1, place + 1, value)
        tokens[:, -1:] = key
        targets = torch.full((count, self.length), UNASKED)
        targets[:, -1:] = value
        return Examples(tokens, targets, groups)
