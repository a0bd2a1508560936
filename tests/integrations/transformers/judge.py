"""Attention from its formula, in the dtype it is given: what both eager and Saccade are measured against in float64.

transformers' own eager functions cannot judge: several take their softmax in float32 whatever the input, and in float64
a row with everything masked is NaN there (the least float64 becomes -inf as a float32).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

NAME = "judge"


def judge_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any):
    """Dense attention by the book; rows that see nothing give 0. The second value is the weights."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.transpose(2, 3) * more["scaling"]
    if more.get("softcap") is not None:
        logits = more["softcap"] * torch.tanh(logits / more["softcap"])
    if more.get("position_bias") is not None:
        logits = logits + more["position_bias"]
    seen = torch.ones_like(logits, dtype=torch.bool) if attention_mask is None else attention_mask.expand_as(logits)
    numerator = torch.where(seen, torch.exp(logits - logits.detach().amax(-1, keepdim=True)), 0.0)
    total = numerator.sum(-1, keepdim=True)
    if more.get("s_aux") is not None:
        sink = more["s_aux"].view(1, -1, 1, 1)
        total = total + torch.exp(sink - logits.detach().amax(-1, keepdim=True))
    weights = numerator / torch.where(seen.any(-1, keepdim=True), total, 1.0)
    return (weights @ value).transpose(1, 2).contiguous(), weights


@contextmanager
def judging() -> Iterator[None]:
    """`attn_implementation="judge"` exists meanwhile, with masks of transformers' own making that are never None."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    def mask(*sizes: Any, **more: Any) -> Tensor | None:
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(*sizes, **{**more, **skips})

    AttentionInterface.register(NAME, judge_forward)
    AttentionMaskInterface.register(NAME, mask)
    try:
        yield
    finally:
        del AttentionInterface._global_mapping[NAME], AttentionMaskInterface._global_mapping[NAME]
