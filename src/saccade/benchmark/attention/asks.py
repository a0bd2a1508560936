"""What can be asked of measurements: a share of the limit, a speed-up, a ratio of times, a growth, an amount of memory.

Rows are named by their place in the group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from . import words
from .results import Group, Outcome, Row
from .statistics import Quartiles, exponent


class Ask(ABC):
    """bound: what is asked for, at least or at most by `upward`."""

    bound: float
    upward = True

    @abstractmethod
    def value(self, group: Group) -> Quartiles | float | None:
        """What was measured; None where it could not be."""

    @abstractmethod
    def shown(self, value: float) -> str: ...

    @abstractmethod
    def words(self, group: Group) -> str:
        """What is asked, after "at least" and the bound."""

    def outcome(self, target: str, group: Group) -> Outcome:
        value = self.value(group)
        asked = f"{'at least' if self.upward else 'at most'} {self.shown(self.bound)} {self.words(group)}"
        if value is None:
            reasons = [f"{row.contender}: {row.note}" for row in group.rows if row.status != "measured" and row.note]
            return Outcome(target, asked, None, reasons[0] if reasons else "not known", False)
        middle = value.median if isinstance(value, Quartiles) else value
        text = self.shown(middle)
        if isinstance(value, Quartiles):
            text += f" ({self.shown(value.low)} to {self.shown(value.high)})"
        return Outcome(target, asked, middle, text, middle >= self.bound if self.upward else middle <= self.bound)


@dataclass(frozen=True)
class Share(Ask):
    """The rate as a part of the machine's limit."""

    bound: float
    row: int = 0

    def value(self, group: Group) -> Quartiles | None:
        return group.share(group.rows[self.row])

    def shown(self, value: float) -> str:
        return f"{100 * value:.1f} %"

    def words(self, group: Group) -> str:
        return f"of {group.rows[self.row].limit or 'the limit'}"


@dataclass(frozen=True)
class Faster(Ask):
    """How many times faster one row is than another, round by round."""

    bound: float
    row: int = 0
    over: int = 1

    def value(self, group: Group) -> Quartiles | None:
        return group.speedup(group.rows[self.row], group.rows[self.over])

    def shown(self, value: float) -> str:
        return f"{value:.2f}x"

    def words(self, group: Group) -> str:
        return f"the speed of {group.rows[self.over].contender}"


@dataclass(frozen=True)
class Longer(Ask):
    """The time of one row in units of another's."""

    bound: float
    of: str
    row: int = 0
    unit: int = 1
    upward = False

    def value(self, group: Group) -> Quartiles | None:
        return group.speedup(group.rows[self.unit], group.rows[self.row])

    def shown(self, value: float) -> str:
        return f"{value:.2f}x"

    def words(self, group: Group) -> str:
        return self.of


@dataclass(frozen=True)
class Growth(Ask):
    """The exponent of time in length, over rows that differ in length."""

    bound: float
    rows: tuple[int, ...]
    upward = False

    def value(self, group: Group) -> float | None:
        rows = [group.rows[place] for place in self.rows]
        seconds = [row.seconds for row in rows]
        medians = [found.median for found in seconds if found is not None]
        return exponent([row.case.length_k for row in rows], medians) if len(medians) == len(rows) else None

    def shown(self, value: float) -> str:
        return f"L^{value:.3f}"

    def words(self, group: Group) -> str:
        ends = group.rows[self.rows[0]].case, group.rows[self.rows[-1]].case
        return f"from L={words.length(ends[0].length_k)} to {words.length(ends[1].length_k)}"


@dataclass(frozen=True)
class Extra(Ask):
    """Peak memory above inputs and gradients, in units of the bytes of query, key, value and output."""

    bound: float
    row: int = 0
    upward = False

    def value(self, group: Group) -> float | None:
        return _extra(group.rows[self.row])

    def shown(self, value: float) -> str:
        return f"{value:.2f}x"

    def words(self, group: Group) -> str:
        return "the bytes of q, k, v and out"


def _extra(row: Row) -> float | None:
    return None if row.memory is None else row.memory.extra / row.case.bytes_in_and_out
