"""Attention of transformers' models: each call of an attention function, eager ones included, reported as a whole.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv widths.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....operator import _observers
from ....operator._attention import attention
from ....operator._call import AttentionCall, GraphTensor, ObservedCall
from . import _thread

Function = Callable[..., Any]


@contextlib.contextmanager
def attention_functions() -> Iterator[None]:
    """Report to `_observers` the calls of attention functions that models of transformers look up on this thread."""
    if "transformers" not in sys.modules:  # then no model of it exists
        yield
        return
    from ....interception._hooks.transformers import functions_wrapped_by

    with functions_wrapped_by(_telling):
        yield


def _telling(function: Function) -> Function:
    @functools.wraps(function)
    def reported(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any) -> Any:
        if not _thread.THREAD.held.watchers or not _observers.THREAD.observers:
            return function(module, query, key, value, attention_mask, **more)
        edits = _observers.edits_of(_name(function))
        with _observers.aside() as observers:
            if edits is not None:
                return _edited(edits, observers, function, module, (query, key, value), attention_mask, more)
            given = function(module, query, key, value, attention_mask, **more)
            call: ObservedCall | None = None
            with torch.no_grad(), torch._C.DisableTorchFunction(), _thread.counted_if_it_fails(_name(function)):
                call = _call(function, module, query, key, value, attention_mask, given, more)
            if call is not None:
                _observers.notify(observers, call)
        return given

    return reported


def _edited(
    edits: _observers.CallEdits,
    observers: tuple[_observers.Observer, ...],
    function: Function,
    module: Any,
    given: tuple[Tensor, Tensor, Tensor],
    attention_mask: Any,
    more: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The function's (out (B, Lq, Hq, Dv), weights (B, Hq, Lq, Lk) if it computes them) with the edits."""
    from ....interception._hooks.transformers import UnknownAttention, meaning_of

    try:
        meaning = _without_unused_keys(meaning_of(module, *given, attention_mask, **more))
    except UnknownAttention as error:
        raise ValueError(f"intervene: a call of {_name(function)} cannot be changed: {error}") from error
    weights: Tensor | None = None

    def compute(changed: AttentionCall) -> Tensor:
        nonlocal weights
        factors = [
            own if now is before else now
            for own, before, now in zip(given, _factors(meaning), _factors(changed), strict=True)
        ]
        alike = all(own.shape == now.shape for own, now in zip(given, factors, strict=True))
        if alike and changed.scores_like(meaning):
            out, weights = function(module, *factors, attention_mask, **more)[:2]
            return out.transpose(1, 2)
        return attention(*_factors(changed), **changed.arguments())

    edited = edits.answered(meaning, compute)
    if edited.weights is not None and _wants_weights(module, more):
        weights = edited.weights().to(given[0].dtype)
    out = _observers.notify_edited(observers, edited, _name(function), module).transpose(1, 2)
    return out.contiguous(), weights  # as transformers' own functions return it: JetMoe takes a view of it


def _without_unused_keys(call: AttentionCall) -> AttentionCall:
    """The call without unused keys at the end of a static cache: edits count positions from the end."""
    mask, keys = call.mask, call.key.shape[2]
    if not isinstance(mask, Tensor) or mask.shape[-1] != keys or call.query.shape[2] >= keys:
        return call
    shown = mask.detach().flatten(0, -2).any(0).nonzero()
    used = int(shown[-1]) + 1 if len(shown) else keys
    if used == keys:
        return call
    bias = call.bias[..., :used] if isinstance(call.bias, Tensor) and call.bias.shape[-1] == keys else call.bias
    return replace(call, key=call.key[:, :, :used], value=call.value[:, :, :used], mask=mask[..., :used], bias=bias)


def _factors(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    return call.query, call.key, call.value


def _wants_weights(module: Any, more: dict[str, Any]) -> bool:
    """Whether the model returns weights."""
    wanted = more.get("output_attentions")
    return bool(getattr(getattr(module, "config", None), "output_attentions", False) if wanted is None else wanted)


def _call(
    function: Function,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    given: Any,
    more: dict[str, Any],
) -> ObservedCall:
    from ....interception._hooks.transformers import meaning_of

    meaning = meaning_of(module, query, key, value, attention_mask, **more)
    out = given[0]  # (B, Lq, Hq, Dv)
    used = {
        "query": GraphTensor(query),
        "key": GraphTensor(key),
        "value": GraphTensor(value),
        "out": GraphTensor(out, lambda gradient: gradient.transpose(1, 2)),
    }
    return meaning.observed(out.detach().transpose(1, 2), _name(function), module, used=used)


def _name(function: Function) -> str:
    return f"transformers {getattr(function, '__name__', type(function).__name__)}"
