"""The parts of `Steps`: a vector, a column of numbers by key, one step, and the computation of all numbers.

Shape legend: L keys, D key width, Dv value width, E model width, Hq query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ._inputs import HeadInputs, Surroundings, numbers
from ._scores import Scores, SoftmaxStep

_BLOCK = 4096  # rows


@dataclass(frozen=True, eq=False)
class Vector:
    """A vector of one step. ``kind`` gives its colour: "query", "key", "value" or "" for the rest."""

    name: str
    values: np.ndarray
    kind: str = ""


@dataclass(frozen=True, eq=False)
class Column:
    """One number for each key, (L,)."""

    name: str
    values: np.ndarray


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a head: its formula with shapes, sentences about it, and its numbers.

    Attributes:
        id: "token", "norm", "project", "position", "dot", "scale", "mask", "softmax", "sum", "concat", "output", ...
        formula: in plain text; ``x_j`` is x with the index j.
        shapes: of the names in the formula.
        says: one or two sentences about what the step does.
        without: what would happen without the step, with this head's numbers if they are known.
        switch: the name in ``without=`` that leaves the step out; "" if none does.
        vectors, columns: the numbers; keys are ordered by the last column.
        facts: single numbers by name.

    Example:
        >>> from saccade.inspection import example
        >>> step = example()["softmax"]
        >>> step.formula
        'w_j = exp(s_j − m) / Σ_j exp(s_j − m),  m = max s'
        >>> step.columns[-1].values.round(3)
        array([0.67, 0.33])
    """

    id: str
    name: str
    formula: str
    shapes: str
    says: str
    without: str = ""
    switch: str = ""
    vectors: tuple[Vector, ...] = ()
    columns: tuple[Column, ...] = ()
    facts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, eq=False)
