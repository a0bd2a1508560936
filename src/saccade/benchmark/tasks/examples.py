"""What a synthetic task is: examples drawn from a seed, with answers at some of their tokens.

Shape legend: B examples, L length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

UNASKED = -100  # the target of a token after which nothing is asked; F.cross_entropy leaves it out


class Examples(NamedTuple):
    """Sequences to read, and what should come after some of their tokens."""

    tokens: Tensor  # (B, L) int64
    targets: Tensor  # (B, L) int64: the token to predict after having read up to here, `UNASKED` elsewhere
    groups: Tensor  # (B,) int64: which of `Task.groups` an example belongs to


class Task(ABC):
    """A distribution over examples. Every task is a frozen dataclass of its sizes.

    A model reads tokens in order, sees nothing later, and is judged at the tokens with a target alone.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]  # authors, title, year, section

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Tokens are 0 to this number less one."""

    @property
    @abstractmethod
    def length(self) -> int:
        """L."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Share of right answers of the best guess that knows the form of the task, but has remembered no example."""

    @property
    def groups(self) -> tuple[str, ...]:
        """The property that groups examples, where accuracy may depend on it."""
        return ("all",)

    @abstractmethod
    def draw(self, count: int, random: torch.Generator) -> Examples:
        """`count` independent examples; the same generator state gives the same ones."""


def distinct(count: int, choices: int, many: int, random: torch.Generator) -> Tensor:
    """(count, many): in each row `many` different numbers below `choices`, every ordered choice equally likely."""
    return torch.rand(count, choices, generator=random, dtype=torch.float64).argsort(1)[:, :many]


def digests(tokens: Tensor) -> Tensor:
    """(B,) int64: equal rows have equal digests, and others hardly ever do."""
    weights = torch.randint(-(2**62), 2**62, tokens.shape[1:], generator=torch.Generator().manual_seed(0))
    mixed = (tokens + 1) * weights  # wraps around, as hashes do
    return (mixed ^ (mixed >> 29)).sum(1)


def never_seen(examples: Examples, held: Tensor) -> Examples:
    """The same examples, but nothing is asked of those whose digest is in `held`: no model learns from them."""
    known = torch.isin(digests(examples.tokens), held)
    return examples._replace(targets=examples.targets.masked_fill(known[:, None], UNASKED))
