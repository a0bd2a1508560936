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
from ..operator._attention import choose, run
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
    checked = make_call(meaning.query, meaning.key, meaning.value, **meaning.arguments(), needs_lse=wants_lse)
    out, lse = run(checked, "auto", SOURCE)
    counted(choose(checked, "auto")[1], "", False)
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
