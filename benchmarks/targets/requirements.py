"""What may be asked of a group of measurements: a requirement takes one number from it and compares that with a bound.

Rows are named by their place in the group; the first is the one that is held to the requirement.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from saccade.benchmark.attention.results import Measurement, MeasurementGroup
from saccade.benchmark.attention.statistics import Quartiles
from saccade.support import _numbers

from .arithmetic import Least, least
from .memory import EXTRA, bytes_in_and_out
from .tiles import visited_tiles


def median_error(middle: Quartiles, count: int) -> float:
    """The standard error of the median of `count` readings: 1.25 sigma / sqrt(count), where the middle half of normal
    readings spans 1.35 sigma."""
    return 1.25 * (middle.high - middle.low) / 1.35 / math.sqrt(count)


@dataclass(frozen=True)
class RequirementOutcome:
    """The requirement on a measurement, and whether it was met.

    measured is None where it could not be measured. verdict: "met"; "missed"; "out of reach" (missed, and arithmetic
    allows no more); "noisy" (the readings do not decide it); "not measured". reason: what arithmetic allows, of a miss.
    """

    target: str
    asked: str
    measured: float | None
    shown: str
    verdict: str
    reason: str = ""


class Requirement(ABC):
    """bound: the required value, at least or at most by `upward`."""

    bound: float
    upward = True

    @abstractmethod
    def rows(self, group: MeasurementGroup) -> list[Measurement]:
        """The rows it rests on; a number comes of them only if all are measured."""

    @abstractmethod
    def value(self, group: MeasurementGroup) -> Quartiles | float | None:
        """The measured value; None if there is none."""

    @abstractmethod
    def shown(self, value: float) -> str: ...

    @abstractmethod
    def words(self, group: MeasurementGroup) -> str:
        """The required quantity, after "at least" and the bound."""

    def allowed(self, group: MeasurementGroup, at_least: Least) -> float | None:
        """The best number that the first row could have if it took no more than the least time."""
        return None

    def asked(self, group: MeasurementGroup) -> str:
        return f"{'at least' if self.upward else 'at most'} {self.shown(self.bound)} {self.words(group)}"

    def holds(self, value: Quartiles | float, group: MeasurementGroup) -> bool:
        return self._reaches(_middle(value))

    def _reaches(self, number: float) -> bool:
        return number >= self.bound if self.upward else number <= self.bound

    def outcome(self, target: str, group: MeasurementGroup) -> RequirementOutcome:
        value, asked = self.value(group), self.asked(group)
        if value is None:
            reasons = [f"{row.contender}: {row.note}" for row in group.rows if row.status != "measured" and row.note]
            return RequirementOutcome(target, asked, None, reasons[0] if reasons else "not known", "not measured")
        text = self.shown(_middle(value))
        if isinstance(value, Quartiles):
            text += f" ({self.shown(value.low)} to {self.shown(value.high)})"
        verdict, reason = self._verdict(value, group)
        return RequirementOutcome(target, asked, _middle(value), text, verdict, reason)

    def _verdict(self, value: Quartiles | float, group: MeasurementGroup) -> tuple[str, str]:
        """And the reason: what disturbed the readings, or what arithmetic allows of what is missed."""
        if group.disturbed:
            return "noisy", f"other programs took {_numbers.percent(group.others or 0)} of the processors"
        spreading = [row.contender for row in self.rows(group) if row.noisy]
        if spreading or (isinstance(value, Quartiles) and value.noisy):
            return "noisy", f"readings of {spreading[0] if spreading else 'the ratio'} spread"
        if self.holds(value, group):
            return "met", ""
        at_least = least(group.rows[0].case, group)
        allowed = None if at_least is None else self.allowed(group, at_least)
        if at_least is None or allowed is None:
            return "missed", ""
        side = "at most" if self.upward else "at least"
        return (
            "missed" if self._reaches(allowed) else "out of reach",
            f"arithmetic allows {side} {self.shown(allowed)}: {at_least.words}",
        )


def _middle(value: Quartiles | float) -> float:
    return value.median if isinstance(value, Quartiles) else value


@dataclass(frozen=True)
class LimitShare(Requirement):
    """The rate as a part of the machine's limit."""

    bound: float

    def rows(self, group: MeasurementGroup) -> list[Measurement]:
        return [group.rows[0]]

    def value(self, group: MeasurementGroup) -> Quartiles | None:
        return group.share(group.rows[0])

    def shown(self, value: float) -> str:
        return f"{100 * value:.1f} %"

    def words(self, group: MeasurementGroup) -> str:
        return f"of {group.rows[0].limit or 'the limit'}"

    def allowed(self, group: MeasurementGroup, at_least: Least) -> float | None:
        row = group.rows[0]
        limit = None if row.limit is None else group.limit(row.limit)
        return None if limit is None else row.case.amount / limit / at_least.seconds


