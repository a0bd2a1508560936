"""The uncertainty of a number: the spread of a mean over texts, and of a share of cases."""

from __future__ import annotations

import functools
import math

import numpy as np

LEVEL = 0.95


def half_width(deviation: np.ndarray, count: np.ndarray, level: float = LEVEL) -> np.ndarray:
    """Half of Student's confidence interval of a mean: t s / sqrt(n), with n - 1 degrees of freedom.

    Args:
        deviation: s, the standard deviation over texts (n - 1 in the denominator).
        count: n, how many texts; NaN where fewer than two.
    """
    wide = np.full(np.broadcast(deviation, count).shape, np.nan)
    for n in np.unique(count[count > 1]):
        here = np.broadcast_to(count == n, wide.shape)
        wide[here] = np.broadcast_to(deviation, wide.shape)[here] * student(int(n) - 1, level) / math.sqrt(n)
    return wide


@functools.cache
def student(freedom: int, level: float = LEVEL) -> float:
    """The t for which a share 1 - level of Student's distribution lies outside of [-t, t].

    Its density in t = sqrt(freedom) tan(a) is cos(a)^(freedom - 1), so the share within is an integral over a bounded
    range; midpoints give it to seven digits.
    """
    angle = (np.arange(200_000) + 0.5) * (math.pi / 2 / 200_000)
    mass = np.cos(angle) ** (freedom - 1)
    share = mass.cumsum() / mass.sum()
    a = float(np.interp(level, share, angle + math.pi / 4 / 200_000))
    return math.sqrt(freedom) * math.tan(a)


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927), which stays within [0, 1] and has a width above 0 at 0 and 1.

    (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)
    """
    if not count:
        return (math.nan, math.nan)
    z, p = 1.959963984540054, right / count
    middle = p + z * z / (2 * count)
    wide = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    below, above = (middle - wide) / (1 + z * z / count), (middle + wide) / (1 + z * z / count)
    return max(0.0, below), min(1.0, above)


def over_groups(right: np.ndarray, count: np.ndarray, seed: int, draws: int = 2000) -> tuple[float, float]:
    """The 95 % interval of sum(right) / sum(count), where cases of one group (a sentence) are not independent.

    A bootstrap over groups (Efron 1979): groups are drawn with replacement, percentiles of the share are taken.
    NaN with fewer than two groups.
    """
    if len(count) < 2:
        return (math.nan, math.nan)
    drawn = np.random.default_rng(seed).multinomial(len(count), np.full(len(count), 1 / len(count)), size=draws)
    totals = drawn @ count
    shares = (drawn @ right)[totals > 0] / totals[totals > 0]
    low, high = np.quantile(shares, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
