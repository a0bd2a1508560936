"""One attention call of a model, kept so that any part of its maps can be computed.

Shape legend: B items, Hq / Hkv query and key-value heads, Lq / Lk lengths, D width.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._call import CheckedCall
from ..._checks import make_call


@dataclass(frozen=True, eq=False)
class MapCall:
    """Queries and keys of one call and what else makes its weights.

    ``kind`` is "self" or "cross"; ``rows`` and ``keys`` are the ids of the sides that look and are looked at.
    ``lse`` (B, Hq, Lq), the sink counted, where it is known.
    """

    id: str
    name: str
    layer: int
    kind: str
    rows: str
    keys: str
    call: CheckedCall
    lse: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, Hq, Lq, Lk)."""
        call = self.call
        return call.batch, call.heads, call.length_q, call.length_k

    def placed_for(self, item: int) -> int:
        """Query row 0 of an item stands at this key."""
        placement = self.call.placement
        return placement if isinstance(placement, int) else int(placement[item])

    @property
    def placed(self) -> int:
        """Query row 0 of the first item stands at this key."""
        return self.placed_for(0)

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key: asked at a few places of each row block, as far as the mask says."""
        mask, rows, keys = self.call.mask, self.call.length_q, self.call.length_k
        if mask is None or self.kind == "cross":
            return False
        chosen = torch.unique(torch.linspace(0, rows - 1, min(rows, 64)).long())
        seen = mask.grid(chosen, torch.arange(keys), rows, keys)
        later = torch.arange(keys)[None] > chosen[:, None] + self.placed
        return not bool((seen & later).any())

    def alone(self, item: int, head: int) -> CheckedCall | None:
        """The call of one head of one item; None where heads or items differ in mask or place."""
        call = self.call
        if call.mask is not None and call.mask.batch_and_heads() != (1, 1):
            return None
        if isinstance(call.placement, Tensor):
            return None
        of_key = head // (call.heads // call.kv_heads)
        query, key = call.query[item : item + 1, head : head + 1], call.key[item : item + 1, of_key : of_key + 1]
        return checked(query, key, **self._scoring_of(item, head))

    def _scoring_of(self, item: int, head: int) -> dict[str, Any]:
        call, bias = self.call, self.call.bias
        if bias is not None:
            parameter = bias.part(bias.parameter, None, None, torch.tensor([head]))
            if parameter.dim() == 4 and parameter.shape[0] > 1:
                parameter = parameter[item : item + 1]
            bias = copy.copy(bias)
            bias.parameter = parameter
        sink = None if call.sink is None else call.sink[head : head + 1]
        return {"mask": call.mask, "bias": bias, "scale": call.scale, "softcap": call.softcap, "sink": sink}


def checked(query: Tensor, key: Tensor, **scoring: Any) -> CheckedCall:
    """The call without values: what its weights are made of."""
    value = key.new_zeros(()).expand(*key.shape[:3], 1)
    return make_call(query, key, value, **scoring, dropout=0.0, needs_lse=True)