@dataclass(frozen=True)
class NeverSlower(Requirement):
    """The speed as a multiple of the fastest other's on the same case.

    Two that are equally fast would each be the slower one in half of all runs. So slower is only what lies below the
    bound by more than two standard errors of the median.
    """

    bound: float = 1.0

    def rows(self, group: MeasurementGroup) -> list[Measurement]:
        best = self._best(group)
        return [group.rows[0]] if best is None else [group.rows[0], best]

    @staticmethod
    def _best(group: MeasurementGroup) -> Measurement | None:
        first, *others = group.rows
        return min(
            (row for row in others if row.case == first.case and row.seconds),
            key=lambda row: row.seconds.median if row.seconds else 0.0,
            default=None,
        )

    def value(self, group: MeasurementGroup) -> Quartiles | None:
        best = self._best(group)
        return None if best is None else group.speedup(group.rows[0], best)

    def holds(self, value: Quartiles | float, group: MeasurementGroup) -> bool:
        assert isinstance(value, Quartiles)
        return value.median + 2 * median_error(value, len(group.rows[0].readings)) >= self.bound

    def shown(self, value: float) -> str:
        return f"{value:.2f}x"

    def asked(self, group: MeasurementGroup) -> str:
        best = self._best(group)
        return f"never slower than {'the others' if best is None else f'the best other, {best.contender}'}"

    def words(self, group: MeasurementGroup) -> str:
        return ""

    def allowed(self, group: MeasurementGroup, at_least: Least) -> float | None:
        best = self._best(group)
        return best.seconds.median / at_least.seconds if best and best.seconds else None


@dataclass(frozen=True)
class TileTime(Requirement):
    """Time for each 48 x 48 tile of pairs that the mask touches, in units of the second row's, which sees all pairs."""

    bound: float = 1.1
    upward = False

    def rows(self, group: MeasurementGroup) -> list[Measurement]:
        return list(group.rows[:2])

    @staticmethod
    def _tiles(group: MeasurementGroup) -> float:
        return visited_tiles(group.rows[1].case) / visited_tiles(group.rows[0].case)

    def value(self, group: MeasurementGroup) -> Quartiles | None:
        times = group.speedup(group.rows[1], group.rows[0])
        return None if times is None else Quartiles(*(time * self._tiles(group) for time in times))

    def shown(self, value: float) -> str:
        return f"{value:.2f}x"

    def words(self, group: MeasurementGroup) -> str:
        counts = [f"{visited_tiles(row.case):,}" for row in group.rows[:2]]
        return f"the full call's time for each visited tile ({counts[0]}; full {counts[1]})"

    def allowed(self, group: MeasurementGroup, at_least: Least) -> float | None:
        full = group.rows[1].seconds
        return None if full is None else at_least.seconds / full.median * self._tiles(group)


@dataclass(frozen=True)
class ExtraMemory(Requirement):
    """Peak memory above inputs and gradients, in units of the bytes of query, key, value and output."""

    bound: float
    upward = False

    def rows(self, group: MeasurementGroup) -> list[Measurement]:
        return [group.rows[0]]

    def value(self, group: MeasurementGroup) -> float | None:
        extra = group.limit(EXTRA)
        return None if extra is None else extra / bytes_in_and_out(group.rows[0].case)

    def shown(self, value: float) -> str:
        return f"{value:.2f}x"

    def words(self, group: MeasurementGroup) -> str:
        return "the bytes of q, k, v and out"
