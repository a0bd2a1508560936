"""The result of `patching`: reading, printing, storing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...support._numbers import compact, short_number
from ...support._plain_values import plain_values
from ._heads import Head, HeadValues, by_sign, table_of

TOP = 10
SIDES = "towards", "away"


class Receiver(NamedTuple):
    """Heads of one call, and which of their inputs receives the patch: "query", "key" or "value"."""

    call: str
    heads: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        heads = f"head{'s' * (len(self.heads) > 1)} {', '.join(map(str, self.heads))}"
        return f"{self.what} of {heads} of {self.call or 'the model'}"


class Agreement(NamedTuple):
    """How well the effects by gradient agree with the exact ones, over the heads that both have.

    Attributes:
        pearson: correlation of the effects. spearman: of their ranks. NaN where all heads have the same effect.
        top: how many heads count as the top ones: a quarter of all, at most 10.
        common: how many of the top heads, by absolute effect, are the same.

    Example:
        >>> from saccade.attribution import Agreement
        >>> print(Agreement(pearson=0.93, spearman=0.9, top=8, common=7))
        correlation .93, of ranks .90, 7 of the top 8 heads in common
    """

    pearson: float
    spearman: float
    top: int
    common: int

    def __str__(self) -> str:
        return (
            f"correlation {short_number(self.pearson)}, of ranks {short_number(self.spearman)}, "
            f"{self.common} of the top {self.top} heads in common"
        )


@dataclass(frozen=True, eq=False)
class Patching:
    """The effect of each head on a metric. `saccade.patching` makes it; printed, it is a table.

    An effect of 0 leaves the metric of the base run (corrupted, with "noising" clean), 1 gives that of the other.

    Attributes:
        exact, gradient: effects by each way; None if it was not requested. NaN: not measured.
        clean, corrupted: the metric of the two inputs.
        what, direction, positions: the arguments.
        through: the receivers of path patching, by call name.
        unobserved: attention calls that could not be reached, with the reason.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4))
        >>> model, clean, corrupted = saccade.nn.Encoder(config, layers=2), torch.randn(1, 5, 16), torch.randn(1, 5, 16)
        >>> found = saccade.patching(model, clean, corrupted, lambda out: out[0, -1, 0])
        >>> found.what, found.direction, found.effects.grid().shape
        ('output', 'denoising', torch.Size([2, 4]))
    """

    exact: HeadValues | None
    gradient: HeadValues | None
    clean: float
    corrupted: float
    what: str
    direction: str
    positions: tuple[int, ...] | None = None
    through: tuple[Receiver, ...] = ()
    unobserved: Mapping[str, str] = field(default_factory=dict)

    @property
    def effects(self) -> HeadValues:
        """The exact effects if they were measured, otherwise those by gradient."""
        effects = self.gradient if self.exact is None else self.exact
        assert effects is not None
        return effects

    @property
    def agreement(self) -> Agreement | None:
        """The agreement of the exact effects and those by gradient; None if only one was measured."""
        if self.exact is None or self.gradient is None:
            return None
        both = ~(self.exact.values.isnan() | self.gradient.values.isnan())
        return _agreement(self.exact.values[both], self.gradient.values[both])

    def metrics(self, by: str = "exact") -> HeadValues:
        """The metric with each head patched, in its own units. ValueError if `by` was not measured."""
        effects = {"exact": self.exact, "gradient": self.gradient}.get(by)
        if effects is None:
            raise ValueError(f"by: it was not measured, got {by!r}")
        base, other = self._ends
        return HeadValues(effects.calls, base + effects.values * (other - base))

    @property
    def _ends(self) -> tuple[float, float]:
        ends = self.corrupted, self.clean
        return ends if self.direction == "denoising" else ends[::-1]

    def ranked(self) -> list[tuple[Head, float]]:
        """The measured heads with their `effects`, the largest absolute value first."""
        return self.effects.ranked()

    def table(self) -> list[dict[str, Any]]:
        """A row for each head: "call", "layer", "head", and "exact" and "gradient" if they were measured."""
        return table_of(self.effects.calls, exact=self.exact, gradient=self.gradient)

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        agreement = self.agreement
        return plain_values(
            {
                "what": self.what,
                "direction": self.direction,
                "positions": self.positions,
                "through": [receiver._asdict() for receiver in self.through],
                "metric": {"clean": self.clean, "corrupted": self.corrupted},
                "heads": self.table(),
                "agreement": None if agreement is None else agreement._asdict(),
                "unobserved": dict(self.unobserved),
            }
        )

    def __str__(self) -> str:
        base, other = ("corrupted", "clean") if self.direction == "denoising" else ("clean", "corrupted")
        by = "exactly" if self.exact is not None else "by gradient"
        lines = [
            f"{self.what} of each head of the {base} run from the {other} one, {by}: "
            f"0 is {base} ({compact(self._ends[0])}), 1 is {other} ({compact(self._ends[1])})",
            *(f"only through {receiver}" for receiver in self.through),
            "",
            self.effects.text(),
            "",
            *(
                f"{what}: {self._listed(some[:5])}"
                for what, some in zip(SIDES, by_sign(self.ranked()), strict=True)
                if some
            ),
        ]
        if self.agreement is not None:
            lines.append(f"by gradient: {self.agreement}")
        return "\n".join([*lines, *(f"not reached: {name}: {why}" for name, why in self.unobserved.items())])

    def _listed(self, heads: Sequence[tuple[Head, float]]) -> str:
        return ", ".join(f"{self.effects.named(head)} {compact(effect)}" for head, effect in heads)

    def __repr__(self) -> str:
        ends = f"{self.corrupted:.4g} to {self.clean:.4g}"
        return f"<Patching of the {self.what} of {len(self.effects.heads)} heads, {self.direction}, {ends}>"


def _agreement(exact: Tensor, gradient: Tensor) -> Agreement:
    top = min(TOP, math.ceil(len(exact) / 4))
    most = [set(effects.abs().argsort(descending=True, stable=True)[:top].tolist()) for effects in (exact, gradient)]
    return Agreement(_pearson(exact, gradient), _pearson(_ranks(exact), _ranks(gradient)), top, len(most[0] & most[1]))


def _pearson(tensor: Tensor, other: Tensor) -> float:
    if len(tensor) < 2:
        return math.nan
    tensor, other = tensor - tensor.mean(), other - other.mean()
    size = float(tensor.norm() * other.norm())
    return float(tensor @ other) / size if size else math.nan


def _ranks(values: Tensor) -> Tensor:
    """Ranks; equal values share the mean of theirs."""
    _, group, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[group]
