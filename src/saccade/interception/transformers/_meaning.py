"""What one call of a transformers attention function means in Saccade's terms.

Shapes: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv widths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..._masks import Causal, Documents, FromTensor, Mask, Padding, Predicate, Window
from ._mask_tensor import MaskTensor

# Arguments that reach attention functions on their way through a model, and change nothing about the attention: what
# they stand for is in the mask, the cache or the positions of query and key by then.
HARMLESS = frozenset({
    "position_ids", "position_embeddings", "cache_position", "past_key_values", "past_key_value", "use_cache",
    "layer_idx", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep",
    "num_items_in_batch", "token_type_ids", "mm_token_type_ids", "seq_idx", "deterministic", "max_length_q",
    "max_length_k", "kernel_options", "labels", "encoder_hidden_states", "encoder_attention_mask",
    "decoder_attention_mask", "interpolate_pos_encoding", "inputs_embeds", "input_ids", "training", "target_dtype",
    "layer_type", "cu_seqlens",
})  # fmt: skip


class UnknownAttention(ValueError):
    """An attention call that asks for something which has no meaning here; the message names it."""


@dataclass(frozen=True, eq=False)
class AttentionMeaning:
    """One attention call in Saccade's terms: the arguments of `saccade.attention`."""

    query: Tensor  # (B, Hq, Lq, D)
    key: Tensor  # (B, Hkv, Lk, D)
    value: Tensor  # (B, Hkv, Lk, Dv)
    mask: Mask | Tensor | None
    bias: Tensor | None
    scale: float | None
    softcap: float | None
    sink: Tensor | None  # (Hq,)
    dropout: float
    real: Tensor | None = None  # (B, Lq) bool: query rows that are tokens, not padding; None: all, or not known

    @cached_property
    def counted(self) -> Mask | Tensor | None:
        """The mask with padded queries as empty rows: what statistics are to count."""
        if self.real is None or bool(self.real.all()):
            return self.mask
        batch, _, length_k, _ = self.key.shape
        rows = Padding(torch.full((batch,), length_k, device=self.real.device), queries=self.real)
        if self.mask is None:
            return rows
        return (FromTensor(self.mask) if isinstance(self.mask, Tensor) else self.mask) & rows

    def arguments(self) -> dict[str, Any]:
        """Mask, bias, scale, softcap, sink and dropout by name, as `saccade.attention` takes them."""
        names = ("mask", "bias", "scale", "softcap", "sink", "dropout")
        return {name: getattr(self, name) for name in names}


def meaning_of(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, dropout: float = 0.0,
    scaling: float | Tensor | None = None, is_causal: bool | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, sliding_window: int | None = None,
    ignored: frozenset[str] = frozenset(), **more: Any,
) -> AttentionMeaning:  # fmt: skip
    """What `function(module, query, key, value, attention_mask, ...)` asks for, whichever implementation computes it.

    The mask. None means causal where Lq > 1 and `is_causal` (the argument, else the module's, else True), the query
    rows then being the first ones (a static cache's unused keys are cut off); full otherwise. A boolean tensor says who
    attends. In a float tensor -inf and the least number of its dtype mean "masked", any other number is added to the
    logits. To the eager functions a row of nothing but least numbers averages over all keys; here it sees nothing. Two
    axes (B, Lk), as flash-attention gets them, are padding: causality and `sliding_window` come on top.
    `sliding_window` otherwise is in the mask already, and counts the query's own key among its W.

    Args:
        ignored: names of further arguments to pass over.

    Raises:
        UnknownAttention: an argument, or a kind of mask, that is neither honoured nor known to be harmless.
    """
    for name, given in more.items():
        if not (
            name in HARMLESS or name in ignored or name.startswith("cu_seq_lens") or given is None or given is False
        ):
            raise UnknownAttention(_refusal(name, given))
    if query.shape[0] == 1 != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and query.shape[2] > 1
    query, scale = _scaled(query, scaling)
    meaning = AttentionMeaning(
        query, key, value, None, position_bias, scale, softcap or None, _sink(s_aux, query),
        float(dropout) if module is None or module.training else 0.0,
    )  # fmt: skip
    meaning = _masked(meaning, attention_mask, causal, sliding_window, module)
    return _packed(meaning, more.get("cu_seq_lens_q"), more.get("cu_seq_lens_k"))


def _refusal(name: str, given: Any) -> str:
    if name in ("cache", "block_table"):
        return f"{name}: continuous batching with a paged cache is not supported; use generate with another cache"
    kind = f"a {given.dtype} tensor {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
    return f"{name}: the attention function does not know what to do with it (it is {kind})"


def _scaled(query: Tensor, scaling: float | Tensor | None) -> tuple[Tensor, float | None]:
    if isinstance(scaling, Tensor):
        return query * scaling.to(query.dtype), 1.0  # a learned scale: its gradient goes through the query
    return query, None if scaling is None else float(scaling)