class HeadNumbers:
    """Every number of one row of one head, recomputed in float64 from the block's input and parameters.

    Numbers of unknown modules (such as the projections) are None; the numbers after them come from the observed call.
    """

    inputs: HeadInputs

    @cached_property
    def stream(self) -> np.ndarray | None:
        """(E,) the block's input."""
        around = self.inputs.around
        return None if around is None else numbers(around.stream[self.inputs.row])

    @cached_property
    def normed(self) -> np.ndarray | None:
        """(E,) the input of the projections."""
        around, row = self.inputs.around, self.inputs.row
        return None if around is None else _read(around, slice(row, row + 1))[0]

    @cached_property
    def projected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """q (D,), k (L, D) and v (L, Dv) after the projections."""
        around = self.inputs.around
        if around is None or self.normed is None:
            return None
        # In blocks of rows: the vectors of all tokens of a long text in float64 would be gigabytes.
        keys, values = [], []
        for start in range(0, len(self.inputs.key), _BLOCK):
            rows = slice(start, start + _BLOCK)
            block = _read(around, rows) if around.context is None else numbers(around.context[rows])
            keys.append(around.key(block))
            values.append(around.value(block))
        return around.query(self.normed), np.concatenate(keys), np.concatenate(values)

    @cached_property
    def head_normed(self) -> tuple[np.ndarray, np.ndarray] | None:
        """q and k after the norm of each head, if there is one."""
        around = self.inputs.around
        if around is None or self.projected is None:
            return None
        query, key, _ = self.projected
        return (
            query if around.query_norm is None else around.query_norm(query),
            key if around.key_norm is None else around.key_norm(key),
        )

    @cached_property
    def placed(self) -> tuple[np.ndarray, np.ndarray]:
        """q (D,) and k (L, D) of the product: rotated to their positions if the model has rotary positions."""
        around = self.inputs.around
        if around is None or self.head_normed is None:
            return self.inputs.query, self.inputs.key
        query, key = self.head_normed
        if around.rotation is None:
            return query, key
        return around.rotation(query, self.inputs.row), around.rotation(key)

    @cached_property
    def value(self) -> np.ndarray | None:
        """(L, Dv) the values, after their norm if there is one."""
        around = self.inputs.around
        if around is None or self.projected is None:
            return self.inputs.value
        return self.projected[2] if around.value_norm is None else around.value_norm(self.projected[2])

    @property
    def unplaced(self) -> tuple[np.ndarray, np.ndarray] | None:
        """q and k before rotation; None without rotary positions."""
        around = self.inputs.around
        return None if around is None or around.rotation is None else self.head_normed

    @cached_property
    def scores(self) -> Scores:
        inputs, (query, key), before = self.inputs, self.placed, self.unplaced
        return Scores(
            products=key @ query,
            unplaced=None if before is None else before[1] @ before[0],
            scale=inputs.scale,
            softcap=inputs.softcap,
            bias=inputs.bias,
            bias_of_positions=inputs.bias_of_positions,
            visible=inputs.visible,
            sink=inputs.sink,
            dtype=inputs.dtype,
        )

    @cached_property
    def softmax(self) -> SoftmaxStep:
        return self.scores.softmax()

    def mixed(self, weights: np.ndarray) -> np.ndarray | None:
        """(Dv,) the weighted sum of values."""
        return None if self.value is None else weights @ self.value

    @cached_property
    def joined(self) -> np.ndarray | None:
        """(Hq Dv,): this head's output, concatenated with the other heads' outputs in the model."""
        out = self.mixed(self.softmax.weights)
        if out is None or self.inputs.outputs is None:
            return None
        heads = self.inputs.outputs.copy()
        heads[self.inputs.head] = out
        return heads.reshape(-1)

    @cached_property
    def gated(self) -> np.ndarray | None:
        """(Hq Dv,): the same, each number times sigmoid(x W_g) if the model has such a gate."""
        around, joined = self.inputs.around, self.joined
        if around is None or around.gate is None or joined is None or self.normed is None:
            return joined
        return joined / (1 + np.exp(-around.gate(self.normed)))

    @cached_property
    def written(self) -> np.ndarray | None:
        """(E,) the output of attention, which is added to the residual stream."""
        around = self.inputs.around
        return None if around is None or self.gated is None else around.output(self.gated)

    @cached_property
    def added(self) -> np.ndarray | None:
        """(E,) the output of attention as it is added: after its norm and times its factor."""
        around = self.inputs.around
        if around is None or self.written is None:
            return None
        return around.factor * (self.written if around.after is None else around.after(self.written))

    @cached_property
    def result(self) -> np.ndarray | None:
        """(E,) the residual stream after attention."""
        around = self.inputs.around
        if around is None or self.added is None or self.stream is None or not around.adds:
            return None
        total = self.stream + self.added
        if around.placement == "post":
            return None if around.norm is None else around.norm(total)
        return total

    def differences(self) -> dict[str, float]:
        """The largest difference between these numbers and the model's, by name, relative to the largest number."""
        inputs, around = self.inputs, self.inputs.around
        query, key = self.placed
        pairs = {"weights": (self.softmax.weights, inputs.weights)}
        if around is not None:
            pairs |= {"query": (query, inputs.query), "key": (key, inputs.key)}
            pairs["output"] = (self.written, around.written)  # type: ignore[assignment]
        mixed = self.mixed(self.softmax.weights)
        if mixed is not None and inputs.outputs is not None:
            pairs["head"] = (mixed, inputs.outputs[inputs.head])
        return {
            name: float(np.abs(ours - theirs).max() / max(1.0, np.abs(theirs).max()))
            for name, (ours, theirs) in pairs.items()
        }


def _read(around: Surroundings, rows: slice) -> np.ndarray:
    """The input of the query projection in these rows: normed if the norm comes first."""
    if around.placement in ("post", "bare"):
        return numbers(around.stream[rows])
    return numbers(around.read[rows]) if around.norm is None else around.norm(numbers(around.stream[rows]))
