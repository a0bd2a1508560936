"""Running mean, spread and extremes of every statistic of every call and head, in constant memory.

There are two kinds of samples. A row statistic (entropy, masses, ...) has one sample for each counted row of each
observed step, so a step with more tokens weighs more. A step statistic (largest logit, norms, gradients, ...) has one
for each step. Means and squared deviations of parts are joined as in Chan, Golub & LeVeque (1983), in float64.

Shape legend: B batch, H query heads, L rows, S statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Aggregate:
    """One statistic of one head of one call: the number of samples and their mean, spread, minimum and maximum.

    `spread` is the standard deviation of the samples (divided by their number), 0 for a single one. Without samples
    everything but the count is NaN.

    Example:
        >>> import torch, saccade
        >>> model = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> with saccade.watch(model) as seen:
        ...     _ = model(torch.randn(2, 5, 16))
        >>> entropy = seen.aggregates[seen.calls[0].name][3]["entropy"]  # of head 3
        >>> entropy.count, entropy.min <= entropy.mean <= entropy.max
        (10, True)
    """

    count: int
    mean: float
    spread: float
    min: float
    max: float


@dataclass
class RunningSums:
    """Sums of samples for several statistics: each (S, H), float64."""

    names: tuple[str, ...]
    count: Tensor
    mean: Tensor
    squares: Tensor  # sum of squared deviations from the mean
    least: Tensor
    most: Tensor

    @staticmethod
    def of(names: Sequence[str], samples: Tensor, counted: Tensor) -> RunningSums:
        """Sums of samples (S, B, H, L) where `counted`, which broadcasts to them, is true."""
        wide = torch.float64 if samples.device.type != "mps" else torch.float32
        counted = counted.expand(samples.shape)
        count = counted.sum((1, 3)).to(wide)
        some = count.clamp(min=1)
        mean = torch.where(counted, samples, 0).sum((1, 3), dtype=wide) / some
        off = torch.where(counted, samples - mean[:, None, :, None].to(samples.dtype), 0)
        # The subtracted mean is rounded to the samples' dtype: this corrects its error.
        squares = (off * off).sum((1, 3), dtype=wide) - off.sum((1, 3), dtype=wide) ** 2 / some
        least = torch.where(counted, samples, torch.inf).amin((1, 3)).to(wide)
        most = torch.where(counted, samples, -torch.inf).amax((1, 3)).to(wide)
        return RunningSums(tuple(names), count, mean, squares.clamp(min=0), least, most)

    def join(self, other: RunningSums) -> RunningSums:
        """The sums of the samples of both."""
        if self.names != other.names:
            return self._with(other.names).join(other._with(self.names))
        total = self.count + other.count
        share = other.count / total.clamp(min=1)
        apart = torch.where(other.count > 0, other.mean - self.mean, 0.0)
        return RunningSums(
            self.names,
            total,
            torch.where(self.count > 0, self.mean + apart * share, other.mean),
            self.squares + other.squares + torch.where(self.count > 0, apart * apart * self.count * share, 0.0),
            torch.minimum(self.least, other.least),
            torch.maximum(self.most, other.most),
        )

    def _with(self, names: tuple[str, ...]) -> RunningSums:
        """The sums with an empty entry for each missing name, in a common order, so that two can be joined."""
        order = tuple(sorted({*self.names, *names}))
        empty = self.count.new_zeros(1, self.count.shape[1])
        lines = {name: place for place, name in enumerate(self.names)}
        where = [lines.get(name, len(self.names)) for name in order]
        fills = (empty, empty, empty, empty + torch.inf, empty - torch.inf)
        held = (self.count, self.mean, self.squares, self.least, self.most)
        return RunningSums(order, *(torch.cat([own, fill])[where] for own, fill in zip(held, fills, strict=True)))

    def of_heads(self) -> list[dict[str, Aggregate]]:
        """The statistics of each head, by name."""
        held = (self.count, self.mean, self.squares, self.least, self.most)
        heads = torch.stack(held).permute(2, 1, 0).tolist()
        return [{name: _aggregate(*numbers) for name, numbers in zip(self.names, head, strict=True)} for head in heads]


def _aggregate(count: float, mean: float, squares: float, least: float, most: float) -> Aggregate:
    if count == 0:
        return Aggregate(0, *(float("nan"),) * 4)
    return Aggregate(int(count), mean, (squares / count) ** 0.5, least, most)
