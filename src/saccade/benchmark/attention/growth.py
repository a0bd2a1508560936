"""Cases that differ in length alone make a series: how its time grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .results import BenchmarkReport, Measurement
from .statistics import exponent


@dataclass
class Series:
    """Rows of one contender by length, ascending."""

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
    found: dict[tuple[Any, ...], Series] = {}
    for row in report.rows:
        if row.seconds is None:
            continue
        case = {name: value for name, value in row.case.as_json().items() if not name.startswith("length")}
        # A decoding query stays short while its cache grows.
        queries = row.case.length_q if row.case.length_q != row.case.length_k else None
        key = (row.contender, queries, *case.values())
        rows = found.setdefault(key, Series(row.contender)).rows
        if all(other.case != row.case for other in rows):
            rows.append(row)
    long = [one for one in found.values() if len(one.rows) > 1]
    for one in long:
        one.rows.sort(key=lambda row: row.case.length_k)
    return long


def exponents(report: BenchmarkReport) -> list[dict[str, Any]]:
    """The fitted exponent of each series of three lengths or more, as the report keeps it: two always fit."""
    return [
        {
            "series": one.name,
            "time": one.exponent,
            "from": one.lengths[0],
            "to": one.lengths[-1],
        }
        for one in series(report)
        if len(set(one.lengths)) > 2
    ]
