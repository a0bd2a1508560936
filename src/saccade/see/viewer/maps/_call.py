"""One attention call of a model, kept so that any part of its maps can be computed.

Shape legend: B items, Hq / Hkv query and key-value heads, Lq / Lk lengths, D width.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ....operator._call import CheckedCall
from ....operator._checks import make_call
from ....operator._masks import PerHead
from ....operator._scores._score import ModifiedScores
from ....operator._statistics._rows import standing

_BLOCK, _LOOKED_AT = (
    256,
    2**26,
)  # rows tested together for visible later keys, and pairs tested in total


@dataclass(frozen=True, eq=False)
class MapCall:
    """Queries and keys of one call, and the other inputs of its weights.

    ``kind`` is "self" or "cross"; ``rows`` and ``keys`` are the ids of the query side and the key side.
    """

    id: str
    name: str
    layer: int
    kind: str
    rows: str
    keys: str
    call: CheckedCall

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, Hq, Lq, Lk)."""
        call = self.call
        return call.batch, call.heads, call.length_q, call.length_k

    def placed_for(self, item: int) -> int:
        """The key at the position of an item's query row 0, as in `statistics`."""
        position = standing(self.call)
        return position if isinstance(position, int) else int(position[item if len(position) > 1 else 0])

    @property
    def placed(self) -> int:
        """The key at the position of query row 0 of the first item."""
        return self.placed_for(0)

    @cached_property
    def causal(self) -> bool:
        """Whether certainly no query of any item sees a later key; a long mask without structure is not tested.

        False where items have different positions: `placed` is the first one's.
        """
        mask, (items, _, rows, keys) = self.call.mask, self.shape
        if mask is None or self.kind == "cross" or len({self.placed_for(item) for item in range(items)}) > 1:
            return False
        for start in range(0, rows, _BLOCK):
            stop = min(start + _BLOCK, rows)
            first, behind = (min(max(at + self.placed, 0), keys) for at in (start, stop))
            certain = mask.kind((start, stop), (behind, keys), rows, keys) == "empty"
            if not certain and rows * keys > _LOOKED_AT:
                return False
            later = torch.arange(first, behind if certain else keys)
            chosen = torch.arange(start, stop)
            if bool((mask._grid(chosen, later, rows, keys) & (later > chosen[:, None] + self.placed)).any()):
                return False
        return True

    def alone(self, item: int, head: int) -> tuple[CheckedCall, int, int]:
        """A call with only the tensors that this head of this item needs, and their indices in it: (call, item,
        head)."""
        call, mask = self.call, self.call.mask
        if isinstance(mask, PerHead):
            mask = mask.masks[head]
        if (mask is not None and mask._batch_and_heads()[1] != 1) or isinstance(call.bias, ModifiedScores):
            return call, item, head
        whole = (mask is not None and mask._batch_and_heads()[0] != 1) or isinstance(standing(call), Tensor)
        items = slice(0, call.batch) if whole else slice(item, item + 1)
        of_key = head // (call.heads // call.kv_heads)
        query, key = call.query[items, head : head + 1], call.key[items, of_key : of_key + 1]
        bias = call.bias
        if bias is not None:
            parameter = bias._part(bias.parameter, None, None, torch.tensor([head]))
            if parameter.dim() == 4 and parameter.shape[0] > 1:
                parameter = parameter[items]
            bias = copy.copy(bias)
            bias.parameter = parameter
        sink = None if call.sink is None else call.sink[head : head + 1]
        given = {"mask": mask, "bias": bias, "scale": call.scale, "softcap": call.softcap, "sink": sink}
        return checked(query, key, **given), item if whole else 0, 0


def checked(query: Tensor, key: Tensor, **scoring: Any) -> CheckedCall:
    """The call without values: the inputs of its weights."""
    value = key.new_zeros(()).expand(*key.shape[:3], 1)
    return make_call(query, key, value, **scoring, dropout=0.0, needs_lse=True)
