"""Results of a comparison, as values that are written to JSON and read back.

All amounts are of one call for the whole batch. Readings are seconds; for a length and a kind of call they are paired
by round, except for repeated noisy ones.
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
    """Error of an output in the L2 norm, relative to exact attention."""

    whole: float  # over all rows together
    worst: float  # of the row with the largest error


@dataclass(frozen=True)
class LengthResult:
    """A contender's result at one length. Missing values are None or empty; `note` and `no_decode` give reasons."""

    length: int
    readings: dict[str, tuple[float, ...]] = field(default_factory=dict)  # by call
    memory: int | None = None  # bytes at the peak of training, beyond inputs and parameters
    kept: int | None = None  # bytes of the decoding cache or state
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
        """Whether the readings of any call are noisy."""
        return any(quartiles(readings).noisy for readings in self.readings.values() if readings)


@dataclass(frozen=True)
class ContenderResults:
    """The results of a contender at all lengths.

    kind: "reading", of given q, k and v; or "layer", of tokens of width E. computes: "softmax" (exactly, over its
    visible keys), "approximation" of it, or "other". whole: whether it is exact attention over all keys, the baseline.
    refused: why it was not measured; then there are no points.
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
        """Lengths with an amount, and the amounts: seconds of a call, or bytes of "memory"."""
        entries = []
        for point in self.points:
            amount = point.memory if what == "memory" else point.seconds(what)
            if amount is not None and amount > 0:
                entries.append((point.length, float(amount)))
        return [length for length, _ in entries], [amount for _, amount in entries]


@dataclass(frozen=True)
class GradientReach:
    """The gradient of the last output with respect to the input at each distance, relative to that at distance 1."""

    name: str
    layers: int  # number of stacked layers
    distances: tuple[int, ...]
    gradients: tuple[float, ...]
    note: str = ""

    def reach(self, share: float = 0.01) -> int:
        """The largest distance at which the gradient is at least this share of that at distance 1; 0: none."""
        return max((d for d, g in zip(self.distances, self.gradients, strict=True) if g >= share), default=0)


@dataclass
class VariantComparison:
    """The result of a whole comparison.

    machine: from `benchmark.attention.machine.describe`. settings: of the comparison. data: source, note, batch, heads,
    kv_heads, head, value_head, length, causal.
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
        """The measured results of a kind."""
        return [line for line in self.lines if line.kind == kind and line.points]

    def exact(self, kind: str) -> ContenderResults | None:
        """The baseline of a kind: exact attention."""
        return next((line for line in self.of(kind) if line.whole), None)

    def as_json(self) -> str:
        """JSON with every reading, with six significant digits."""
        return json.dumps({"comparison": 1, **plain_values(asdict(self), digits=6)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> VariantComparison:
        """The comparison that `as_json` wrote.

        Raises:
            ValueError: the text is not a comparison.
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
