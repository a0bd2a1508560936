"""What every edit of an attention call is made of.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv widths.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...operator._call import AttentionCall
from ..monitoring import CallSite
from ._choice import Choice, indices

Heads = int | Sequence[int] | None
# Weights (B, n, r, Lk) of the chosen heads in the query rows (r,), to weights of that shape.
WeightsFunction = Callable[[Tensor, Tensor], Tensor]


class Stage(IntEnum):
    """What of a call an edit changes. All edits of one stage come before those of the next, whatever their order."""

    PRODUCTS = 0  # queries and keys, and scale * q.k
    VALUES = 1
    LOGITS = 2
    WEIGHTS = 3
    OUTPUT = 4


class CallPlace(NamedTuple):
    """Where a call happens: in the model, and its rows in their sequence."""

    site: CallSite
    first_row: int  # the position of query row 0; a cache may have those before it

    @property
    def name(self) -> str:
        return self.site.name


class Chosen(NamedTuple):
    """Which weights of a call a tensor (B, n, r, Lk) has."""

    heads: list[int]  # (n)
    rows: Tensor  # (r,)


@dataclass(frozen=True, eq=False)
class CallPart:
    """Some heads, items and rows of a call, and the call that gives them."""

    call: AttentionCall
    covered: Tensor  # (B or 1, Hq, Lq or 1, 1) bool; each place is covered by one part


def split(part: CallPart, covered: Tensor, change: Callable[[AttentionCall], AttentionCall]) -> list[CallPart]:
    """The part with `change` where `covered` is, and as it was elsewhere."""
    inside, outside = part.covered & covered, part.covered & ~covered
    found = [replace(part, call=change(part.call), covered=inside)] if bool(inside.any()) else []
    return [*found, replace(part, covered=outside)] if bool(outside.any()) else found


def together(
    parts: Sequence[CallPart], heads: list[int], of_part: Callable[[CallPart], Tensor], rows: Tensor | None = None
) -> Tensor:
    """(B, n, ., .) of some heads, from each part what it covers; of the query rows `rows`, where these are some."""
    found = None
    for part in parts:
        covered = part.covered.expand(-1, part.call.query.shape[1], -1, -1)[:, heads]
        covered = covered if rows is None or covered.shape[2] == 1 else covered[:, :, rows]
        if bool(covered.any()):
            own = of_part(part)
            found = own if found is None else torch.where(covered, own, found)
    assert found is not None
    return found


class Edit(ABC):
    """A change of some heads of an attention call. Abstract: a subclass overrides where it is at work.

    All edits of a call are applied by stage, and within a stage in their order: first to queries, keys and values, then
    to the logits, to the weights, and to the output.

    Attributes:
        choice: the heads and items that it is for.
        stage: what it changes.
    """

    choice: Choice
    _by_function: ClassVar[bool] = False  # whether it needs the weights themselves

    @property
    def _stage(self) -> Stage:
        return Stage.OUTPUT

    @property
    def _reads_other_items(self) -> bool:
        """Whether the output of an item depends on what the call gives for others."""
        return False

    def _parts(self, part: CallPart, place: CallPlace) -> list[CallPart]:
        """A part of a call, changed before anything is computed."""
        return [part]

    def _logits(self, logits: Tensor, call: AttentionCall) -> Tensor:
        """Dense logits (B, Hq, Lq, Lk) of attention written by hand, -inf where hidden, changed."""
        return logits

    def _weights(self, weights: Tensor, chosen: Chosen, call: AttentionCall, place: CallPlace) -> Tensor:
        """Weights (B, n, r, Lk), changed where they are of heads of this edit."""
        return weights

    def _replaced(self, call: AttentionCall, place: CallPlace) -> Tensor | None:
        """(B or 1, Hq, 1, 1) bool: where `output` uses nothing of what the call gives; None: nowhere."""
        return None

    def _output(self, out: Tensor, call: AttentionCall, place: CallPlace) -> Tensor:
        """The output (B, Hq, Lq, Dv), changed."""
        return out

    def _unreached(self, site: CallSite, end: int) -> str | None:
        """What to say where the edit is meant for positions from `end` on, and the texts of a block had none."""
        return None


@dataclass(frozen=True, eq=False)
class HeadEdit(Edit):
    """An edit of chosen heads.

    Args:
        heads: query heads, from 0; an int, ints, or None for all.
        items: items of the batch, from 0; an int, ints, or None for all.
    """

    heads: Heads = None
    items: Heads = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "choice", Choice(indices(self.heads, "heads"), indices(self.items, "items")))
