"""The interface of synthetic tasks: random examples with targets at some tokens.

Shape legend: B examples, L length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

UNASKED = -100  # target of tokens without an answer, ignored by F.cross_entropy


class Examples(NamedTuple):
    """Input tokens, and target tokens for some of them."""

    tokens: Tensor  # (B, L) int64
    targets: Tensor  # (B, L) int64: the token to predict after having read up to here, `UNASKED` elsewhere
    groups: Tensor  # (B,) int64: which of `SyntheticTask.groups` an example belongs to


class SyntheticTask(ABC):
    """A distribution of examples. Every task is a frozen dataclass of its sizes.

    Models are causal, and judged only at tokens with a target.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]  # authors, title, year, section

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """The number of different tokens, numbered from 0."""

    @property
    @abstractmethod
    def length(self) -> int:
        """L."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Accuracy of the best guess that ignores the example."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups of examples for which accuracy is reported separately."""
        return ("all",)

    @abstractmethod
    def draw(self, count: int, random: torch.Generator) -> Examples:
        """`count` independent examples; equal generator states give equal examples."""


def distinct(count: int, choices: int, many: int, random: torch.Generator) -> Tensor:
    """(count, many): different numbers below `choices` in each row; all ordered selections are equally likely."""
    return torch.rand(count, choices, generator=random, dtype=torch.float64).argsort(1)[:, :many]


def digests(tokens: Tensor) -> Tensor:
    """Hashes (B,) int64 of rows; different rows rarely have equal hashes."""
    weights = torch.randint(-(2**62), 2**62, tokens.shape[1:], generator=torch.Generator().manual_seed(0))
    mixed = (tokens + 1) * weights  # overflow wraps around
    return (mixed ^ (mixed >> 29)).sum(1)


def never_seen(examples: Examples, held: Tensor) -> Examples:
    """The examples, with targets ignored in those whose hash is in `held`, so that no model is trained on them."""
    known = torch.isin(digests(examples.tokens), held)
    return examples._replace(targets=examples.targets.masked_fill(known[:, None], UNASKED))
