"""What a comparison measured, as values that go to JSON and come back.

Every amount is of one call on the whole batch. Readings are seconds; those of one length and kind of call belong
together round by round, but for those that were noisy and read again.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from ...support._plain_values import parsed_json, plain_values
from ..attention.statistics import quartiles

CALLS = ("forward", "training", "decode")  # training: forward and backward
READING, LAYER = "reading", "layer"


@dataclass(frozen=True)
class ApproximationError:
    """How far an output is from exact attention's, in the L2 norm and relative to it."""

    whole: float  # over all rows together
    worst: float  # of the row that is furthest off


@dataclass(frozen=True)
class LengthResult:
    """One line at one length. None or nothing where it was not measured; `note` and `no_decode` say why."""

    length: int
    readings: dict[str, tuple[float, ...]] = field(default_factory=dict)  # by call
    memory: int | None = None  # bytes at the peak of training, above inputs and parameters
    kept: int | None = None  # bytes that decoding keeps of the past: a cache, or a state
    parameters: int = 0
    error: ApproximationError | None = None
    no_decode: str = ""
    note: str = ""

    def seconds(self, call: str) -> float | None:
        """The median of a call."""
        readings = self.readings.get(call)
        return quartiles(readings).median if readings else None

    @property
    def noisy(self) -> bool:
        """Whether the readings of any call differ much among themselves."""
        return any(quartiles(readings).noisy for readings in self.readings.values() if readings)


@dataclass(frozen=True)
class ContenderResults:
    """One thing that is compared, at every length.

    kind: "reading", of q, k and v that are given; or "layer", of tokens of width E.
    computes: "softmax" (exactly that, of the keys it looks at), "approximation" of it, or "other".
    whole: whether it is exact attention over all keys, which others are measured against.
    refused: why it takes no part; then it has no points.
    """

    name: str
    kind: str
    computes: str
    setting: str
    whole: bool = False
    points: tuple[LengthResult, ...] = ()
    refused: str = ""

    def at(self, length: int) -> LengthResult | None:
        return next((point for point in self.points if point.length == length), None)

    def amounts(self, what: str) -> tuple[list[int], list[float]]:
        """Lengths and amounts, where there are any: seconds of a call, or bytes of "memory"."""
        found = []
        for point in self.points:
            amount = point.memory if what == "memory" else point.seconds(what)
            if amount is not None and amount > 0:
                found.append((point.length, float(amount)))
        return [length for length, _ in found], [amount for _, amount in found]


@dataclass(frozen=True)
class GradientReach:
    """The gradient of the last output with respect to the input at each distance, relative to that at distance 1."""

    name: str
    layers: int  # how many stand on each other
    distances: tuple[int, ...]
    gradients: tuple[float, ...]
    note: str = ""

    def reach(self, share: float = 0.01) -> int:
        """The largest distance at which the gradient is at least this share of that at distance 1; 0: none."""
        return max((d for d, g in zip(self.distances, self.gradients, strict=True) if g >= share), default=0)


@dataclass
class VariantComparison:
    """A whole run.

    machine: as `benchmark.attention.machine.describe` tells it. settings: how it was measured.
    data: source, note, batch, heads, kv_heads, head, value_head, length, causal.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    data: dict[str, Any]
    lines: list[ContenderResults] = field(default_factory=list)
    paths: list[GradientReach] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        return sorted({point.length for line in self.lines for point in line.points})

    def of(self, kind: str) -> list[ContenderResults]:
        """The lines of a kind that were measured."""
        return [line for line in self.lines if line.kind == kind and line.points]

    def exact(self, kind: str) -> ContenderResults | None:
        """What the others of a kind are measured against."""
        return next((line for line in self.of(kind) if line.whole), None)

    def as_json(self) -> str:
        """JSON in which every reading stands, with six significant digits."""
        return json.dumps({"comparison": 1, **plain_values(asdict(self), digits=6)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> VariantComparison:
        """The comparison that `as_json` wrote.

        Raises:
            ValueError: the text is none.
        """
        try:
            read = parsed_json(text)
            lines = [_line(entry) for entry in read["lines"]]
            paths = [_path(entry) for entry in read["paths"]]
            return cls(read["machine"], read["settings"], read["data"], lines, paths)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a comparison of mechanisms: {error}") from None


def _line(read: dict[str, Any]) -> ContenderResults:
    return ContenderResults(**{**read, "points": tuple(_point(entry) for entry in read["points"])})


def _point(read: dict[str, Any]) -> LengthResult:
    readings = {call: tuple(seconds) for call, seconds in read["readings"].items()}
    error = (
        None
        if read["error"] is None
        else ApproximationError(*(_number(read["error"][name]) for name in ("whole", "worst")))
    )
    return LengthResult(**{**read, "readings": readings, "error": error})


def _path(read: dict[str, Any]) -> GradientReach:
    return GradientReach(
        **{**read, "distances": tuple(read["distances"]), "gradients": tuple(map(_number, read["gradients"]))}
    )


def _number(value: float | None) -> float:
    return math.inf if value is None else value
