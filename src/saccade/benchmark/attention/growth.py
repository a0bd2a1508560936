"""Cases that differ in length alone make a series: how its time and memory grow."""

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

    def points(self, what: str) -> tuple[list[int], list[float]]:
        """Lengths and seconds ("time") or bytes ("memory"), where there are any."""
        found = [(row.case.length_k, _amount(row, what)) for row in self.rows]
        known = [(length, amount) for length, amount in found if amount is not None and amount > 0]
        return [length for length, _ in known], [amount for _, amount in known]

    def exponent(self, what: str) -> float | None:
        lengths, amounts = self.points(what)
        return exponent(lengths, amounts) if len(set(lengths)) > 1 else None


def _amount(row: Measurement, what: str) -> float | None:
    if what == "memory":
        return None if row.memory is None else float(row.memory.extra)
    return None if row.seconds is None else row.seconds.median


def series(report: BenchmarkReport) -> list[Series]:
    """Series of at least two lengths, in the order of the report."""
    found: dict[tuple[Any, ...], Series] = {}
    for row in report.rows:
        if row.status != "measured":
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
            "time": one.exponent("time"),
            "memory": one.exponent("memory"),
            "from": one.rows[0].case.length_k,
            "to": one.rows[-1].case.length_k,
        }
        for one in series(report)
        if len({row.case.length_k for row in one.rows}) > 2
    ]
