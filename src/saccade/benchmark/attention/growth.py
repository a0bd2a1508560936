"""Series of cases that differ only in length, and the exponents of their times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .results import BenchmarkReport, Measurement
from .statistics import exponent


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
