"""Saccade's own kernels for CPUs: every mask and bias, forward and backward, in linear memory.

    s_ij = softcap(scale q_i.k_j) + bias_ij     lse_i = log(exp(sink) + sum_j exp s_ij)      p_ij = exp(s_ij - lse_i)
    out_i = sum_j p_ij v_j                      ds_ij = p_ij (do_i.v_j - delta_i),  delta_i = do_i.out_i - dlse_i

Eager calls go through an autograd.Function of the old form, whose `forward` takes the context: `setup_context` costs
37 us a call, more than the attention of a small model. Compilers and dispatch modes see the operator of `_operator.py`.
Derivatives of the backward pass are `chunked`'s, computed again from the inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._biases import Placement, RelativeScores
from .._call import Call, add_sink, sink_lse
from .._masks import Mask
from . import _kernels, chunked
from ._kernels import TYPES, Settings, Tensors
from ._tiles import Problem


def refuses(call: Call) -> str | None:
    """Why the kernels cannot do this call, or None."""
    if _kernels.module is None:
        return _kernels.missing
    if call.device.type != "cpu":
        return f"the native kernels run on a CPU, and query is on {call.device.type}"
    if call.query.dtype not in TYPES:
        return f"the native kernels have float32, bfloat16 and float16, and query is {call.query.dtype}"
    if call.transformed:
        return "the native kernels lack forward-mode and torch.func derivatives"
    return None


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """out (B, Hq, Lq, Dv) in the input dtype, lse (B, Hq, Lq) in float32 where it was asked for."""
    bias, mask = call.bias, call.mask
    settings = Settings(
        mask, lowered(mask, call.query, call.key), None if bias is None else bias.form(),
        0 if bias is None else call.placement, call.scale, call.softcap, call.dropout,
    )  # fmt: skip
    parameter = None if bias is None else bias.parameter
    return attend(settings, call.needs_lse, call.query, call.key, call.value, parameter, call.sink)


def lowered(mask: Mask | None, query: Tensor, key: Tensor) -> Any:
    """The mask as the kernels see it; None where everything is seen."""
    if mask is None:
        return None
    from ._lowering import native_mask

    return native_mask(mask, query.shape[2], key.shape[2], query.shape[0], query.shape[1], query.device)


def attend(
    settings: Settings, needs_lse: bool, query: Tensor, key: Tensor, value: Tensor, parameter: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """out and, where needed, lse; through autograd only where somebody may ask for a gradient."""
    given = (query, key, value, parameter, sink)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given):
        found = _Attend.apply(settings, needs_lse, *given)
        return found if needs_lse else (found, None)
    out, lse = _kernels.forward(settings, needs_lse, *given)
    return out, None if lse is None else sink_lse(lse, sink)


class _Attend(torch.autograd.Function):
    """(query, key, value, parameter, sink) -> out or (out, lse)."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, needs_lse: bool, *given: Any) -> Any:
        out, lse = _kernels.forward(settings, True, *given)
        assert lse is not None
        ctx.settings = settings
        ctx.save_for_backward(*given, out, lse)
        ctx.set_materialize_grads(False)
        return (out, sink_lse(lse, given[4])) if needs_lse else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        *given, out, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or not (_ordinary(d_out) and _ordinary(d_lse)):
            return None, None, *_by_chunked(ctx.settings, given, wanted, d_out, d_lse)
        return None, None, *_kernels.backward(ctx.settings, given, wanted, out, lse, d_out, d_lse)


def _ordinary(cotangent: Tensor | None) -> bool:
    """Whether no transform runs over the cotangent, so that memory holds what it says."""
    return cotangent is None or not (
        torch._C._are_functorch_transforms_active() or torch._C._functorch.is_legacy_batchedtensor(cotangent)
    )


def _by_chunked(
    settings: Settings, given: Tensors, wanted: tuple[bool, ...], d_out: Tensor | None, d_lse: Tensor | None
) -> Tensors:
    """The gradients as `chunked` computes them from the inputs: these have derivatives themselves."""
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: in attention(x, x, x) one tensor stands in three places, and each has a gradient of its own here.
        views = [None if x is None else x.view_as(x) if create else x.detach().requires_grad_() for x in given]
        found = _chunked(settings, *views)
        asked = [view for view, want in zip(views, wanted, strict=True) if want]
        pairs = [(x, c) for x, c in zip(found, (d_out, d_lse), strict=True) if c is not None and x.requires_grad]
        outputs, cotangents = [x for x, _ in pairs], [c for _, c in pairs]
        grads = iter(torch.autograd.grad(outputs, asked, cotangents, create_graph=create, allow_unused=True))
    return [next(grads) if want else None for want in wanted]


def _chunked(settings: Settings, query: Any, key: Any, value: Any, parameter: Any, sink: Any) -> tuple[Tensor, Tensor]:
    problem = Problem(
        settings.mask, settings.bias, settings.scale, settings.softcap, settings.dropout, query.shape[2],
        key.shape[2], torch.float32, query.device, settings.placement, guarded=False, batch=(0, query.shape[0]),
    ).guard_if(query, key, value, parameter)  # fmt: skip
    out, lse = add_sink(*chunked.attend(problem, query, key, value, parameter), sink)
    return out.to(query.dtype), lse
