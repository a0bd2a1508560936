"""What can be asked of measurements: a share of the limit, a speed-up, a ratio of times, a growth, an amount of memory.

Rows are named by their place in the group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ... import _numbers
from .results import Measurement, MeasurementGroup, RequirementOutcome
from .statistics import Quartiles, exponent


class Requirement(ABC):
    """bound: what is asked for, at least or at most by `upward`."""

    bound: float
    upward = True

    @abstractmethod
    def value(self, group: MeasurementGroup) -> Quartiles | float | None:
        """What was measured; None where it could not be."""

    @abstractmethod
    def shown(self, value: float) -> str: ...

    @abstractmethod
    def words(self, group: MeasurementGroup) -> str:
        """What is asked, after "at least" and the bound."""

    def outcome(self, target: str, group: MeasurementGroup) -> RequirementOutcome:
        value = self.value(group)
        asked = f"{'at least' if self.upward else 'at most'} {self.shown(self.bound)} {self.words(group)}"
        if value is None:
            reasons = [f"{row.contender}: {row.note}" for row in group.rows if row.status != "measured" and row.note]
            return RequirementOutcome(target, asked, None, reasons[0] if reasons else "not known", False)
        middle = value.median if isinstance(value, Quartiles) else value
        text = self.shown(middle)
        if isinstance(value, Quartiles):
            text += f" ({self.shown(value.low)} to {self.shown(value.high)})"
        return RequirementOutcome(
            target, asked, middle, text, middle >= self.bound if self.upward else middle <= self.bound
        )


@dataclass(frozen=True)
class LimitShare(Requirement):
    """The rate as a part of the machine's limit."""

    bound: float
    row: int = 0

    def value(self, group: MeasurementGroup) -> Quartiles | None:
        return group.share(group.rows[self.row])

    def shown(self, value: float) -> str:
        return _numbers.tenths_of_percent(value)

    def words(self, group: MeasurementGroup) -> str:
        return f"of {group.rows[self.row].limit or 'the limit'}"


@dataclass(frozen=True)
class SpeedupRequirement(Requirement):
    """How many times faster one row is than another, round by round."""

    bound: float
    row: int = 0
    over: int = 1

    def value(self, group: MeasurementGroup) -> Quartiles | None:
        return group.speedup(group.rows[self.row], group.rows[self.over])

    def shown(self, value: float) -> str:
        return f"{value:.2f}x"

    def words(self, group: MeasurementGroup) -> str:
        return f"the speed of {group.rows[self.over].contender}"


@dataclass(frozen=True)
class RelativeTime(Requirement):
    """The time of one row in units of another's."""

    bound: float
    of: str
    row: int = 0
    unit: int = 1
    upward = False

    def value(self, group: MeasurementGroup) -> Quartiles | None:
        return group.speedup(group.rows[self.unit], group.rows[self.row])

    def shown(self, value: float) -> str:
        return f"{value:.2f}x"

    def words(self, group: MeasurementGroup) -> str:
        return self.of


@dataclass(frozen=True)
class TimeGrowth(Requirement):
    """The exponent of time in length, over rows that differ in length."""

    bound: float
    rows: tuple[int, ...]
    upward = False

    def value(self, group: MeasurementGroup) -> float | None:
        rows = [group.rows[place] for place in self.rows]
        seconds = [row.seconds for row in rows]
        medians = [found.median for found in seconds if found is not None]
        return exponent([row.case.length_k for row in rows], medians) if len(medians) == len(rows) else None

    def shown(self, value: float) -> str:
        return f"L^{value:.3f}"

    def words(self, group: MeasurementGroup) -> str:
        ends = group.rows[self.rows[0]].case, group.rows[self.rows[-1]].case
        return f"from L={_numbers.length(ends[0].length_k)} to {_numbers.length(ends[1].length_k)}"


@dataclass(frozen=True)
class ExtraMemory(Requirement):
    """Peak memory above inputs and gradients, in units of the bytes of query, key, value and output."""

    bound: float
    row: int = 0
    upward = False

    def value(self, group: MeasurementGroup) -> float | None:
        return _extra(group.rows[self.row])

    def shown(self, value: float) -> str:
        return f"{value:.2f}x"

    def words(self, group: MeasurementGroup) -> str:
        return "the bytes of q, k, v and out"


def _extra(row: Measurement) -> float | None:
    return None if row.memory is None else row.memory.extra / row.case.bytes_in_and_out
