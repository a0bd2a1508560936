"""The parts of every edit of an attention call.

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
# Maps weights (B, n, r, Lk) of the chosen heads in the query rows (r,) to new weights of that shape.
WeightsFunction = Callable[[Tensor, Tensor], Tensor]


class Stage(IntEnum):
    """The stage of a call that an edit changes. Edits of one stage are applied before those of the next, whatever their
    order."""

    PRODUCTS = 0  # queries and keys, and scale * q.k
    VALUES = 1
    LOGITS = 2
    WEIGHTS = 3
    OUTPUT = 4


class CallPlace(NamedTuple):
    """Where a call happens: in the model, and its rows in their sequence."""

    site: CallSite
    first_row: int  # the position of query row 0, after the rows in a cache

    @property
    def name(self) -> str:
        return self.site.name


class Chosen(NamedTuple):
    """The heads and rows of a tensor of weights (B, n, r, Lk)."""

    heads: list[int]  # (n)
    rows: Tensor  # (r,)


@dataclass(frozen=True, eq=False)
class CallPart:
    """Some heads, items and rows of a call, and the call that computes them."""

    call: AttentionCall
    covered: Tensor  # (B or 1, Hq, Lq or 1, 1) bool; each place is covered by one part


def split(part: CallPart, covered: Tensor, change: Callable[[AttentionCall], AttentionCall]) -> list[CallPart]:
    """The part with `change` where `covered` is true, and unchanged elsewhere."""
    inside, outside = part.covered & covered, part.covered & ~covered
    parts = [replace(part, call=change(part.call), covered=inside)] if bool(inside.any()) else []
    return [*parts, replace(part, covered=outside)] if bool(outside.any()) else parts


def together(
    parts: Sequence[CallPart], heads: list[int], of_part: Callable[[CallPart], Tensor], rows: Tensor | None = None
) -> Tensor:
    """(B, n, ., .) for some heads, each part's values where it covers; for the query rows `rows`, or all."""
    joined = None
    for part in parts:
        covered = part.covered.expand(-1, part.call.query.shape[1], -1, -1)[:, heads]
        covered = covered if rows is None or covered.shape[2] == 1 else covered[:, :, rows]
        if bool(covered.any()):
            own = of_part(part)
            joined = own if joined is None else torch.where(covered, own, joined)
    assert joined is not None
    return joined


class Edit(ABC):
    """A change of some heads of an attention call. Abstract: a subclass overrides the methods of its stage.

    All edits of a call are applied by stage, and within a stage in their order: first to queries, keys and values, then
    to the logits, to the weights, and to the output.

    Attributes:
        choice: the heads and items that it applies to.
        stage: the stage of the call that it changes.
    """

    choice: Choice
    _by_function: ClassVar[bool] = False  # whether it needs the weights themselves

    @property
    def _stage(self) -> Stage:
        return Stage.OUTPUT

    @property
    def _reads_other_items(self) -> bool:
        """Whether the output of an item depends on the outputs of others."""
        return False

    def _parts(self, part: CallPart, place: CallPlace) -> list[CallPart]:
        """A part of a call, changed before the computation."""
        return [part]

    def _logits(self, logits: Tensor, call: AttentionCall) -> Tensor:
        """Dense logits (B, Hq, Lq, Lk) of attention written by hand, -inf where hidden, changed."""
        return logits

    def _weights(self, weights: Tensor, chosen: Chosen, call: AttentionCall, place: CallPlace) -> Tensor:
        """Weights (B, n, r, Lk), changed for heads of this edit."""
        return weights

    def _replaced(self, call: AttentionCall, place: CallPlace) -> Tensor | None:
        """(B or 1, Hq, 1, 1) bool: heads whose computed output is discarded by `output`; None if there are none."""
        return None

    def _output(self, out: Tensor, call: AttentionCall, place: CallPlace) -> Tensor:
        """The output (B, Hq, Lq, Dv), changed."""
        return out

    def _unreached(self, site: CallSite, end: int) -> str | None:
        """The message if the edit is for positions from `end` on that no text of a block reached."""
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
