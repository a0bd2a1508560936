"""Attention calls on an accelerated thread: computed by Saccade, or passed on to PyTorch.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv key and value width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..interception._hooks import SdpaCall, SdpaMeaning
from ..operator import _observers
from ..operator._attention import attention
from ..operator._backends import native
from ..operator._call import AttentionCall
from ..operator._checks import make_call
from . import _rules
from ._thread import THREAD, AttentionOfTokens, NotOfTokens, counted

SOURCE = "F.scaled_dot_product_attention"
_WEIGHTS = "nn.MultiheadAttention forms the weights itself (need_weights=True is its default)"


def answer(call: SdpaCall, proceed: Callable[[], Tensor]) -> Tensor:
    """Compute a call of F.scaled_dot_product_attention with Saccade, or pass it on."""
    if THREAD.held.packed is not None:
        return _of_tokens(call, THREAD.held.packed)
    meaning = _rules.taken(call)
    if isinstance(meaning, str):
        if meaning != _rules.FAKE:  # a compiler finds out shapes: the call itself comes later
            _count(None, meaning)
        return proceed()
    out = _told(meaning) if _observers.THREAD.observers else _computed(meaning)
    if isinstance(out, str):
        _count(None, out)
        return proceed()
    _count("native", "")
    return meaning.shaped(out)


def _of_tokens(call: SdpaCall, packed: AttentionOfTokens) -> Tensor:
    """A call for the real tokens of a batch in one row, with the mask that the layer itself does not receive."""
    meaning = call.meaning()
    if isinstance(meaning, str):
        raise NotOfTokens(meaning)
    batch, _, rows, _ = meaning.query.shape
    if call.attn_mask is not None or (batch, rows, meaning.key.shape[2]) != (1, packed.tokens, packed.tokens):
        raise NotOfTokens("its attention is not of its tokens alone")
    if (call.is_causal and not packed.causal) or call.dropout_p:
        raise NotOfTokens("its attention is causal where its mask is not, or drops weights")
    packed.calls += 1
    out = _computed(replace(meaning, mask=packed.mask))
    if isinstance(out, str):
        raise NotOfTokens(out)
    _count("native", "")
    return meaning.shaped(out)


def answer_mha(need_weights: bool, proceed: Callable[[], tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Let a call of F.multi_head_attention_forward proceed. Without weights, the F.scaled_dot_product_attention inside
    is accelerated by `answer`. With weights nothing is, and the reason is counted."""
    if need_weights:
        _count(None, _WEIGHTS)
    return proceed()


def _computed(meaning: SdpaMeaning) -> Tensor | str:
    """The output (B, Hq, Lq, Dv), or the reason why the kernels do not support the call."""
    query, key, value = meaning.query, meaning.key, meaning.value
    if meaning.bias is None and not meaning.dropout:
        out = native.fast_forward(query, key, value, meaning.mask, meaning.scale)
        if out is not None:
            return out
    call = make_call(query, key, value, **meaning.arguments())
    refused = native.refuses(call)
    return native.run(call)[0] if refused is None else refused


def _told(meaning: SdpaMeaning) -> Tensor | str:
    """The result of `_computed`. Notifies the observers of this thread, which do not see the call otherwise."""
    edits = _observers.edits_of(SOURCE)
    with _observers.aside() as observers:
        if edits is not None:
            return _observers.notify_edited(observers, edits.answered(meaning, _computed_by_any), SOURCE)
        out = _computed(meaning)
        if isinstance(out, str):
            return out
        _observers.notify(observers, meaning.observed(out, SOURCE))
    return out


def _computed_by_any(call: AttentionCall) -> Tensor:
    """The output (B, Hq, Lq, Dv) of an edited call, by Saccade's kernels or else by PyTorch."""
    return attention(call.query, call.key, call.value, **call.arguments())


def _count(backend: str | None, reason: str) -> None:
    if torch.compiler.is_compiling():
        _count_traced(backend, reason)
    else:
        counted(backend, reason, False)


def _count_traced(backend: str | None, reason: str) -> None:
    """Count a call that the compiler traces. It runs during tracing and is not part of the graph."""
    counted(backend, reason, True)


# What torch.compiler.assume_constant_result does; to call it would import the compiler.
_count_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]
