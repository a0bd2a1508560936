"""The input of the rules: a few numbers for each head of one attention call.

Shape legend: B items, Hq / Hkv query and key-value heads, Lq / Lk lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...operator._statistics import Statistics, StepNumbers, together
from ._record import CallRecord, CallSite

Numbers = tuple[float, ...]  # one for each query head

_WHAT = ("query", "key", "value", "logits")
_AVERAGED = ("keys", "evenness", "sharp", "first", "absent", "steady")


@dataclass(frozen=True)
class NonFiniteEntry:
    """The first entry of a call that is NaN or infinite."""

    what: str  # "query", "key", "value", "logits" or "out"
    head: int  # query head, or the key-value head for keys and values
    share: float  # of that head's entries
    item: int | None = None
    at: tuple[int, int] | None = None  # (row or key, channel), for logits (row, key)


@dataclass(frozen=True)
class CallReading:
    """Numbers of one call by query head; averages are over the rows that see at least `Thresholds.keys` keys.

    Attributes:
        rows: the number of these rows. keys: the number of keys they see.
        evenness: entropy divided by its maximum.
        sharp: share of rows whose largest weight is at least `Thresholds.sharp`.
        first: weight on the first key. absent: weight on the learned sink, that is on no key.
        steady: weight on the key that is the largest in most rows, from those rows. steady_at: that key, -1 where
            joined readings differ.
        logit: the largest logit. span: the difference between the largest and the least.
        out, query, key, value: mean L2 norms.
        broken: the first entry that is not finite.
    """

    rows: Numbers
    keys: Numbers
    evenness: Numbers
    sharp: Numbers
    first: Numbers
    absent: Numbers
    steady: Numbers
    steady_at: Numbers
    logit: Numbers
    span: Numbers
    out: Numbers
    query: Numbers
    key: Numbers
    value: Numbers
    broken: NonFiniteEntry | None = None

    @property
    def heads(self) -> int:
        return len(self.rows)

    def only(self, rows: int) -> CallReading:
        """The same with NaN for heads with fewer rows: each head may have its own mask."""
        few = [count < rows for count in self.rows]
        if not any(few):
            return self
        numbers = {field.name: getattr(self, field.name) for field in fields(self)[1:-1]}
        kept: dict[str, Any] = {
            n: tuple(math.nan if no else x for no, x in zip(few, row, strict=True)) for n, row in numbers.items()
        }
        return replace(self, **kept)


def reading_of(record: CallRecord, keys: int, sharp: float) -> CallReading:
    """The numbers of one call, copied from the device in one transfer.

    Args:
        keys: rows that see fewer keys are left out: a single key always has all the weight.
        sharp: the largest weight from which a row counts as sharp.
    """
    measured = record.statistics
    values = _numbers(measured, record.out_norm, keys, sharp, (0, 2)).tolist()
    by_name: dict[str, Any] = {name: tuple(row) for name, row in zip(_names(), values, strict=True)}
    return CallReading(**by_name, broken=_broken(measured, record.out_norm))


def _names() -> list[str]:
    return [field.name for field in fields(CallReading)][:-1]


class StepRecord(NamedTuple):
    """A call whose numbers are read together with those of other steps."""

    site: CallSite
    step: int
    numbers: StepNumbers

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def path(self) -> str:
        return self.site.path

    @property
    def layer(self) -> int:
        return self.site.layer


class StepRecords(NamedTuple):
    """Calls at one site and the statistics of all, as `together` gives them."""

    places: list[int]  # among all calls
    records: list[StepRecord]
    measured: Statistics
    out_norm: Tensor  # (Hq, n)

    def readings(self, keys: int, sharp: float) -> np.ndarray:
        """The numbers of each call: (fields of `CallReading`, Hq, n)."""
        return _numbers(self.measured, self.out_norm, keys, sharp, (0,)).numpy()


def steps_together(records: Sequence[StepRecord]) -> list[StepRecords]:
    """The calls of each site that are alike, in the order of the first."""
    found: dict[object, list[int]] = {}
    for place, record in enumerate(records):
        found.setdefault((record.name, record.numbers.alike()), []).append(place)
    parts = ((places, [records[place] for place in places]) for places in found.values())
    return [StepRecords(places, part, *together([record.numbers for record in part])) for places, part in parts]


def joined_steps(numbers: np.ndarray) -> CallReading:
    """The reading that `joined` gives for the numbers (fields, Hq, n) of many."""
    by_name = dict(zip(_names(), numbers, strict=True))
    rows, at = by_name["rows"], by_name["steady_at"]
    held = {name: table.max(1) for name, table in by_name.items()}
    held |= {name: (by_name[name] * rows).sum(1) / rows.sum(1).clip(1) for name in _AVERAGED}
    same = (at == at[:, :1]).all(1)
    held |= {"rows": rows.sum(1), "steady_at": np.where(same, at[:, 0], -1.0)}
    held["steady"] = np.where(same, held["steady"], 0.0)
    values: dict[str, Any] = {name: tuple(table.tolist()) for name, table in held.items()}
    return CallReading(**values)


def _numbers(measured: Statistics, out_norm: Tensor, keys: int, sharp: float, axes: tuple[int, ...]) -> Tensor:
    """The fields of `CallReading` from rows (B, Hq, Lq) over these axes: (fields, Hq) or (fields, Hq, Lq)."""
    judged = measured.counted & (measured.keys_seen >= keys)
    rows = judged.sum(axes)

    def mean(values: Tensor) -> Tensor:
        return torch.where(judged, values, 0.0).sum(axes) / rows.clamp(min=1)

    steady, steady_at = _steady(measured, judged, axes)
    logits = measured.heads["logits"]
    numbers = {
        "rows": rows,
        "keys": mean(measured.keys_seen.to(measured.entropy.dtype)),
        "evenness": mean(measured.evenness),
        "sharp": mean((measured.largest >= sharp).to(measured.largest.dtype)),
        "first": mean(measured.mass["first"]),
        "absent": mean(measured.mass["sink"]),
        "steady": steady / rows.clamp(min=1),
        "steady_at": steady_at,
        "logit": logits["max"],
        "span": logits["max"] - logits["min"],
        "out": out_norm,
        **{what: _norm(measured, what) for what in ("query", "key", "value")},
    }
    return torch.stack([value.double() for value in numbers.values()])


def _steady(statistics: Statistics, judged: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """For each head the key that is the largest in most judged rows, and those rows' sum of weights on it."""

    def rows(values: Tensor) -> Tensor:
        """(Hq, rows), or (Hq, Lq, items)."""
        return values.transpose(0, 1).flatten(1) if len(axes) > 1 else values.permute(1, 2, 0)

    at, judged, weights = rows(statistics.largest_at.clamp(min=0)), rows(judged), rows(statistics.largest)
    if len(axes) > 1:
        votes = weights.new_zeros(len(at), max(statistics.shape[3], 1))
        most = votes.scatter_add_(-1, at, judged.to(votes.dtype)).argmax(-1)
    else:  # among the few items' keys: not a number for each key and call; of equals the first key, as argmax
        votes = ((at[..., None] == at[..., None, :]) & judged[..., None, :]).sum(-1)
        most = torch.where(votes == votes.amax(-1, keepdim=True), at, statistics.shape[3]).amin(-1)
        most = torch.where(judged.any(-1), most, 0)
    return torch.where(judged & (at == most[..., None]), weights, 0.0).sum(-1), most


