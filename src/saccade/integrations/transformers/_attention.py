"""The attention function behind `attn_implementation="saccade"`, and its mask function: masks are compact values.

Shape legend: B batch, Hq query heads, Lq / Lk lengths, Dv value width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from ...interception._hooks.transformers import MaskTensor, UnknownAttention, meaning_of
from ...interception._hooks.transformers._mask_functions import MaskFrame, UnknownMaskFunction, joined, placed, read
from ...operator._attention import attention
from ...operator._call import AttentionCall
from ...operator._masks import FromTensor, Padding
from ...operator._weights import attention_weights

Attentions = Literal["weights", "statistics"]
Second = Callable[[AttentionCall], Any]


def function_giving(second: Second, ignored: frozenset[str]) -> Callable[..., tuple[Tensor, Any]]:
    """An attention function whose second value is `second(meaning)` if a caller requests attentions."""

    def saccade_attention_forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any
    ) -> tuple[Tensor, Any]:
        meaning = meaning_of(module, query, key, value, attention_mask, ignored=ignored, **more)
        out = attention(meaning.query, meaning.key, meaning.value, **meaning.arguments())
        asked = more.get("output_attentions") or _collected()
        return out.transpose(1, 2).contiguous(), second(meaning) if asked else None

    return saccade_attention_forward


def _collected() -> bool:
    """Whether the forward under way collects attentions: many models do not hand `output_attentions` down."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    if torch.compiler.is_compiling() and not _active_collector.compiling:
        return False  # a context variable, which compilers cannot read
    return any(name.endswith("attentions") for name in _active_collector.get() or ())


# Compilers break their graph here: traced, the tiles of one call would be thousands of operations.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def weights(meaning: AttentionCall) -> Tensor:
    """(B, Hq, Lq, Lk) in the dtype of the query, as eager returns them but without dropout."""
    return attention_weights(meaning.query, meaning.key, **meaning.scoring()).to(meaning.query.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def statistics(meaning: AttentionCall) -> Any:
    """`saccade.Statistics` of the call, without padded queries if the mask marks them."""
    from ...operator._statistics import statistics as of

    return of(meaning.query, meaning.key, value=meaning.value, **{**meaning.scoring(), "mask": meaning.counted_mask})


def saccade_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **more: Any,
) -> Tensor | None:
    """The mask of one forward, (B, 1, Lq, Lk), with the signature of transformers' mask functions.

    Never None, which would mean "causal" or "everything" by what the attention module says of itself. A mask function
    that is not one of transformers' own becomes booleans, Lq x Lk of them. Under a compiler or a tracer this is
    `sdpa_mask`.

    Raises:
        UnknownAttention: the model computes its attention itself, and would take these booleans for numbers to add.
    """
    from transformers import masking_utils

    function = masking_utils.causal_mask_function if mask_function is None else mask_function
    given: dict[str, Any] = {
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": function,
        "attention_mask": attention_mask,
    }
    if _traced():
        more.update(allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip)
        return masking_utils.sdpa_mask(batch_size, q_length, kv_length, device=device, **given, **more)
    kind: Any = type(more.get("config"))
    if not _looks_up(kind):
        raise UnknownAttention(
            f"{kind.__name__}: models of this kind compute attention themselves and do not use the "
            'attention registry, so that attn_implementation="saccade" cannot reach them; use "eager"'
        )
    frame = MaskFrame(q_length, kv_length, int(q_offset), kv_offset)
    kept = _kept(attention_mask, frame)
    try:
        mask = placed(joined(read(function, frame), None if kept is None else Padding(kept)), frame)
    except UnknownMaskFunction:
        bits: Any = masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, device=device, **given, **more, allow_is_causal_skip=False
        )
        mask = FromTensor(bits)
    shape = (batch_size, 1, q_length, kv_length)
    return MaskTensor(mask, shape, device, None if kept is None else _tokens(kept, frame))


@cache
def _looks_up(kind: type) -> bool:
    """Whether models with this class of config use transformers' attention registry, as far as transformers can
    tell."""
    from transformers import PreTrainedModel

    file = sys.modules.get(kind.__module__.replace(".configuration_", ".modeling_"))
    held = [] if file is None else [thing for thing in vars(file).values() if isinstance(thing, type)]
    models = [thing for thing in held if issubclass(thing, PreTrainedModel) and thing is not PreTrainedModel]
    return all(model._can_set_attn_implementation() for model in models)


def _traced() -> bool:
    """Whether values of tensors cannot be read, as while compiling or tracing."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    return bool(torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack())


def _kept(attention_mask: Tensor | None, frame: MaskFrame) -> Tensor | None:
    """(B, Lk) bool, the keys that are tokens; None if all are."""
    if attention_mask is None:
        return None
    kept = attention_mask[:, frame.start_k : frame.start_k + frame.length_k].bool()
    missing = frame.length_k - kept.shape[1]
    kept = torch.nn.functional.pad(kept, (0, missing)) if missing else kept
    return None if bool(kept.all()) else kept


def _tokens(kept: Tensor, frame: MaskFrame) -> Tensor | None:
    """(B, Lq) bool, the query rows that are tokens, if queries and keys are of one sequence; None if queries lie
    outside of the keys."""
    if not 0 <= frame.offset <= frame.length_k - frame.length_q:
        return None
    return kept[:, frame.offset : frame.offset + frame.length_q]
