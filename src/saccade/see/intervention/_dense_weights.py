"""The weights of an edited call in one tensor, for models that hand them on.

Shape legend: B batch, Hq query heads, Lq / Lk lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...operator._call import AttentionCall
from ...operator._weights import attention_weights
from ._edit import CallPlace, Chosen, Edit, Part, together


def dense_weights(call: AttentionCall, parts: Sequence[Part], edits: Sequence[tuple[Edit, CallPlace]]) -> Tensor:
    """(B, Hq, Lq, Lk) of a call whose logits come from `parts`, with edits of weights and without those of outputs."""
    everything = Chosen(list(range(call.query.shape[1])), torch.arange(call.query.shape[2], device=call.query.device))
    found = together(
        parts,
        everything.heads,
        lambda part: attention_weights(part.call.query, part.call.key, **part.call.scoring()),
    )
    for edit, place in edits:
        found = edit.weights(found, everything, call, place)
    return found
