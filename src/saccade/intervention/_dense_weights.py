"""The weights of an edited call in one tensor, for models that hand them on.

Shape legend: B batch, Hq query heads, Lq / Lk lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._call import AttentionCall
from .._weights import attention_weights
from ._edit import CallPlace, Chosen, Edit, Part


def dense_weights(call: AttentionCall, parts: Sequence[Part], edits: Sequence[tuple[Edit, CallPlace]]) -> Tensor:
    """(B, Hq, Lq, Lk) of a call whose logits come from `parts`, with edits of weights and without those of outputs."""
    found: Tensor | None = None
    for part in parts:
        own = attention_weights(part.call.query, part.call.key, **part.call.scoring())
        found = own if found is None else torch.where(part.share, own, found)
    assert found is not None
    everything = Chosen(list(range(found.shape[1])), torch.arange(found.shape[2], device=found.device))
    for edit, place in edits:
        found = edit.weights(found, everything, call, place)
    return found
