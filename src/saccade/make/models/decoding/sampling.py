"""Sampling: choosing the next token from logits.

Shape legend: N items, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of sampling.

    Args:
        temperature: divides the logits; 0 always takes the most probable token.
        top_k: keep only the k most probable tokens; None keeps all.
        top_p: of those, keep the fewest most probable tokens whose probabilities sum to at least p ("nucleus
            sampling", Holtzman et al. 2020); None keeps all.
        seed: of the random draws; None uses a fresh one.
        repetition_penalty: r > 1 makes tokens that are already in the text less likely: positive logits are divided
            by r, negative ones multiplied (Keskar et al., "CTRL", 2019, section 4.1), before all other rules; 1 has
            no effect.

    Raises:
        ValueError: numbers outside of these ranges.

    Example:
        >>> import torch, saccade
        >>> saccade.models.Sampling(top_k=2).probabilities(torch.tensor([1.0, 2.0, 3.0]))
        tensor([0.0000, 0.2689, 0.7311])
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: must be finite and not negative, got {self.temperature}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed: must be a 64-bit integer, got {self.seed}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p: must be in (0, 1], got {self.top_p}")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty: must be positive and finite, got {self.repetition_penalty}")

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution to sample from: logits (..., V) -> probabilities (..., V) in float32."""
        logits = logits.float()
        if self.temperature == 0.0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        logits = logits / self.temperature
        if self.top_k is not None:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p is not None:
            logits = keep_top_p(logits, self.top_p)
        return logits.softmax(-1)

    def generator(self) -> torch.Generator:
        """A random generator with the seed, or with a fresh one."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Sample a token for each item, int64 (N,), from logits (N, V)."""
        if self.temperature == 0.0:
            return logits.argmax(-1)
        drawn = torch.multinomial(self.probabilities(logits).cpu(), 1, generator=generator)
        return drawn[:, 0].to(logits.device)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Set all but the k largest of `logits (..., V)` to -inf; ties with the k-th are kept."""
    if k >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[..., -1:], float("-inf"))


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Set `logits (..., V)` to -inf outside the smallest set of top tokens with probability p; at least one is kept."""
    ordered, order = logits.sort(descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    reached_before = probabilities.cumsum(-1) - probabilities >= p
    reached_before[..., 0] = False
    dropped = torch.zeros_like(reached_before).scatter(-1, order, reached_before)
    return logits.masked_fill(dropped, float("-inf"))


class Draws:
    """Sampling for a batch: one random generator, and the tokens that a repetition penalty applies to.

    Args:
        sampling: settings of sampling.
        ids: (N, L), the tokens that texts begin with.
        mask: (N, L), which of these tokens are real; None: all.
    """

    def __init__(self, sampling: Sampling, ids: Tensor, mask: Tensor | None = None):
        self.sampling, self._generator = sampling, sampling.generator()
        self._begun = ids, mask
        self._there: Tensor | None = None  # bool (N, V), the tokens in each text; None until needed

    def penalised(self, logits: Tensor) -> Tensor:
        """Logits (N, V) with the repetition penalty applied to tokens that are in the text."""
        penalty = self.sampling.repetition_penalty
        if penalty == 1.0:
            return logits
        if self._there is None:
            ids, mask = self._begun
            real = torch.ones_like(ids) if mask is None else mask.to(ids)
            counts = torch.zeros_like(logits, dtype=torch.int64)
            self._there = counts.scatter_add_(1, ids.long(), real.long()) > 0
        return torch.where(self._there, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    def draw(self, logits: Tensor) -> Tensor:
        """Sample the next token of each item, int64 (N,), from logits (N, V), and add it to the text."""
        tokens = self.sampling.draw(logits, self._generator)
        if self._there is not None:
            self._there = self._there.scatter(1, tokens[:, None], True)
        return tokens

    def keep(self, items: Tensor) -> None:
        """Keep only `items`, int64 (N',)."""
        if self._there is not None:
            self._there = self._there[items]
