"""A number for each head of each attention call.

Shape legend: C calls, H query heads of a call, N heads of all calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...support._numbers import compact
from ...support._tables import Table


class CallHeads(NamedTuple):
    """An attention call by its name in `saccade.watch`, with its layer and its number of query heads.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4))
        >>> model = saccade.nn.Encoder(config, layers=2)
        >>> found = saccade.head_importance(model, torch.randn(3, 2, 5, 16), lambda model, x: model(x).square().mean())
        >>> found.values.calls[0]
        CallHeads(name='blocks.0.attention', layer=0, heads=4)
    """

    name: str
    layer: int
    heads: int


class Head(NamedTuple):
    """One query head of a call, counted from 0.

    Example:
        >>> from saccade.attribution import Head
        >>> head = Head("blocks.1.attention", layer=1, head=3)
        >>> str(head)
        '1.3'
    """

    call: str
    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.layer}.{self.head}"


@dataclass(frozen=True, eq=False)
class HeadValues:
    """A number for each head. Calls may have different numbers of heads.

    Attributes:
        calls: in the order in which the model makes them.
        values: (N,) float64, the heads of all calls one after the other; NaN where a head was not measured.

    Example:
        >>> import torch
        >>> from saccade.attribution import CallHeads, HeadValues
        >>> calls = CallHeads("blocks.0.attention", 0, 2), CallHeads("blocks.1.attention", 1, 3)
        >>> heads = HeadValues(calls, torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64))
        >>> heads.by_call()["blocks.1.attention"]
        tensor([0.3000, 0.4000, 0.5000], dtype=torch.float64)
        >>> heads.grid()
        tensor([[0.1000, 0.2000,    nan],
                [0.3000, 0.4000, 0.5000]], dtype=torch.float64)
    """

    calls: tuple[CallHeads, ...]
    values: Tensor

    @property
    def heads(self) -> tuple[Head, ...]:
        """The N heads."""
        return tuple(Head(call.name, call.layer, head) for call in self.calls for head in range(call.heads))

    def by_call(self) -> dict[str, Tensor]:
        """(H,) of each call, by its name."""
        parts = self.values.split([call.heads for call in self.calls])
        return {call.name: part for call, part in zip(self.calls, parts, strict=True)}

    def grid(self) -> Tensor:
        """(C, largest number of heads of a call), NaN where a call has fewer."""
        values = torch.full((len(self.calls), max(call.heads for call in self.calls)), math.nan, dtype=torch.float64)
        for row, part in zip(values, self.by_call().values(), strict=True):
            row[: len(part)] = part
        return values

    def ranked(self) -> list[tuple[Head, float]]:
        """The measured heads with their values, the largest absolute value first."""
        heads = self.heads
        order = torch.where(self.values.isnan(), -math.inf, self.values.abs()).argsort(descending=True, stable=True)
        return [(heads[i], float(self.values[i])) for i in order.tolist() if not self.values[i].isnan()]

    def named(self, head: Head) -> str:
        """ "3.1", layer and head, if the layer has a single call; otherwise the call's name and the head."""
        alone = sum(call.layer == head.layer for call in self.calls) == 1
        return str(head) if alone else f"{head.call}.{head.head}"

    def text(self) -> str:
        """A line for each call, a column for each head."""
        grid = self.grid()
        rows = []
        for call, numbers in zip(self.calls, grid.tolist(), strict=True):
            cells = ["" if math.isnan(value) else compact(value) for value in numbers]
            rows.append([str(call.layer), call.name or "(the model)", *cells])
        return str(Table(["layer", "call", *(f"head {head}" for head in range(grid.shape[1]))], rows, "rlr"))

    def __str__(self) -> str:
        return self.text()


def by_sign(ranked: Sequence[tuple[Head, float]]) -> tuple[list[tuple[Head, float]], list[tuple[Head, float]]]:
    """The heads above 0 and those below, each with the largest number first."""
    ordered = sorted(ranked, key=lambda pair: -abs(pair[1]))
    return [pair for pair in ordered if pair[1] > 0], [pair for pair in ordered if pair[1] < 0]


def head_map(calls: Sequence[CallHeads], by_call: Mapping[str, Tensor]) -> HeadValues:
    """`HeadValues` of (H,) numbers by call name."""
    return HeadValues(tuple(calls), torch.cat([by_call[call.name].detach().cpu().double() for call in calls]))


def table_of(calls: Sequence[CallHeads], **columns: HeadValues | None) -> list[dict[str, Any]]:
    """A row for each head, with a column for each value that is not None."""
    there = {name: column.values.tolist() for name, column in columns.items() if column is not None}
    heads = HeadValues(tuple(calls), torch.empty(0)).heads
    return [{**head._asdict(), **{name: column[i] for name, column in there.items()}} for i, head in enumerate(heads)]
