"""Which calls of F.scaled_dot_product_attention Saccade's native kernels take, and why others are left to PyTorch.

Shapes: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv key and value width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._device import DeviceContext

from .._backends import _kernels
from ..interception import Meaning, SdpaCall

SMALL = "so small that a call's fixed costs decide"


def taken(call: SdpaCall) -> Meaning | str:
    """What the call means, where Saccade takes it; otherwise why not."""
    return _refused(call) or too_small(call) or _restricted() or _interrupted() or call.meaning()


def _refused(call: SdpaCall) -> str | None:
    """What the kernels do not have, or F.sdpa would not allow."""
    if _kernels.module is None:
        return _kernels.missing
    query, key, value, given = call[:4]
    if query.device.type != "cpu":
        return f"on {query.device.type}, where PyTorch's kernels are the best there are"
    if not (_plain(query) and _plain(key) and _plain(value) and (given is None or _plain(given))):
        return "a tensor is of a kind of its own (a subclass, nested, sparse)"
    if _dtype(query) not in _kernels.TYPES:
        return f"{query.dtype}, for which there are no native kernels"
    if given is not None:
        if call.is_causal:
            return "attn_mask and is_causal together, which F.scaled_dot_product_attention does not define"
        if given.device.type != "cpu":
            return "attn_mask on another device"
    if not 0.0 <= call.dropout_p < 1.0:
        return "dropout_p is not in [0, 1)"
    if call.scale is not None and not math.isfinite(call.scale):
        return "scale is not finite"
    return None


def _plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided


def _dtype(query: Tensor) -> torch.dtype:
    """Of the computation: autocast casts what F.scaled_dot_product_attention is given."""
    if torch.is_autocast_enabled("cpu") and query.dtype != torch.float64:
        return torch.get_autocast_dtype("cpu")
    return query.dtype


def too_small(call: SdpaCall) -> str | None:
    return None


def _restricted() -> str | None:
    if torch._C._get_flash_sdp_enabled() and torch._C._get_math_sdp_enabled():
        return None
    return "torch.nn.attention.sdpa_kernel names PyTorch's kernels"


def _interrupted() -> str | None:
    """What stands between a call and its computation: it wants to see the call of PyTorch."""
    if torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "torch.func or forward-mode derivatives are being taken"
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None:
        return "a dispatch mode or torch.jit.trace wants to see PyTorch's operators"
    modes = torch._C._len_torch_function_stack()
    if modes and any(not isinstance(torch._C._get_function_stack_at(n), DeviceContext) for n in range(modes)):
        return "a TorchFunctionMode wants to see PyTorch's functions"
    return None
