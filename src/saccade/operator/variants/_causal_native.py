"""Causal attention of features by the compiled kernel (native/linear.h): the same meaning as in `_causal.py`.

Shape legend: B batch, H / Hkv query and key-value heads, L length, D width, M features, Dv value width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._backends.native import _kernels

IDENTITY, ELU_PLUS_ONE = 0, 1  # native/call.h, Linear::Map
SHORT = 16  # below so many tokens PyTorch's own products start sooner


def takes(*tensors: Tensor) -> bool:
    """Whether the kernel is there, and can read these tensors of (B, H, L, X)."""
    return (
        hasattr(_kernels.module, "linear")
        and all(tensor.device.type == "cpu" and tensor.dtype in _kernels.TYPES for tensor in tensors)
        and all(tensor.numel() and tensor.shape[2] >= SHORT for tensor in tensors)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
    )


class CausalKernelSettings(NamedTuple):
    """The arguments of a call other than its tensors."""

    map: int
    normalise: bool
    least: float  # a row whose weights sum to less, in magnitude, is 0 where normalised
    rows: Tensor | None = None  # bool (B or 1, L): real queries
    keys: Tensor | None = None  # bool (B or 1, L): real keys


def read(
    settings: CausalKernelSettings, query: Tensor, key: Tensor, value: Tensor, sums: Tensor, log_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out (B, H, L, Dv) and the sums (B, Hkv, M, Dv + 1) after the last token, from those before the first one."""
    rows, keys = (kept if kept is None else kept.contiguous() for kept in (settings.rows, settings.keys))
    log_scale = log_scale if log_scale is None else log_scale.contiguous()
    out, after = _CausalRead.apply(settings._replace(rows=rows, keys=keys), query, key, value, sums, log_scale)
    return out, after


def refuse_second_derivatives() -> None:
    """RuntimeError if a backward pass is itself recorded. (`once_differentiable` raises none if the cotangent needs no
    gradient.)"""
    if torch.is_grad_enabled():
        raise RuntimeError("causal linear attention has first derivatives only: its gradient recomputes (create_graph)")


class _CausalRead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: CausalKernelSettings,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sums: Tensor,
        log_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        query, key, value = (_kernels.readable(tensor) for tensor in (query, key, value))
        out = _kernels.output_for(query, value.shape[3])
        denominator = torch.empty(query.shape[:3], dtype=torch.float32)
        states = _states(sums, query.shape[2])
        states[:, :, 0] = sums
        running = None if log_scale is None else log_scale.cummax(-1).values
        shared = _kernel_arguments(settings, query, key, value, log_scale, running)
        _kernels.module.linear(*shared, _at(out), denominator.data_ptr(), states.data_ptr())
        ctx.told = settings
        ctx.save_for_backward(query, key, value, log_scale, running, out, denominator, states)
        return out, states[:, :, -1].clone()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_sums: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        query, key, value, log_scale, running, out, denominator, states = ctx.saved_tensors
        d_out = _kernels.readable(d_out)
        d_query, d_key, d_value = (_kernels.like(tensor) for tensor in (query, key, value))
        d_states = _states(d_sums, query.shape[2])
        d_states[:, :, -1] = d_sums
        shared = _kernel_arguments(ctx.told, query, key, value, log_scale, running)
        _kernels.module.linear_backward(
            *shared,
            _at(out),
            denominator.data_ptr(),
            states.data_ptr(),
            _at(d_out),
            _at(d_query),
            _at(d_key),
            _at(d_value),
            d_states.data_ptr(),
        )
        return None, d_query, d_key, d_value, d_states[:, :, 0], None


def _states(sums: Tensor, length: int) -> Tensor:
    """(B, Hkv, spans + 1, M, Dv + 1), not filled."""
    spans = -(-length // _kernels.module.linear_span)
    batch, heads, features, width = sums.shape
    return torch.empty(batch, heads, spans + 1, features, width)


def _kernel_arguments(
    settings: CausalKernelSettings,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_scale: Tensor | None,
    running: Tensor | None,
) -> tuple[Any, ...]:
    """The arguments from which native/bindings.cpp makes a Linear."""
    problem = (
        query.shape,
        key.shape,
        value.shape,
        _kernels.TYPES[query.dtype],
        settings.map,
        int(settings.normalise),
        torch.get_num_threads(),
        settings.least,
    )
    units = (_address(log_scale), _address(running))
    return problem, _at(query), _at(key), _at(value), (*_location(settings.rows), *_location(settings.keys)), units


def _location(tokens: Tensor | None) -> tuple[int, int]:
    """Address and stride of the batch."""
    return (0, 0) if tokens is None else (tokens.data_ptr(), 0 if tokens.shape[0] == 1 else tokens.shape[1])


def _at(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.stride()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
