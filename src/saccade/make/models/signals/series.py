"""Parts of time-series models: instance normalisation and output heads.

Shape legend: B batch, S steps of the past, C channels, P patches, E width, F steps of a forecast, K targets.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def check_series(
    values: object, observed: Tensor | None, steps: int, channels: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Values with unobserved NaN and infinities set to 0, and a mask of 1 for observed values; both (B, S, C).

    Raises:
        TypeError: another dtype. ValueError: another shape, no series, NaN or infinity marked as observed.
    """
    if not isinstance(values, Tensor) or values.dtype != dtype:
        came = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"past_values: expected a tensor of the weights' {dtype}, got {came}")
    if values.ndim != 3 or values.shape[1:] != (steps, channels) or not len(values):
        expected = f"(batch, {steps}, {channels}): {steps} steps of {channels} channels"
        raise ValueError(f"past_values: expected shape {expected}, got {tuple(values.shape)}")
    if observed is None:
        observed = torch.ones_like(values)
    elif not isinstance(observed, Tensor) or observed.shape != values.shape:
        given = tuple(observed.shape) if isinstance(observed, Tensor) else type(observed).__name__
        raise ValueError(f"past_observed_mask: expected past_values' shape {tuple(values.shape)}, got {given}")
    finite = values.isfinite()
    if not torch.compiler.is_compiling() and not bool((finite | (observed == 0)).all()):
        raise ValueError("past_values: contains NaN or infinite values; mark them as unobserved in past_observed_mask")
    return torch.where(finite, values, 0), observed.to(values)


class Scaler(nn.Module):
    """Instance normalisation of (B, S, C): subtracts `loc` and divides by `scale`, each (B, 1, C).

    "std": mean and standard deviation of the observed steps. "mean": loc 0 and the mean of absolute values as scale; a
    channel without observations gets the scale of the batch. None: loc 0 and scale 1.

    Args:
        kind: "std", "mean" or None.
        least: minimum: added to variances ("std"), or lower bound of scales ("mean").
        default: scale of a channel without observations, for "mean".
    """

    def __init__(self, kind: str | None, least: float, default: float | None = None):
        super().__init__()
        self.kind, self.least, self.default = kind, least, default

    def forward(self, values: Tensor, observed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The normalised values, `loc` and `scale`."""
        if self.kind is None:
            return values, torch.zeros_like(values[:, :1]), torch.ones_like(values[:, :1])
        counts = observed.sum(1, keepdim=True)
        if self.kind == "std":
            counts = counts.clamp(min=1)
            loc = (values * observed).sum(1, keepdim=True) / counts
            variance = ((values - loc) * observed).square().sum(1, keepdim=True) / counts
            scale = (variance + self.least).sqrt()
            return (values - loc) / scale, loc, scale
        sums = (values * observed).abs().sum(1, keepdim=True)
        default = sums.sum(0) / counts.sum(0).clamp(min=1) if self.default is None else self.default
        scale = torch.where(counts > 0, sums / counts.clamp(min=1), default).clamp(min=self.least)
        return values / scale, torch.zeros_like(scale), scale


class ForecastHead(nn.Module):
    """Forecast (B, F, C) from (B, C, P, E): a linear map of each channel's patches, pooled or concatenated.

    Args:
        width: of the input of the linear map.
        steps: F.
        channels: number of channels with separate maps; None uses one map for all.
        pooling: "mean", "max", "cls" (the first token), or None.
    """

    def __init__(self, width: int, steps: int, channels: int | None, pooling: str | None, dropout: float):
        super().__init__()
        self.pooling, self.dropout, self.shared = pooling, nn.Dropout(dropout), channels is None
        self.projections = nn.ModuleList(nn.Linear(width, steps) for _ in range(channels or 1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, P, E) to (B, F, C)."""
        x = self.dropout(pooled(x, self.pooling).flatten(2))
        if self.shared:
            return self.projections[0](x).transpose(1, 2)
        return torch.stack([project(x[:, n]) for n, project in enumerate(self.projections)], -1)


class SeriesHead(nn.Module):
    """Predictions (B, K) from (B, C, P, E), pooled and with all channels; limited to `bounds` if given."""

    def __init__(self, width: int, targets: int, pooling: str, dropout: float, bounds: tuple[float, float] | None):
        super().__init__()
        self.pooling, self.dropout, self.bounds = pooling, nn.Dropout(dropout), bounds
        self.out = nn.Linear(width, targets)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, P, E) to (B, K)."""
        x = self.out(self.dropout(pooled(x, self.pooling).flatten(1)))
        if self.bounds is None:
            return x
        low, high = self.bounds
        return x.sigmoid() * (high - low) + low


def pooled(x: Tensor, pooling: str | None) -> Tensor:
    """Pool the patches of (B, C, P, E) to (B, C, E); unchanged without pooling."""
    if pooling == "cls":
        return x[:, :, 0]
    return x if pooling is None else x.mean(2) if pooling == "mean" else x.amax(2)
