"""The result of `head_importance`: reading, printing, storing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...support._numbers import compact, counted
from ...support._plain_values import plain_values
from ._heads import Head, HeadValues, table_of


class Removal(NamedTuple):
    """One step of greedy removal.

    Attributes:
        head: the head that is removed.
        loss: mean over batches, without it and the heads removed before.
        rise: that loss less the loss of the whole model.
        low, high: the 95 % interval of the rise over batches; None for one batch.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=2))
        >>> model, x = saccade.nn.Encoder(config, layers=1), torch.randn(3, 2, 5, 16)
        >>> found = saccade.head_importance(model, x, lambda model, x: model(x).square().mean(), by="greedy", keep=1)
        >>> step = found.removed[0]
        >>> step.head.layer, step.low <= step.rise <= step.high
        (0, True)
    """

    head: Head
    loss: float
    rise: float
    low: float | None
    high: float | None


@dataclass(frozen=True, eq=False)
class HeadImportance:
    """How much a model's loss depends on each head. `saccade.head_importance` returns it; printed, it is a table.

    Attributes:
        by: "gradient", "ablation" or "greedy".
        values: mean over batches, for each head: the absolute derivative; the rise of the loss without the head; for
            "greedy" that rise in the last round that tried the head.
        low, high: the 95 % interval of the mean over batches, or over all numbers of their losses (Student's);
            None for a single number.
        signed: for "gradient", the mean of the signed derivatives: above 0, the loss falls without the head.
        signed_low, signed_high: its 95 % interval.
        loss: of the whole model, mean over batches.
        batches: their number.
        removed: for "greedy", the heads in the order in which they were removed.
        unobserved: attention calls that could not be reached, with the reason.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4))
        >>> model = saccade.nn.Encoder(config, layers=2)
        >>> found = saccade.head_importance(model, torch.randn(3, 2, 5, 16), lambda model, x: model(x).square().mean())
        >>> found.by, found.batches, found.values.grid().shape
        ('gradient', 3, torch.Size([2, 4]))
    """

    by: str
    values: HeadValues
    low: HeadValues | None
    high: HeadValues | None
    loss: float
    batches: int
    signed: HeadValues | None = None
    removed: tuple[Removal, ...] = ()
    unobserved: Mapping[str, str] = field(default_factory=dict)
    signed_low: HeadValues | None = None
    signed_high: HeadValues | None = None

    @property
    def heads(self) -> tuple[Head, ...]:
        """All measured heads, call by call."""
        return self.values.heads

    def ranked(self) -> list[tuple[Head, float]]:
        """The heads with their values, the most important first; heads that greedy removal removed come last.

        NaN: heads that greedy removal never tried, as all of their call stay.
        """
        gone = {step.head: place for place, step in enumerate(self.removed)}
        number = dict(zip(self.heads, self.values.values.tolist(), strict=True))
        order = sorted(self.heads, key=lambda head: (head in gone, -gone.get(head, 0), -number[head]))
        return [(head, number[head]) for head in order]

    def costs(self) -> dict[str, Tensor]:
        """(H,) for each call: the cost of removing each head, to be added up: `values`; for "greedy" the place in the
        order, since rises of different rounds do not compare."""
        if self.by != "greedy":
            return self.values.by_call()
        place = {head: float(number) for number, (head, _) in enumerate(reversed(self.ranked()))}
        return HeadValues(self.values.calls, torch.tensor([place[head] for head in self.heads])).by_call()

    def least(self, keep: float = 0.5) -> dict[str, list[int]]:
        """The least important heads by call name, as `saccade.intervention.Ablate` takes them.

        One head of each call stays, whatever its value. For `saccade.prune`, which removes heads that share keys
        together, use `saccade.pruning.choose_heads`.

        Args:
            keep: the number of heads that stay, or their share of all (a float).

        Raises:
            ValueError: a share outside (0, 1], a number above that of the heads, or below that of the calls.
        """
        calls = self.values.calls
        stay = kept_count(keep, len(self.heads))
        if stay < len(calls):
            raise ValueError(f"keep: {counted(stay, 'head')} for {len(calls)} calls, and one of each must stay")
        left = {call.name: call.heads for call in calls}
        chosen: dict[str, list[int]] = {}
        spare = len(self.heads) - stay
        for head, _ in reversed(self.ranked()):
            if spare and left[head.call] > 1:
                chosen.setdefault(head.call, []).append(head.head)
                left[head.call] -= 1
                spare -= 1
        return {name: sorted(heads) for name, heads in chosen.items()}

    def table(self) -> list[dict[str, Any]]:
        """A row for each head: "call", "layer", "head", "value", and the other values that were measured."""
        names = "low", "high", "signed", "signed_low", "signed_high"
        return table_of(self.values.calls, value=self.values, **{name: getattr(self, name) for name in names})

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        steps = [{**step._asdict(), **step.head._asdict()} for step in self.removed]
        return plain_values(
            {
                "by": self.by,
                "loss": self.loss,
                "batches": self.batches,
                "heads": self.table(),
                "removed": steps,
                "unobserved": dict(self.unobserved),
            }
        )

    def __str__(self) -> str:
        what = {
            "gradient": "size of the derivative of the loss by a factor on each head",
            "ablation": "rise of the loss without each head",
            "greedy": "rise of the loss without each head, in the last round that tried it",
        }[self.by]
        lines = [f"{what}; {counted(self.batches, 'batch', 'batches')}, loss {compact(self.loss)}"]
        lines += ["", self.values.text(), ""]
        if self.removed:
            steps = ", ".join(f"{self.values.named(step.head)} ({compact(step.loss)})" for step in self.removed)
            lines.append(f"removed, with the loss after each: {steps}")
        else:
            tried = [pair for pair in self.ranked() if not math.isnan(pair[1])]
            top = ", ".join(f"{self.values.named(head)} {self._with_interval(head, x)}" for head, x in tried[:5])
            lines.append(f"most: {top}" if top else "no head was tried: all stay")
        return "\n".join([*lines, *(f"not reached: {name}: {why}" for name, why in self.unobserved.items())])

    def _with_interval(self, head: Head, value: float) -> str:
        if self.low is None or self.high is None:
            return compact(value)
        at = self.heads.index(head)
        return f"{compact(value)} ({compact(float(self.low.values[at]))} to {compact(float(self.high.values[at]))})"

    def __repr__(self) -> str:
        return f"<HeadImportance by {self.by}, {counted(len(self.heads), 'head')}, loss {self.loss:.4g}>"


def kept_count(keep: float, heads: int) -> int:
    """The number of heads that stay, from a number (int) or a share of all (float)."""
    wrong = isinstance(keep, bool) or not isinstance(keep, (int, float)) or not math.isfinite(keep)
    if wrong or (isinstance(keep, float) and not 0 < keep <= 1) or (isinstance(keep, int) and not 0 < keep <= heads):
        raise ValueError(f"keep: expected a share in (0, 1] or a number of heads from 1 to {heads}, got {keep!r}")
    return keep if isinstance(keep, int) else max(1, round(keep * heads))
