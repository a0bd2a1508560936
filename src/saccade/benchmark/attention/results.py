"""Results of the benchmark, as values that are written to JSON and read back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from ...support._plain_values import parsed_json, plain_values
from .cases import Case
from .statistics import Quartiles, exponent, paired_ratio, quartiles

DISTURBED = 0.1  # share of processor time used by other programs


@dataclass(frozen=True)
class Measurement:
    """A contender's result on a case.

    status: "measured", "wrong" (without a speed), or "none" (not supported or skipped; the note gives the reason).
    readings: seconds of a call in each round; readings of a group are paired by round.
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
    """Rows that were timed alternately, and the limits measured between them.

    others: the share of the processors used by other programs; None if unknown.
    """

    title: str
    rows: tuple[Measurement, ...]
    limits: tuple[LimitReadings, ...] = ()
    others: float | None = None

    @property
    def disturbed(self) -> bool:
        """Whether other programs were running: a constant load leaves no spread in the readings."""
        return self.others is not None and self.others > DISTURBED

    def limit(self, name: str) -> float | None:
        """The median of the limit whose name begins with `name`."""
        limit = next((limit for limit in self.limits if limit.name.startswith(name)), None)
        return None if limit is None else quartiles(limit.readings).median

    def share(self, row: Measurement) -> Quartiles | None:
        """Quartiles of the row's rate relative to its limit, round by round; None if either is unknown."""
        limit = next((limit for limit in self.limits if limit.name == row.limit), None)
        if limit is None or not row.readings:
            return None
        return paired_ratio([row.case.amount / seconds for seconds in row.readings], limit.readings)

    def speedup(self, row: Measurement, over: Measurement) -> Quartiles | None:
        """The speed of `row` relative to that of `over`, for each round."""
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
        """JSON with every reading, with six significant digits."""
        return json.dumps(plain_values(asdict(self), digits=6), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> BenchmarkReport:
        """The report that `as_json` wrote.

        Raises:
            ValueError: the text is not a report.
        """
        try:
            read = parsed_json(text)
            groups = [_group(entry) for entry in read["groups"]]
            return cls(read["machine"], read["settings"], groups, read["exponents"])
        except KeyError as missing:
            raise ValueError(f"not a report of a benchmark: the key {missing} is missing") from None
        except TypeError:
            raise ValueError("not a report of a benchmark: other keys, or values of another type") from None


def _group(read: dict[str, Any]) -> MeasurementGroup:
    limits = [LimitReadings(**{**entry, "readings": tuple(entry["readings"])}) for entry in read["limits"]]
    rows = tuple(_row(entry) for entry in read["rows"])
    return MeasurementGroup(read["title"], rows, tuple(limits), read.get("others"))


def _row(read: dict[str, Any]) -> Measurement:
    fields = {name: value for name, value in read.items() if name != "memory"}  # which 0.2 wrote
    return Measurement(**{**fields, "case": Case(**read["case"]), "readings": tuple(read["readings"])})


@dataclass
class Series:
    """Rows of a contender in ascending order of length."""

    contender: str
    rows: list[Measurement] = field(default_factory=list)

    @property
    def name(self) -> str:
        words = [word for word in self.rows[0].case.label.split() if not word.startswith(("L=", "Lk="))]
        return " ".join([self.contender, *words])

    @property
    def lengths(self) -> list[int]:
        return [row.case.length_k for row in self.rows]

    @property
    def times(self) -> list[float]:
        return [row.seconds.median for row in self.rows if row.seconds]

    @property
    def exponent(self) -> float:
        return exponent(self.lengths, self.times)


def series(report: BenchmarkReport) -> list[Series]:
    """Series of at least two lengths, in the order of the report."""
    by_key: dict[tuple[Any, ...], Series] = {}
    for row in report.rows:
        if row.seconds is None:
            continue
        case = {name: value for name, value in row.case.as_json().items() if not name.startswith("length")}
        # A decoding query stays short while its cache grows.
        queries = row.case.length_q if row.case.length_q != row.case.length_k else None
        key = (row.contender, queries, *case.values())
        rows = by_key.setdefault(key, Series(row.contender)).rows
        if all(other.case != row.case for other in rows):
            rows.append(row)
    long = [curve for curve in by_key.values() if len(curve.rows) > 1]
    for curve in long:
        curve.rows.sort(key=lambda row: row.case.length_k)
    return long


def exponents(report: BenchmarkReport) -> list[dict[str, Any]]:
    """The fitted exponents of all series with at least three lengths; with two every fit is perfect."""
    return [
        {
            "series": curve.name,
            "time": curve.exponent,
            "from": curve.lengths[0],
            "to": curve.lengths[-1],
        }
        for curve in series(report)
        if len(set(curve.lengths)) > 2
    ]
