"""Heads as classifiers without training: how often each is right, and how often the best fixed offset is.

Shape legend: layers, heads (the most of any layer); folds are the texts of even and of odd number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...support._uncertainty import wilson


class AnswerShare(NamedTuple):
    """How often an answer is right, for one kind of case.

    Example:
        >>> from saccade.analysis import AnswerShare
        >>> answer = AnswerShare(right=8, cases=10)
        >>> answer.share
        0.8
        >>> [round(end, 2) for end in answer.interval]
        [0.49, 0.94]
    """

    right: int
    cases: int

    @property
    def share(self) -> float:
        return self.right / self.cases if self.cases else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, Wilson's, cases taken as independent."""
        return wilson(self.right, self.cases)


@dataclass(eq=False)
class AnswerTally:
    """How often every head and every fixed offset is right, for one kind of case.

    Example:
        >>> import numpy as np
        >>> from saccade.analysis import AnswerTally
        >>> tally = AnswerTally(heads=(2,))  # one layer with two heads
        >>> for number, right in enumerate([[True, False], [True, True], [False, True], [True, False]]):
        ...     tally.ask(number % 2, [-1])  # the answer is the word before
        ...     tally.answer(number % 2, 0, np.array(right))
        >>> tally.best, tally.of_head(0, 0)
        ((0, 0), AnswerShare(right=3, cases=4))
        >>> tally.best_offset
        (-1, AnswerShare(right=4, cases=4))
    """

    heads: tuple[int, ...]
    right: np.ndarray = field(init=False)  # (2, layers, heads): by fold
    count: np.ndarray = field(init=False)  # (2,)
    offsets: tuple[Counter[int], Counter[int]] = field(init=False)  # distances to the right answer, by fold

    def __post_init__(self) -> None:
        self.right = np.zeros((2, len(self.heads), max(self.heads)), dtype=np.int64)
        self.count = np.zeros(2, dtype=np.int64)
        self.offsets = (Counter(), Counter())

    def ask(self, fold: int, offsets: Iterable[int]) -> None:
        """Add a case of this fold (0 or 1) with the offsets of its right answers."""
        self.count[fold] += 1
        self.offsets[fold].update(set(offsets))

    def answer(self, fold: int, layer: int, right: np.ndarray) -> None:
        """Add whether each head of a layer was right about the last case: (Hq,) booleans."""
        self.right[fold, layer, : len(right)] += right

    @property
    def total(self) -> int:
        return int(self.count.sum())

    def of_head(self, layer: int, head: int) -> AnswerShare:
        return AnswerShare(int(self.right[:, layer, head].sum()), self.total)

    @property
    def best(self) -> tuple[int, int]:
        """(layer, head) of the head that is right most often; in a tie, the first."""
        return _best(self.right.sum(0))

    @property
    def best_offset(self) -> tuple[int, AnswerShare]:
        """The offset that is right most often (in a tie, the smallest), and its count."""
        offset = _best_offset(self.offsets[0] + self.offsets[1])
        return offset, AnswerShare(sum(held[offset] for held in self.offsets), self.total)

    @property
    def held_out(self) -> tuple[AnswerShare, AnswerShare]:
        """The shares of the best head and the best offset, chosen on one half of the texts and tested on the other.

        Chosen and tested on the same texts, the best of many heads would be partly luck.
        """
        head = offset = 0
        for fold in (0, 1):
            if self.count[1 - fold]:
                head += int(self.right[fold][_best(self.right[1 - fold])])
                offset += self.offsets[fold][_best_offset(self.offsets[1 - fold])]
        counted = sum(int(self.count[fold]) for fold in (0, 1) if self.count[1 - fold])
        return AnswerShare(head, counted), AnswerShare(offset, counted)


def _best(right: np.ndarray) -> tuple[int, int]:
    layer, head = np.unravel_index(int(right.argmax()), right.shape)
    return int(layer), int(head)


def _best_offset(counts: Counter[int]) -> int:
    return min(counts, key=lambda offset: (-counts[offset], abs(offset), offset))
