"""The mask function that goes with `attn_implementation="saccade"`: masks as compact values, not as Lq x Lk booleans.

Shapes: B batch, Lq / Lk lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._masks import Causal, Padding
from ...interception.transformers import MaskTensor
from ...interception.transformers._mask_functions import Frame, Read, Unreadable, joined, placed, read


def saccade_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None, attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu", **more: Any,
) -> Tensor | None:  # fmt: skip
    """Who attends to whom in one forward, (B, 1, Lq, Lk): the signature of transformers' mask functions.

    A `MaskTensor`, or None where the attention function knows without it (plain causal, or everything). A mask function
    that is not one of transformers' own, and any under a compiler or tracer, becomes the boolean tensor of `sdpa_mask`.
    """
    from transformers import masking_utils

    function = masking_utils.causal_mask_function if mask_function is None else mask_function
    skips = {"allow_is_causal_skip": allow_is_causal_skip, "allow_is_bidirectional_skip": allow_is_bidirectional_skip}

    def dense() -> Tensor | None:
        return masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset=q_offset, kv_offset=kv_offset, mask_function=function,
            attention_mask=attention_mask, device=device, **skips, **more,
        )  # fmt: skip

    if _traced():
        return dense()
    frame = Frame(batch_size, q_length, kv_length, int(q_offset), kv_offset)
    try:
        mask = read(function, frame)
    except Unreadable:
        return dense()
    kept = _kept(attention_mask, frame)
    if kept is None and _known_without(mask, frame, **skips):
        return None
    whole = placed(joined(mask, None if kept is None else Padding(kept)), frame)
    return MaskTensor(whole, (batch_size, 1, q_length, kv_length), device, _tokens(kept, mask, frame))


def _traced() -> bool:
    """Whether values of tensors may not be looked at."""
    special = torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack()
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or bool(special)


def _kept(attention_mask: Tensor | None, frame: Frame) -> Tensor | None:
    """(B, Lk) bool, the keys that are tokens; None where all are."""
    if attention_mask is None:
        return None
    kept = attention_mask[:, frame.start_k : frame.start_k + frame.length_k].bool()
    missing = frame.length_k - kept.shape[1]
    kept = torch.nn.functional.pad(kept, (0, missing)) if missing else kept
    return None if bool(kept.all()) else kept


def _known_without(mask: Read, frame: Frame, *, allow_is_causal_skip: bool, allow_is_bidirectional_skip: bool) -> bool:
    """Whether None says it: causal for more queries than one, everything for one or where nothing is causal."""
    if mask is None:
        return allow_is_bidirectional_skip or (allow_is_causal_skip and frame.length_q == 1)
    square = frame.length_q == frame.length_k or frame.offset == 0
    return allow_is_causal_skip and isinstance(mask, Causal) and square and frame.length_q > 1


def _tokens(kept: Tensor | None, mask: Read, frame: Frame) -> Tensor | None:
    """(B, Lq) bool: the query rows that are tokens. None: all are, or the queries may be another sequence's."""
    if kept is None or (mask is None and frame.length_q != frame.length_k):
        return None
    return kept[:, frame.offset : frame.offset + frame.length_q]
