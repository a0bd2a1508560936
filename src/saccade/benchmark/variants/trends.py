"""Trends over lengths: growth of an amount, and the length from which one contender is faster than another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..attention.statistics import exponent
from .results import ContenderResults

TAIL = 8  # fits use lengths from the longest to an eighth of it: short calls are mostly overhead
FORESEEN = 16  # times the longest length, up to which crossovers are extrapolated
FLATTEST, STEEPEST = -0.1, 3.5  # plausible exponents of times: a constant time, with some noise, to a cubic one
OFF = 1.5  # maximum root-mean-square factor between amounts and the fitted power law


@dataclass(frozen=True)
class Crossover:
    """The length from which a contender is faster.

    kind: "always" (at every measured length), "measured" (between two measured lengths), "extrapolated" (beyond them),
    "never" (not within sixteen times the longest), "until" (faster only below `length`), "unknown" (too few
    measurements).
    """

    kind: str
    length: float | None = None


def growth(line: ContenderResults, what: str) -> float | None:
    """The fitted exponent in the length of a call's seconds or of "memory"; None for fewer than three lengths."""
    tail = _longest_lengths(line, what)
    return exponent(*zip(*tail, strict=True)) if len({length for length, _ in tail}) > 2 else None


def sound(line: ContenderResults, what: str) -> bool:
    """Whether the amounts are plausible: they grow with length and are near a power law.

    Otherwise another program used the machine, and no conclusion is drawn. A single length is always plausible.
    """
    tail = _longest_lengths(line, what)
    if len({length for length, _ in tail}) < 2:
        return True
    lengths, amounts = zip(*tail, strict=True)
    power = exponent(lengths, amounts)
    left = [math.log(amount) - power * math.log(length) for length, amount in tail]
    off = statistics.pstdev(left)
    return FLATTEST <= power <= STEEPEST and off <= math.log(OFF)


def _longest_lengths(line: ContenderResults, what: str) -> list[tuple[int, float]]:
    """Amounts for lengths from the longest to an eighth of it."""
    lengths, amounts = line.amounts(what)
    both = zip(lengths, amounts, strict=True)
    return [(length, amount) for length, amount in both if length * TAIL >= lengths[-1]]


def crossover(line: ContenderResults, exact: ContenderResults, call: str) -> Crossover:
    """The length from which `line` is faster than `exact`, by linear interpolation in logarithms."""
    ratios = _ratios(line, exact, call)
    if not ratios:
        return Crossover("unknown")
    if all(ratio <= 0 for _, ratio in ratios):
        return Crossover("always")
    if ratios[-1][1] > 0:
        faster = [index for index, (_, ratio) in enumerate(ratios) if ratio <= 0]
        if faster:
            return Crossover("until", _crossing(ratios[faster[-1]], ratios[faster[-1] + 1]))
        return _beyond(ratios)
    last = max(index for index, (_, ratio) in enumerate(ratios) if ratio > 0)
    return Crossover("measured", _crossing(ratios[last], ratios[last + 1]))


Ratio = tuple[float, float]  # logarithms of length and of how many times slower


def _ratios(line: ContenderResults, exact: ContenderResults, call: str) -> list[Ratio]:
    theirs = dict(zip(*exact.amounts(call), strict=True))
    ours = zip(*line.amounts(call), strict=True)
    return [(math.log(length), math.log(mine / theirs[length])) for length, mine in ours if length in theirs]


def _crossing(before: Ratio, after: Ratio) -> float:
    """The length at which the ratio is 1 on the line through two points."""
    (x0, y0), (x1, y1) = before, after
    return math.exp(x0 - y0 * (x1 - x0) / (y1 - y0))


def _beyond(ratios: Sequence[Ratio]) -> Crossover:
    """Extrapolate from the last two measurements; "never" if the ratio does not improve."""
    if len(ratios) < 2 or ratios[-1][1] >= ratios[-2][1]:
        return Crossover("never")
    length = _crossing(ratios[-2], ratios[-1])
    return Crossover("extrapolated", length) if length <= FORESEEN * math.exp(ratios[-1][0]) else Crossover("never")
