"""Medians, quartiles, paired ratios, and growth with length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NOISY = 0.15  # of the median, between the quartiles


class Quartiles(NamedTuple):
    low: float
    median: float
    high: float

    @property
    def spread(self) -> float:
        """The interquartile range relative to the median."""
        return (self.high - self.low) / self.median if self.median else math.inf

    @property
    def noisy(self) -> bool:
        """Whether the spread suggests a disturbance."""
        return self.spread > NOISY


def quartiles(readings: Sequence[float]) -> Quartiles:
    """Quartiles of readings. ValueError without readings."""
    if not len(readings):
        raise ValueError("quartiles of no readings")
    return Quartiles(*(float(number) for number in np.quantile(np.asarray(readings, dtype=float), (0.25, 0.5, 0.75))))


def paired_ratio(upper: Sequence[float], lower: Sequence[float]) -> Quartiles:
    """Quartiles of `upper[n] / lower[n]`: pairs of the same round, so that drift cancels.

    ValueError for different numbers of readings.
    """
    if len(upper) != len(lower):
        raise ValueError(f"expected as many readings above as below, got {len(upper)} and {len(lower)}")
    return quartiles([a / b for a, b in zip(upper, lower, strict=True)])


def exponent(lengths: Sequence[float], amounts: Sequence[float]) -> float:
    """The exponent p of the least-squares fit of `amount = c * length ** p` in logarithms.

    ValueError with fewer than two different lengths or an amount that is not positive.
    """
    if len(set(lengths)) < 2 or len(lengths) != len(amounts):
        raise ValueError(f"an exponent needs amounts at two lengths or more, got lengths {list(lengths)}")
    if min(amounts) <= 0 or min(lengths) <= 0:
        raise ValueError("an exponent needs positive lengths and amounts")
    x, y = np.log(np.asarray(lengths, dtype=float)), np.log(np.asarray(amounts, dtype=float))
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / (x * x).sum())
