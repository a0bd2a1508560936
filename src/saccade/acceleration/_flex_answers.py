"""Calls of FlexAttention on an accelerated thread: computed by Saccade on CPUs, passed on to PyTorch elsewhere.

Shape legend: B batch, Hq query heads, Lq length of the query.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..interception._hooks import FlexCall
from ..operator import _observers
from ..operator._attention import choose
from ..operator._call import AttentionCall
from ..operator._checks import make_call
from ..operator._flex_attention import check_options, flex_call, flex_output
from ._thread import THREAD, NotOfTokens, counted

SOURCE = "flex_attention"


def answer_flex(call: FlexCall, proceed: Callable[[], Any]) -> Any:
    """Compute a call of flex_attention with Saccade, or pass it on."""
    reason = _left(call)
    if reason is not None:
        counted(None, reason, False)
        return proceed()
    if THREAD.held.packed is not None:
        raise NotOfTokens("it calls flex_attention, whose functions count padded places")
    check_options(call.return_lse, call.return_aux, call.kernel_options)
    meaning = flex_call(*call[:7])
    wants_lse = call.return_lse or (call.return_aux is not None and call.return_aux.lse)
    out, lse = _observed(meaning, wants_lse) if _observers.THREAD.observers else _computed(meaning, wants_lse)
    return flex_output(meaning, out, lse if wants_lse else None, call.query.dtype, call.return_aux)


def _left(call: FlexCall) -> str | None:
    """Why the call is left to PyTorch; None if it is not."""
    tensors = call[:3]
    if not all(type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided for tensor in tensors):
        return "flex_attention: a tensor is of a kind of its own (a subclass, nested, sparse), or fake"
    if call.query.device.type != "cpu":
        return f"flex_attention: on {call.query.device.type}, where PyTorch compiles its kernels"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "flex_attention: a dispatch mode wants to see PyTorch's operators"
    return None


def _computed(meaning: AttentionCall, wants_lse: bool) -> tuple[Tensor, Any]:
    call = make_call(meaning.query, meaning.key, meaning.value, **meaning.arguments(), needs_lse=wants_lse)
    module, name, _ = choose(call, "auto")
    found: tuple[Tensor, Any] = module.run(call)
    counted(name, "", False)
    return found


def _observed(meaning: AttentionCall, wants_lse: bool) -> tuple[Tensor, Any]:
    """As `_computed`, and notifies the observers of this thread, which do not see the call anywhere else."""
    edits = _observers.edits_of(SOURCE)
    if edits is not None and wants_lse:
        raise ValueError("intervene: the lse of a call of flex_attention is asked for, which no edit can give")
    with _observers.aside() as observers:
        if edits is not None:
            edited = edits.answered(meaning, lambda changed: _computed(changed, False)[0])
            return _observers.notify_edited(observers, edited, SOURCE), None
        out, lse = _computed(meaning, wants_lse)
        _observers.notify(observers, meaning.observed(out, SOURCE))
    return out, lse
