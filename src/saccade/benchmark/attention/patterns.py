"""Masks of the benchmark: `full`, `causal`, `window:W`, `padding:half`, `documents:N`, `prefix:N`, joined by `+`.

In every mask a row sees one range of keys, so visible pairs are counted exactly without forming them: row i of item b
sees the keys `first[b, i] <= j < stop[b, i]`. Each term has three equivalent forms: a mask value for Saccade, a rule on
indices for FlexAttention, and the ranges for counting and for the reference.

Shape legend: B batch, Lq / Lk lengths. Query row i stands at position `i + (Lk - Lq)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ...operator._masks import Causal, Documents, Mask, Padding, Prefix, Window

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (b, h, row, key) -> attends


class PatternSizes(NamedTuple):
    batch: int
    length_q: int
    length_k: int

    @property
    def offset(self) -> int:
        return self.length_k - self.length_q


class KeyRanges(NamedTuple):
    """int64, (B or 1, Lq) each; an empty row has stop <= first."""

    first: Tensor
    stop: Tensor


class PatternTerm(ABC):
    @abstractmethod
    def ranges(self, sizes: PatternSizes, position: Tensor) -> KeyRanges:
        """The visible keys for each position (Lq,); the caller clips them to 0 and Lk."""

    @abstractmethod
    def mask(self, sizes: PatternSizes) -> Callable[[], Mask]:
        """Returns a function that creates a new mask value; its tensors are made in advance, as in a training loop."""

    @abstractmethod
    def rule(self, sizes: PatternSizes) -> Rule: ...


@dataclass(frozen=True)
class CausalTerm(PatternTerm):
    def ranges(self, sizes: PatternSizes, position: Tensor) -> KeyRanges:
        return KeyRanges(torch.zeros_like(position)[None], position[None] + 1)

    def mask(self, sizes: PatternSizes) -> Callable[[], Mask]:
        return Causal

    def rule(self, sizes: PatternSizes) -> Rule:
        return lambda b, h, row, key: key <= row + sizes.offset


@dataclass(frozen=True)
class WindowTerm(PatternTerm):
    """A query's own key and the `width - 1` keys before it."""

    width: int

    def ranges(self, sizes: PatternSizes, position: Tensor) -> KeyRanges:
        return KeyRanges(position[None] - self.width + 1, position[None] + 1)

    def mask(self, sizes: PatternSizes) -> Callable[[], Mask]:
        return lambda: Window(self.width - 1, 0)

    def rule(self, sizes: PatternSizes) -> Rule:
        def seen(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            back = row + sizes.offset - key
            return (back >= 0) & (back < self.width)

        return seen


@dataclass(frozen=True)
class PaddingTerm(PatternTerm):
    """Keys with padding on the right: a mean share of `share` is real; lengths differ by up to half of that."""

    share: float

    def lengths(self, sizes: PatternSizes) -> Tensor:
        """Lengths (B,), evenly spread around the mean; odd, since real lengths do not end at tile boundaries."""
        spread = torch.linspace(-1, 1, sizes.batch, dtype=torch.float64) if sizes.batch > 1 else torch.zeros(1)
        room = min(self.share, 1 - self.share) / 2
        exact = sizes.length_k * (self.share + room * spread.double())
        return (exact.round().long() | 1).clamp(max=sizes.length_k)

    def ranges(self, sizes: PatternSizes, position: Tensor) -> KeyRanges:
        stop = self.lengths(sizes)[:, None].expand(-1, len(position))
        return KeyRanges(torch.zeros_like(stop), stop)

    def mask(self, sizes: PatternSizes) -> Callable[[], Mask]:
        lengths = self.lengths(sizes)
        return lambda: Padding(lengths)

    def rule(self, sizes: PatternSizes) -> Rule:
        lengths = self.lengths(sizes)
        return lambda b, h, row, key: key < lengths[b]


@dataclass(frozen=True)
class DocumentsTerm(PatternTerm):
    """`count` documents of almost equal length, which do not end at tile boundaries."""

    count: int

    def starts(self, sizes: PatternSizes) -> Tensor:
        return torch.tensor([0] + [(n * sizes.length_k // self.count) | 1 for n in range(1, self.count)])

    def ids(self, sizes: PatternSizes) -> Tensor:
        return torch.bucketize(torch.arange(sizes.length_k), self.starts(sizes)[1:], right=True)

    def ranges(self, sizes: PatternSizes, position: Tensor) -> KeyRanges:
        ends = torch.cat([self.starts(sizes), torch.tensor([sizes.length_k])])
        own = self.ids(sizes)[position.clamp(0)]
        stop = torch.where(position < 0, 0, ends[own + 1])
        return KeyRanges(ends[own][None], stop[None])

    def mask(self, sizes: PatternSizes) -> Callable[[], Mask]:
        ids = self.ids(sizes)
        return lambda: Documents(ids)

    def rule(self, sizes: PatternSizes) -> Rule:
        ids = self.ids(sizes)
        return lambda b, h, row, key: ids[row + sizes.offset] == ids[key]


@dataclass(frozen=True)
class PrefixTerm(PatternTerm):
    length: int

    def ranges(self, sizes: PatternSizes, position: Tensor) -> KeyRanges:
        return KeyRanges(torch.zeros_like(position)[None], (position[None] + 1).clamp(min=self.length))

    def mask(self, sizes: PatternSizes) -> Callable[[], Mask]:
        return lambda: Prefix(self.length)

    def rule(self, sizes: PatternSizes) -> Rule:
        return lambda b, h, row, key: (key < self.length) | (key <= row + sizes.offset)


@dataclass(frozen=True)
class MaskPattern:
    """Terms that are all combined, and an optional bias: None, "alibi" or "bias" (a tensor, (Hq, Lq, Lk))."""

    terms: tuple[PatternTerm, ...]
    bias: str | None = None

    @classmethod
    def parse(cls, text: str) -> MaskPattern:
        """Parse a pattern; ValueError if it is invalid."""
        words = text.split("+")
        biases = [word for word in words if word in ("alibi", "bias")]
        if len(biases) > 1:
            raise ValueError(f"mask: {text!r} has two biases, expected at most one of alibi and bias")
        terms = tuple(_term(word, text) for word in words if word not in ("full", *biases))
        return cls(terms, biases[0] if biases else None)

    def ranges(self, sizes: PatternSizes) -> KeyRanges:
        position = torch.arange(sizes.length_q) + sizes.offset
        whole = KeyRanges(
            torch.zeros(1, len(position), dtype=torch.long), torch.full((1, len(position)), sizes.length_k)
        )
        parts = [whole, *(term.ranges(sizes, position) for term in self.terms)]
        first = reduce(torch.maximum, [part.first for part in parts])
        return KeyRanges(first, reduce(torch.minimum, [part.stop for part in parts]))

    def pairs(self, sizes: PatternSizes) -> int:
        """Number of visible (query, key) pairs of one head, over the batch."""
        first, stop = self.ranges(sizes)
        return int((stop - first).clamp(min=0).expand(sizes.batch, -1).sum())

    def mask(self, sizes: PatternSizes) -> Callable[[], Mask | None]:
        makers = [term.mask(sizes) for term in self.terms]
        return lambda: reduce(lambda a, b: a & b, [make() for make in makers]) if makers else None

    def rule(self, sizes: PatternSizes) -> Rule | None:
        rules = [term.rule(sizes) for term in self.terms]
        if not rules:
            return None
        return lambda b, h, row, key: reduce(torch.logical_and, [rule(b, h, row, key) for rule in rules])

    def dense(self, sizes: PatternSizes) -> Tensor | None:
        """bool (B or 1, 1, Lq, Lk), True = visible; None without a mask."""
        if not self.terms:
            return None
        first, stop = self.ranges(sizes)
        key = torch.arange(sizes.length_k)
        return ((key >= first[..., None]) & (key < stop[..., None]))[:, None]

    @property
    def is_causal(self) -> bool:
        return self.terms == (CausalTerm(),)

    @property
    def by_item(self) -> bool:
        return any(isinstance(term, PaddingTerm) for term in self.terms)


def _term(word: str, text: str) -> PatternTerm:
    name, _, number = word.partition(":")
    if name == "causal" and not number:
        return CausalTerm()
    if name == "padding":
        share = {"": 0.5, "half": 0.5}.get(number)
        return PaddingTerm(_share(number, text) if share is None else share)
    if name in ("window", "documents", "prefix") and number.isdigit() and int(number) > 0:
        makers: dict[str, Callable[[int], PatternTerm]] = {
            "window": WindowTerm,
            "documents": DocumentsTerm,
            "prefix": PrefixTerm,
        }
        return makers[name](int(number))
    raise ValueError(
        f"mask: expected full, causal, window:W, padding:half, documents:N, prefix:N, alibi or bias, "
        f"joined by +, got {text!r}"
    )


def _share(number: str, text: str) -> float:
    try:
        share = float(number)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ValueError(f"mask: padding must be a share in (0, 1] or half, got {text!r}")
    return share