def _norm(statistics: Statistics, what: str) -> Tensor:
    """(Hq,) norms, NaN if they were not measured."""
    heads, held = statistics.shape[1], statistics.heads.get(what)
    if held is None:
        return torch.full_like(statistics.heads["logits"]["max"], torch.nan)
    norm = held["norm"]
    return norm.repeat_interleave(heads // norm.shape[0], 0)


def _broken(statistics: Statistics, out: Tensor) -> NonFiniteEntry | None:
    """The first of query, key, value, logits, out with such an entry, and in it the head with the lowest number."""
    measured = [what for what in _WHAT if what in statistics.heads]
    shares = torch.cat([statistics.heads[what]["nonfinite"] for what in measured]).tolist()
    for what in measured:
        held = statistics.heads[what]["nonfinite_at"]
        own, shares = shares[: held.shape[0]], shares[held.shape[0] :]
        # Not "share > 0": one of 2^31 entries is a share of 0 in float32.
        head = next((head for head, share in enumerate(own) if share != 0), None)
        if head is not None:
            item, _, row, column = held[head].tolist()
            return NonFiniteEntry(what, head, own[head], item, (row, column))
    # Without a counted row there is no mean norm, which is not an error.
    bad = (~out.isfinite() & statistics.counted.any(2).any(0)).tolist()
    return NonFiniteEntry("out", bad.index(True), math.nan) if any(bad) else None


def joined(readings: Sequence[CallReading]) -> CallReading:
    """Several readings of one call site as one: averages are weighted by rows, the others are extremes."""
    whole = readings[0]
    for other in readings[1:]:
        whole = _two(whole, other)
    return whole


def _two(a: CallReading, b: CallReading) -> CallReading:
    def by_rows(x: Numbers, y: Numbers) -> Numbers:
        weighted = zip(x, a.rows, y, b.rows, strict=True)
        return tuple((p * m + q * n) / max(m + n, 1) for p, m, q, n in weighted)

    def highest(x: Numbers, y: Numbers) -> Numbers:
        return tuple(max(p, q) for p, q in zip(x, y, strict=True))

    changed = {field.name: highest(getattr(a, field.name), getattr(b, field.name)) for field in fields(a)[:-1]}
    changed |= {name: by_rows(getattr(a, name), getattr(b, name)) for name in _AVERAGED}
    changed["rows"] = tuple(m + n for m, n in zip(a.rows, b.rows, strict=True))
    same = [p == q for p, q in zip(a.steady_at, b.steady_at, strict=True)]
    changed["steady_at"] = tuple(p if agree else -1.0 for p, agree in zip(a.steady_at, same, strict=True))
    # Two rows are "always the same key" only within one reading: with two keys each this happens by chance.
    changed["steady"] = tuple(p if agree else 0.0 for p, agree in zip(changed["steady"], same, strict=True))
    return CallReading(**changed, broken=a.broken or b.broken)
