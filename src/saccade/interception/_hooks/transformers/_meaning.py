"""Translates a call of a transformers attention function into Saccade's terms.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv widths.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....operator._call import AttentionCall
from ....operator._masks import Causal, Documents, FromTensor, Mask, Padding, Predicate, Window
from ._mask_functions import UnknownMaskFunction, of_block_mask
from ._mask_tensor import MaskTensor, UnknownAttention

# Arguments that reach attention functions on their way through a model, and change nothing about the attention: what
# they stand for is in the mask, the cache or the positions of query and key by then.
HARMLESS = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "past_key_values",
        "past_key_value",
        "use_cache",
        "layer_idx",
        "layer_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
        "num_items_in_batch",
        "token_type_ids",
        "mm_token_type_ids",
        "seq_idx",
        "deterministic",
        "max_length_q",
        "max_length_k",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "cu_seqlens",
        "max_seqlen",
        "kernel_options",
        "labels",
        "inputs_embeds",
        "input_ids",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "decoder_attention_mask",
        "interpolate_pos_encoding",
        "training",
        "target_dtype",
    }
)
# Arguments that do bear on the attention, and are not honoured: with what to say of them.
REFUSED = {
    "cache": "continuous batching with a paged cache is not supported; generate with another cache",
    "block_table": "continuous batching with a paged cache is not supported; generate with another cache",
    "head_mask": "a factor on the weights of each head is not supported",
    "sinks": "a sink for each query is not supported, only one for each head (s_aux)",
    "indices": "chosen keys for each query are not supported outside of a mask",
    "block_indices": "chosen blocks of keys for each query are not supported outside of a mask",
}


def meaning_of(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    dropout: float = 0.0,
    scaling: float | Tensor | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    ignored: frozenset[str] = frozenset(),
    **more: Any,
) -> AttentionCall:
    """The `AttentionCall` of `function(module, query, key, value, attention_mask, ...)` in transformers.

    The mask. None means causal where Lq > 1 and `is_causal` (the argument, else the module's, else True); the query
    rows are then the first ones (a static cache's unused keys are cut off). Otherwise None means full attention. In a
    boolean tensor True means attend. In a float tensor -inf and the least number of its dtype mean "masked"; any other
    number is added to the logits. With the eager functions a row of nothing but least numbers averages over all keys;
    here it sees nothing. Two axes (B, Lk), as flash-attention gets them, are padding: causality and `sliding_window`
    are added to it. With any other mask `sliding_window` is in the mask already, and counts the query's own key among
    its W.

    Dropout applies only in training: the eager functions never drop in evaluation.

    Args:
        module: the attention module that calls; its `training`, `is_causal` and class are read.
        ignored: names of further arguments to ignore.

    Raises:
        UnknownAttention: an argument, or a kind of mask, that is neither supported nor known to be harmless.

    Example:
        >>> import torch
        >>> from saccade.integrations.transformers import meaning_of
        >>> query, key, value = torch.randn(3, 1, 2, 5, 8)
        >>> call = meaning_of(torch.nn.Identity(), query, key, value, None, scaling=0.5)
        >>> call.mask, call.scale
        (Causal(), 0.5)
    """
    if not more.keys() <= HARMLESS:
        _refuse_unknown(module, more, ignored)
    if query.shape[0] == 1 != key.shape[0]:  # queries learned once for all items
        query = query.expand(key.shape[0], -1, -1, -1)
    if isinstance(scaling, Tensor):  # a learned scale: its gradient goes through the query
        query, scaling = query * scaling.to(query.dtype), 1.0
    wanted = getattr(module, "is_causal", True) if is_causal is None else is_causal
    sizes = _CallLengths(query.shape[2], key.shape[2], bool(wanted) and query.shape[2] > 1, sliding_window)
    seen = _seen(attention_mask, sizes, module)
    if sizes.causal and attention_mask is None and sizes.length_k > sizes.length_q:
        # The prefill of a static cache: there is nothing yet in the keys after those of the queries.
        key, value = key[:, :, : sizes.length_q], value[:, :, : sizes.length_q]
        position_bias = None if position_bias is None else position_bias[..., : sizes.length_q]
    return AttentionCall(
        query,
        key,
        value,
        _of_documents(seen.mask, query, more),
        _sum(position_bias, seen.bias),
        None if scaling is None else float(scaling),
        softcap or None,
        _sink(s_aux, query),
        float(dropout) if module.training else 0.0,
        seen.real,
    )


class _CallLengths(NamedTuple):
    length_q: int
    length_k: int
    causal: bool
    window: int | None


class _MaskAndBias(NamedTuple):
    mask: Mask | Tensor | None
    bias: Tensor | None = None
    real: Tensor | None = None


def _seen(given: Any, sizes: _CallLengths, module: Any) -> _MaskAndBias:
    """The Saccade mask of any form of mask that models pass to their attention function."""
    if given is None:
        return _MaskAndBias(_unmasked(sizes))
    if isinstance(given, MaskTensor):
        if tuple(given.shape[2:]) == (sizes.length_q, sizes.length_k):
            return _MaskAndBias(given.mask, None, None if _crosses(module) else given.tokens)
        given = given.dense()  # made for other lengths: cut, broadcast or refused, as a tensor is
    if isinstance(given, Mask):
        return _MaskAndBias(given)
    if isinstance(given, Tensor) and given.dim() == 2:
        return _two_axes(given, sizes)
    if isinstance(given, Tensor) and given.dim() == 4:
        return _four_axes(given[..., : sizes.length_k], module)
    if hasattr(given, "mask_mod"):
        return _MaskAndBias(_of_blocks(given, sizes))
    kind = f"a tensor {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
    raise UnknownAttention(
        f"attention_mask must be a tensor (B, 1, Lq, Lk) or (B, Lk), a block mask or None, got {kind}"
    )


def _unmasked(sizes: _CallLengths) -> Mask | None:
    beyond = sizes.window is not None and sizes.window < sizes.length_k
    if sizes.causal:
        return _up_to(sizes.window if beyond else None)
    if beyond and sizes.length_q > 1:
        raise UnknownAttention(
            f"sliding_window: {sizes.window} keys of {sizes.length_k}, without a mask and not causal, has two readings"
        )
    return None


def _up_to(window: int | None) -> Mask:
    return Causal() if window is None else Causal() & Window(window - 1, None)


def _two_axes(given: Tensor, sizes: _CallLengths) -> _MaskAndBias:
    kept = given.bool()[:, : sizes.length_k]
    missing = sizes.length_k - kept.shape[1]
    kept = torch.nn.functional.pad(kept, (0, missing)) if missing else kept
    mask: Mask = Padding(kept)
    if sizes.causal or (sizes.window is not None and sizes.length_q == 1):
        mask = mask & _up_to(sizes.window)
    return _MaskAndBias(mask, None, kept if sizes.causal and sizes.length_q == sizes.length_k else None)


def _four_axes(given: Tensor, module: Any) -> _MaskAndBias:
    if given.dtype == torch.bool:
        return _MaskAndBias(given, None, _own_rows(given, module))
    if not given.is_floating_point():
        raise UnknownAttention(f"attention_mask must be boolean or floating point, got {given.dtype}")
    if given.requires_grad:  # a learned bias: every number in it is meant, and -inf is masked as ever
        return _MaskAndBias(None, given)
    seen = given > torch.finfo(given.dtype).min
    rest = given.masked_fill(~seen, 0.0)
    return _MaskAndBias(seen, rest if bool(rest.any()) else None, _own_rows(seen, module))


def _own_rows(visible: Tensor, module: Any) -> Tensor | None:
    """Rows (B, Lq) of self-attention that are not padding: padded rows do not see their own key. None if unknown."""
    if visible.shape[1] != 1 or visible.shape[2] != visible.shape[3] or _crosses(module):
        return None
    return visible[:, 0].diagonal(dim1=1, dim2=2)


def _crosses(module: Any) -> bool:
    """Whether a module may be cross-attention, whose queries and keys are different sequences."""
    if getattr(module, "is_cross_attention", False) or "cross" in type(module).__name__.lower():
        return True
    return bool(getattr(module, "is_decoder", False)) and not getattr(module, "is_causal", True)


def _of_blocks(given: Any, sizes: _CallLengths) -> Mask | None:
    """The mask of a FlexAttention block mask: transformers' own are recognised, others are evaluated pair by pair."""
    try:
        return of_block_mask(given.mask_mod, sizes.length_q, sizes.length_k)
    except UnknownMaskFunction:
        batch, heads = given.shape[:2]
        return Predicate(given.mask_mod, batch=batch, heads=heads).at(0)


def _of_documents(mask: Mask | Tensor | None, query: Tensor, more: dict[str, Any]) -> Mask | Tensor | None:
    """Several documents in one row, as flash-attention receives them; other attention functions find the documents by
    their position_ids."""
    of_queries, of_keys = more.get("cu_seq_lens_q"), more.get("cu_seq_lens_k")
    if of_queries is None and of_keys is None:
        return mask
    if of_queries is None or of_keys is None or query.shape[0] != 1:
        raise UnknownAttention("cu_seq_lens_q and cu_seq_lens_k must come together, with one row (B = 1) for all")
    documents = Documents.from_cu_seqlens(of_queries, of_keys)
    return documents if mask is None else (FromTensor(mask) if isinstance(mask, Tensor) else mask) & documents


def _sum(tensor: Tensor | None, other: Tensor | None) -> Tensor | None:
    if tensor is None or other is None:
        return other if tensor is None else tensor
    return tensor + other


def _sink(s_aux: Tensor | None, query: Tensor) -> Tensor | None:
    if s_aux is None:
        return None
    if s_aux.numel() != query.shape[1]:
        raise UnknownAttention(f"s_aux must hold one sink per query head ({query.shape[1]}), got {tuple(s_aux.shape)}")
    return s_aux.reshape(-1)


def _refuse_unknown(module: Any, more: dict[str, Any], ignored: frozenset[str]) -> None:
    """Ignore arguments that the eager function ignores; raise an error for other unknown arguments."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    for name, given in more.items():
        if name in HARMLESS or name in ignored or given is None or given is False:
            continue
        if name in ("indices", "block_indices") and implementation in ("eager", "sdpa"):
            continue  # for these two the models that choose keys put the choice into the mask
        eager = _known_to_eager(type(module).__module__)
        if name in REFUSED or eager is None or name in eager:
            kind = f"a {given.dtype} tensor {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
            reason = REFUSED.get(
                name, 'not known here; register(ignore=["..."]) passes over arguments that do not matter'
            )
            raise UnknownAttention(f"{name} of {type(module).__name__} ({kind}): {reason}")


@cache
def _known_to_eager(file: str) -> frozenset[str] | None:
    """Argument names of the eager attention functions in a model's file; None if it has none."""
    held = vars(sys.modules[file]) if file in sys.modules else {}
    eager = [thing for name, thing in held.items() if "eager_attention" in name and inspect.isfunction(thing)]
    if not eager:
        return None
    return frozenset(name for function in eager for name in inspect.signature(function).parameters)