def _sink(s_aux: Tensor | None, query: Tensor) -> Tensor | None:
    if s_aux is None:
        return None
    if s_aux.numel() != query.shape[1]:
        raise UnknownAttention(f"s_aux must hold one sink per query head ({query.shape[1]}), got {tuple(s_aux.shape)}")
    return s_aux.reshape(-1)


def _masked(meaning: AttentionMeaning, given: Any, causal: bool, window: int | None, module: Any) -> AttentionMeaning:
    if given is None:
        return _unmasked(meaning, causal, window)
    if isinstance(given, MaskTensor):
        return replace(meaning, mask=given.mask, real=None if _crosses(module) else given.tokens)
    if isinstance(given, Mask):
        return replace(meaning, mask=given)
    if isinstance(given, Tensor) and given.dim() == 2:
        return _two_axes(meaning, given, causal, window)
    if isinstance(given, Tensor) and given.dim() == 4:
        return _four_axes(meaning, given[..., : meaning.key.shape[2]], module)
    mask_mod = getattr(given, "mask_mod", None)
    if mask_mod is not None:
        batch, heads = given.shape[:2]
        return replace(meaning, mask=Predicate(mask_mod, batch=batch, heads=heads).at(0))
    kind = f"a tensor {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
    raise UnknownAttention(
        f"attention_mask must be a tensor (B, 1, Lq, Lk) or (B, Lk), a block mask or None, got {kind}"
    )


def _unmasked(meaning: AttentionMeaning, causal: bool, window: int | None) -> AttentionMeaning:
    length_q, length_k = meaning.query.shape[2], meaning.key.shape[2]
    beyond = window is not None and window < length_k
    if not causal:
        if beyond and length_q > 1:
            raise UnknownAttention(f"sliding_window: {window} without a mask and without causality has two readings")
        return meaning
    if length_k > length_q:  # the prefill of a static cache: nothing is in the keys after the queries
        bias = meaning.bias
        meaning = replace(
            meaning, key=meaning.key[:, :, :length_q], value=meaning.value[:, :, :length_q],
            bias=None if bias is None else bias[..., :length_q],
        )  # fmt: skip
    return replace(meaning, mask=_windowed(window) if beyond else Causal())


def _windowed(window: int | None) -> Mask:
    return Causal() if window is None else Causal() & Window(window - 1, None)


def _two_axes(meaning: AttentionMeaning, given: Tensor, causal: bool, window: int | None) -> AttentionMeaning:
    length_q, length_k = meaning.query.shape[2], meaning.key.shape[2]
    kept = given.bool()[:, :length_k]
    if kept.shape[1] < length_k:
        kept = torch.nn.functional.pad(kept, (0, length_k - kept.shape[1]))
    mask: Mask = Padding(kept)
    if causal or (window is not None and length_q == 1):
        mask = mask & _windowed(window)
    real = kept if length_q == length_k and causal else None
    return replace(meaning, mask=mask, real=real)


def _four_axes(meaning: AttentionMeaning, given: Tensor, module: Any) -> AttentionMeaning:
    if given.dtype == torch.bool:
        return replace(meaning, mask=given, real=_own_rows(given, module))
    if not given.is_floating_point():
        raise UnknownAttention(f"attention_mask must be boolean or floating point, got {given.dtype}")
    if given.requires_grad:  # a learned bias: its numbers are all meant, and -inf counts as masked
        return replace(meaning, bias=given if meaning.bias is None else meaning.bias + given)
    seen = given > torch.finfo(given.dtype).min
    rest = given.masked_fill(~seen, 0.0)
    if rest.any():
        meaning = replace(meaning, bias=rest if meaning.bias is None else meaning.bias + rest)
    return replace(meaning, mask=seen, real=_own_rows(seen, module))


def _own_rows(seen: Tensor, module: Any) -> Tensor | None:
    """Rows of a square self-attention whose own key is hidden from them are padding: (B, Lq), None where not known."""
    if seen.shape[1] != 1 or seen.shape[2] != seen.shape[3] or _crosses(module):
        return None
    return seen[:, 0].diagonal(dim1=1, dim2=2)


def _crosses(module: Any) -> bool:
    """Whether a module may be cross-attention: its queries then are another sequence than its keys."""
    if getattr(module, "is_cross_attention", False) or "cross" in type(module).__name__.lower():
        return True
    return bool(getattr(module, "is_decoder", False)) and not getattr(module, "is_causal", True)


def _packed(meaning: AttentionMeaning, of_queries: Tensor | None, of_keys: Tensor | None) -> AttentionMeaning:
    """Several documents in one row, as flash-attention is told of them."""
    if of_queries is None and of_keys is None:
        return meaning
    if of_queries is None or of_keys is None or meaning.query.shape[0] != 1 or isinstance(meaning.mask, Tensor):
        raise UnknownAttention("cu_seq_lens_q and cu_seq_lens_k: expected both, one row (B = 1) and no dense mask")
    documents = Documents.from_cu_seqlens(of_queries, of_keys)
    return replace(meaning, mask=documents if meaning.mask is None else meaning.mask & documents)
