"""What a run measured, as values that go to JSON and come back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from ...support._plain_values import parsed_json, plain_values
from .cases import Case
from .statistics import Quartiles, paired_ratio, quartiles

DISTURBED = 0.1  # of the processors' time that other programs take


@dataclass(frozen=True)
class Measurement:
    """One contender on one case.

    status: "measured", "wrong" (then there is no speed), or "none" (it cannot, or was left out; the note says why).
    readings: seconds of one call, one a round; readings of one group belong together round by round.
    """

    case: Case
    contender: str
    status: str
    note: str = ""
    readings: tuple[float, ...] = ()
    limit: str | None = None  # name of one of the group's limits
    setup: float = 0.0  # seconds of compilation, where there is one
    error: float | None = None  # of what is allowed

    @cached_property
    def seconds(self) -> Quartiles | None:
        return quartiles(self.readings) if self.readings else None

    @property
    def rate(self) -> float | None:
        """FLOP/s, or B/s for decoding."""
        return None if self.seconds is None else self.case.amount / self.seconds.median

    @property
    def noisy(self) -> bool:
        return self.seconds is not None and self.seconds.noisy


@dataclass(frozen=True)
class LimitReadings:
    name: str
    unit: str
    readings: tuple[float, ...]


@dataclass(frozen=True)
class MeasurementGroup:
    """Rows that were measured in turns, and the limits measured between them.

    others: the share of the processors that other programs took meanwhile; None where that is not known.
    """

    title: str
    rows: tuple[Measurement, ...]
    limits: tuple[LimitReadings, ...] = ()
    others: float | None = None

    @property
    def disturbed(self) -> bool:
        """Whether other programs ran: a steady disturbance leaves no spread in the readings."""
        return self.others is not None and self.others > DISTURBED

    def limit(self, name: str) -> float | None:
        """The median of the limit whose name begins like this."""
        found = next((limit for limit in self.limits if limit.name.startswith(name)), None)
        return None if found is None else quartiles(found.readings).median

    def share(self, row: Measurement) -> Quartiles | None:
        """Quartiles of the row's rate as a part of its limit, round by round; None where either is not known."""
        limit = next((limit for limit in self.limits if limit.name == row.limit), None)
        if limit is None or not row.readings:
            return None
        return paired_ratio([row.case.amount / seconds for seconds in row.readings], limit.readings)

    def speedup(self, row: Measurement, over: Measurement) -> Quartiles | None:
        """How many times faster `row` is than `over`, round by round."""
        if not row.readings or not over.readings:
            return None
        return paired_ratio(over.readings, row.readings)


@dataclass
class BenchmarkReport:
    """A whole run."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    groups: list[MeasurementGroup] = field(default_factory=list)
    exponents: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows(self) -> list[Measurement]:
        return [row for group in self.groups for row in group.rows]

    def as_json(self) -> str:
        """JSON in which every reading stands, with six significant digits."""
        return json.dumps(plain_values(asdict(self), digits=6), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> BenchmarkReport:
        """The report that `as_json` wrote.

        Raises:
            ValueError: the text is no such report.
        """
        try:
            read = parsed_json(text)
            groups = [_group(entry) for entry in read["groups"]]
            return cls(read["machine"], read["settings"], groups, read["exponents"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a report of a benchmark: {error}") from None


def _group(read: dict[str, Any]) -> MeasurementGroup:
    limits = [LimitReadings(**{**entry, "readings": tuple(entry["readings"])}) for entry in read["limits"]]
    rows = tuple(_row(entry) for entry in read["rows"])
    return MeasurementGroup(read["title"], rows, tuple(limits), read.get("others"))


def _row(read: dict[str, Any]) -> Measurement:
    fields = {name: value for name, value in read.items() if name != "memory"}  # which 0.2 wrote
    return Measurement(**{**fields, "case": Case(**read["case"]), "readings": tuple(read["readings"])})
