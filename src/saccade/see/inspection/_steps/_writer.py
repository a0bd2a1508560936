"""The base of all writers of steps: numbers, labels, and their formatting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....support._numbers import short_number, without_zero
from ._parts import HeadNumbers


class StepWriter:
    """Writes steps of ``numbers``, with keys called ``names``. Abstract: a subclass writes some of the steps."""

    def __init__(self, numbers: HeadNumbers, names: Sequence[str], digits: int, query: str | None = None):
        self.numbers, self.inputs, self.names, self.digits = numbers, numbers.inputs, names, digits
        own = self.inputs.own
        self.name = query or ("the query" if own is None else names[own])

    def _changed(self, switch: str) -> str:
        """A sentence on how the largest weight changes without scale, mask or position, as ``switch`` names."""
        names = {
            "scale": "the scale",
            "mask": "it",
            "position": "it" if self.numbers.scores.unplaced is None else "them",
        }
        before, after = self.numbers.softmax.weights, self.numbers.scores.softmax((switch,)).weights
        if not np.isfinite(after).all():
            return f"Without {names[switch]} the weights are NaN."
        if np.abs(after - before).max() < 0.005:
            return f"Without {names[switch]} no weight of this row would change by a hundredth."
        old, new = int(before.argmax()), int(after.argmax())
        if old == new:
            return (
                f"Without {names[switch]} {self._key(old)} would get the weight {self._share(after[old])}, and not "
                f"{self._share(before[old])}."
            )
        return (
            f"Without {names[switch]} {self._key(new)} would get the largest weight, {self._share(after[new])}; as it "
            f"is, {self._key(old)} has {self._share(before[old])}."
        )

    def _share(self, weight: float) -> str:
        return without_zero(f"{weight:.3f}") if self.digits < 6 else f"{weight:.{self.digits}f}"

    def _key(self, j: int) -> str:
        return f"{self.names[j]} ({j})" if self.names.count(self.names[j]) > 1 else self.names[j]


def shape(values: np.ndarray) -> str:
    return str(values.shape)


def length(values: np.ndarray) -> float:
    return float(np.linalg.norm(values))


def weight_text(value: float) -> str:
    """The weight with two decimals and no leading zero."""
    return short_number(value) if value >= 0.005 else "less than .01"
