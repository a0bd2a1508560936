"""How the next token is chosen from logits.

Shape legend: N items, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Args:
        temperature: the logits are divided by it; 0 always takes the most probable token.
        top_k: keep only the k most probable tokens; None keeps all.
        top_p: of those, keep the fewest most probable tokens whose probabilities reach p ("nucleus sampling", Holtzman
            et al. 2020); None keeps all.
        seed: of the draws; None draws a fresh one.
        repetition_penalty: r > 1 makes tokens of the text less likely: their positive logits are divided by r, negative
            ones multiplied (Keskar et al., "CTRL", 2019, section 4.1), before all other rules; 1 changes nothing.

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
        """The distribution the next token is drawn from: logits (..., V) -> (..., V) float32."""
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
        """A source of random numbers begun with the seed, or with a fresh one."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """One token for each item, int64 (N,), from logits (N, V)."""
        if self.temperature == 0.0:
            return logits.argmax(-1)
        drawn = torch.multinomial(self.probabilities(logits).cpu(), 1, generator=generator)
        return drawn[:, 0].to(logits.device)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """All but the k largest of `logits (..., V)` become -inf; equals of the k-th stay."""
    if k >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[..., -1:], float("-inf"))


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """All of `logits (..., V)` but the fewest largest whose probabilities reach p become -inf; at least one stays."""
    ordered, order = logits.sort(descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    reached_before = probabilities.cumsum(-1) - probabilities >= p
    reached_before[..., 0] = False
    dropped = torch.zeros_like(reached_before).scatter(-1, order, reached_before)
    return logits.masked_fill(dropped, float("-inf"))


class Draws:
    """The draws for items side by side: one source of random numbers, and the tokens of each text to be penalised.

    Args:
        sampling: how tokens are drawn.
        ids: (N, L), what the texts begin with.
        mask: (N, L), which of these tokens are real; None: all.
    """

    def __init__(self, sampling: Sampling, ids: Tensor, mask: Tensor | None = None):
        self.sampling, self._generator = sampling, sampling.generator()
        self._begun = ids, mask
        self._there: Tensor | None = None  # bool (N, V), which tokens stand in each text, once that counts

    def penalised(self, logits: Tensor) -> Tensor:
        """Logits (N, V), less of the tokens that stand in the text."""
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
        """The next token of each item, int64 (N,), from logits (N, V); it stands in the text from then on."""
        tokens = self.sampling.draw(logits, self._generator)
        if self._there is not None:
            self._there = self._there.scatter(1, tokens[:, None], True)
        return tokens

    def keep(self, items: Tensor) -> None:
        """Go on with `items`, int64 (N',), alone."""
        if self._there is not None:
            self._there = self._there[items]
