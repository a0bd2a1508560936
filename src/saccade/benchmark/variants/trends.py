"""What follows from measurements at several lengths: how an amount grows, and where one line becomes faster."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..attention.statistics import exponent
from .results import ContenderResults

TAIL = 8  # exponents are fitted from the longest length down to an eighth of it: short calls are overhead
FORESEEN = 16  # times the longest length, as far as a crossing is extrapolated
FLATTEST, STEEPEST = -0.1, 3.5  # exponents that a machine left to itself may give: a state of fixed size, and rounding
OFF = 1.5  # times that amounts may lie off their power of the length, as a root mean square


@dataclass(frozen=True)
class Crossover:
    """From which length on a line is faster.

    kind: "always" (at every measured length), "measured" (between two of them), "extrapolated" (beyond them), "never"
    (not within sixteen times the longest), "until" (faster below `length` alone), "unknown" (too few measurements).
    """

    kind: str
    length: float | None = None


def growth(line: ContenderResults, what: str) -> float | None:
    """The fitted exponent in L of seconds of a call or of "memory"; None with fewer than three lengths."""
    tail = _longest_lengths(line, what)
    return exponent(*zip(*tail, strict=True)) if len({length for length, _ in tail}) > 2 else None


def sound(line: ContenderResults, what: str) -> bool:
    """Whether the amounts may be what they seem: they do not fall with length, and lie near some power of it.

    Where they are not sound, something else used the machine, and nothing follows from them. One length says nothing.
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
    """Lengths and amounts from the longest length down to an eighth of it."""
    lengths, amounts = line.amounts(what)
    both = zip(lengths, amounts, strict=True)
    return [(length, amount) for length, amount in both if length * TAIL >= lengths[-1]]


def crossover(line: ContenderResults, exact: ContenderResults, call: str) -> Crossover:
    """Where `line` becomes faster than `exact`: a straight line between measurements, both axes logarithmic."""
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
    """Where the last two measurements point to; never where they do not come nearer."""
    if len(ratios) < 2 or ratios[-1][1] >= ratios[-2][1]:
        return Crossover("never")
    length = _crossing(ratios[-2], ratios[-1])
    return Crossover("extrapolated", length) if length <= FORESEEN * math.exp(ratios[-1][0]) else Crossover("never")
