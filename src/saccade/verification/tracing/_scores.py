"""Products of rows of the inputs that may be attention scores, and the later values of each of their elements.

Shape legend: U units (one matrix of scores each: a head of a batch item), I / J rows of left and right, C width of
both, Dv width of what the weights multiply.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..findings._finding import Location
from ._shadow import UNKNOWN, agreed_along

Coordinate = Literal["left", "right", "unit", "several", "none"]
Source = Literal["by hand", "F.scaled_dot_product_attention"]


@dataclass(frozen=True, eq=False)
class SoftmaxedScores:
    """One softmax of scores. A target may compute several: for example, it uses one and returns another."""

    logits: Tensor  # (U, I, J)
    weights: Tensor
    axis: Coordinate
    line: Location | None


@dataclass(eq=False)
class ScoreProduct:
    """One product of two tensors whose rows are of the inputs."""

    first: int  # number of its first pair; they count on through (U, I, J)
    left: Tensor  # (U, I, C)
    right: Tensor  # (U, J, C)
    left_tokens: Tensor  # (U, I)
    right_tokens: Tensor  # (U, J)
    depth: int
    scaled: float = 1.0  # what left and right were multiplied by since they were projected
    learned: bool = False  # whether rows or scores were multiplied by a parameter
    mixed: bool = False  # whether a map made others of the scores of several heads
    joined: bool = False  # whether the softmax of each row ran over one number more, which is no score
    lines: dict[str, Location] = field(default_factory=dict)
    logits: Tensor | None = None  # (U, I, J)
    unshifted: Tensor | None = None  # (U, I, J) before something of each row was subtracted, its maximum say
    softmaxes: list[SoftmaxedScores] = field(default_factory=list)
    softened: Tensor | None = None  # (U, I, J) as they came out of the softmax
    zeroed: Tensor | None = None  # (U, I, J) True: multiplied by 0 before the softmax
    weights: Tensor | None = None  # (U, I, J) as they multiplied the values
    values: Tensor | None = None  # (U, I or J, Dv)
    normalised: Coordinate | None = None  # along which the softmax ran
    keys: Literal["left", "right"] | None = None  # whose rows the values belong to
    source: Source = "by hand"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(U, I, J)."""
        return self.left.shape[0], self.left.shape[1], self.right.shape[1]

    @property
    def count(self) -> int:
        units, rows, columns = self.shape
        return units * rows * columns

    @property
    def of_sequences(self) -> bool:
        """Whether each row on both sides is of one token: a product of queries and keys, not of channels."""
        return bool((self.left_tokens != UNKNOWN).all() and (self.right_tokens != UNKNOWN).all())

    def soften(self, logits: Tensor, weights: Tensor, axis: Coordinate, line: Location | None) -> None:
        """Record a softmax. If its input is the result of another softmax, the logits are those of the first
        softmax."""
        first = next((softmax for softmax in self.softmaxes if torch.equal(softmax.weights, logits)), None)
        own = SoftmaxedScores(logits if first is None else first.logits, weights, axis, line)
        self.softmaxes.append(own)
        if self.weights is None:
            self._take(own)

    def multiply(self, weights: Tensor) -> None:
        """Record the weights that multiply the values; they belong to the softmax with the most similar result."""
        self.weights = weights
        if self.softmaxes:
            self._take(
                min(
                    self.softmaxes,
                    key=lambda attention: (attention.weights - weights).abs().nan_to_num(0.0).sum().item(),
                )
            )

    def _take(self, scores: SoftmaxedScores) -> None:
        self.logits, self.softened, self.normalised = scores.logits, scores.weights, scores.axis
        if scores.line is not None:
            self.lines["softmax"] = scores.line

    def note(self, what: str, where: Location | None) -> None:
        """The line on which something was done to these scores or their weights."""
        if where is not None and what:
            self.lines[what] = where

    def times(self, factor: Tensor, pairs: Tensor, where: Location | None) -> None:
        """Scores multiplied by a tensor: which of them by 0."""
        zero = (factor.detach() == 0).broadcast_to(pairs.shape)
        if self.softmaxes or not bool(zero.any()):
            return
        zeroed = self.gathered(zero, pairs, False)
        self.zeroed = zeroed if self.zeroed is None else self.zeroed | zeroed
        self.note("zeroed", where)

    def gathered(self, tensor: Tensor, pairs: Tensor, missing: float) -> Tensor:
        """A tensor's elements at the places that `pairs` gives: (U, I, J)."""
        made = tensor.new_full((self.count,), missing)
        own = self._own(pairs)
        made[pairs[own] - self.first] = tensor.detach()[own]
        return made.reshape(self.shape)

    def along(self, pairs: Tensor, axis: int) -> Coordinate:
        """Which coordinate of the pairs differs along an axis."""
        _, rows, columns = self.shape
        own = self._own(pairs)
        local = (pairs - self.first).masked_fill(~own, UNKNOWN)
        parts = {
            "left": local.div(columns, rounding_mode="floor") % rows,
            "right": local % columns,
            "unit": local.div(rows * columns, rounding_mode="floor"),
        }
        known = own.all(axis, keepdim=True)
        differing = [
            name for name, part in parts.items() if ((part != part.select(axis, 0).unsqueeze(axis)) & known).any()
        ]
        if not differing:
            return "none"
        return differing[0] if len(differing) == 1 else "several"  # type: ignore[return-value]

    def split(self, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(unit, row, column) of pairs that are all of this product."""
        _, rows, columns = self.shape
        local = pairs - self.first
        return (
            local.div(rows * columns, rounding_mode="floor"),
            local.div(columns, rounding_mode="floor") % rows,
            local % columns,
        )

    def rows_weighted(self, pairs: Tensor, values: Tensor) -> Tensor:
        """(U, I or J, Dv) the rows that the weights multiply. pairs (*lead, rows, keys), values (*lead, Dv, keys)."""
        first = pairs[..., 0, :]
        own = self._own(first)
        unit, row, column = self.split(first[own])
        units, rows, columns = self.shape
        at, length = (row, rows) if self.keys == "left" else (column, columns)
        made = values.new_zeros(units, length, values.shape[-2])
        made[unit, at] = values.detach().transpose(-2, -1)[own]
        return made

    def query_tokens(self, pairs: Tensor, turned: bool) -> Tensor:
        """The token of the query of each pair, -1 for pairs of other products."""
        own = self._own(pairs)
        unit, row, column = self.split(pairs.masked_fill(~own, self.first))
        tokens = self.right_tokens[unit, column] if turned else self.left_tokens[unit, row]
        return tokens.masked_fill(~own, UNKNOWN)

    def _own(self, pairs: Tensor) -> Tensor:
        """Which pairs are of this product."""
        return (pairs >= self.first) & (pairs < self.first + self.count)


def rows_of(tokens: Tensor | None, shape: torch.Size) -> Tensor:
    """(U, rows): the token of each row of (*lead, rows, C), -1 if its elements belong to several tokens."""
    if tokens is None:
        return torch.full((shape[:-2].numel(), shape[-2]), UNKNOWN)
    return agreed_along(tokens, [-1], False).reshape(-1, shape[-2])
