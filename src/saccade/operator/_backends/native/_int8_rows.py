"""Keys and values in 8 bits, read as they stand by the kernel that streams keys.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D and Dv widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._call import CheckedCall
from ..._int8_rows import SCALE_BYTES, Int8Rows
from ..._masks import Mask
from . import _kernels
from ._run import interrupted, is_plain, lowered, refuses


def rounded_rows(x: Tensor) -> Int8Rows:
    """`Int8Rows.of`, by the kernel where it can be: a step rounds few rows, for which ten operations of PyTorch take as
    long as reading a thousand keys."""
    if not hasattr(_kernels.module, "round_rows") or interrupted() or x.dtype not in _kernels.TYPES or not is_plain(x):
        return Int8Rows.of(x)
    x = _kernels.readable(x)
    data = torch.empty((*x.shape[:3], x.shape[3] + SCALE_BYTES), dtype=torch.int8)
    _kernels.module.round_rows(x.shape, _kernels.TYPES[x.dtype], (x.data_ptr(), x.stride()), data.data_ptr())
    return Int8Rows(data)


def streams_rows(query: Any, key: Int8Rows, value: Int8Rows) -> bool:
    """Whether the kernel is made for tensors of these sizes: few query rows for each key head."""
    if not hasattr(_kernels.module, "decode_int8") or interrupted():
        return False
    data = key.data, value.data
    if not (is_plain(query) and all(is_plain(one) and one.stride(-1) == 1 for one in data)):
        return False
    if query.dim() != 4 or 0 in query.shape or 0 in key.data.shape or query.dtype not in _kernels.TYPES:
        return False
    return query.shape[1] // key.data.shape[1] * query.shape[2] <= _kernels.module.most_int8_rows


def fast_rows(query: Tensor, key: Int8Rows, value: Int8Rows, mask: Any, scale: Any) -> Tensor | None:
    """As `fast_forward`, for sizes that `streams_rows` takes: a correct call without bias, sink, softcap and dropout;
    None for any other."""
    shapes = shape, key_shape, value_shape = query.shape, key.shape, value.shape
    batch, heads, rows, width = shape
    kv_heads, keys = value_shape[1:3]
    if key_shape != (batch, kv_heads, keys, width) or value_shape[0] != batch or heads % kv_heads:
        return None
    if scale is None:
        scale = width**-0.5
    recorded = torch.is_grad_enabled() and query.requires_grad
    if recorded or type(scale) is not float or scale - scale != 0.0 or query.stride(3) != 1:
        return None
    if isinstance(mask, Mask):
        if mask._remembered("fits", (rows, keys)) != (batch, heads):
            mask.check(batch, heads, rows, keys, query.device)
            mask._remember("fits", (rows, keys), (batch, heads))
    elif mask is not None:
        return None
    out = _kernels.output_for(query, value_shape[3])
    problem = _kernels.problem(*shapes, _kernels.TYPES[query.dtype], scale, lowered(mask, query, key))
    tensors = ((tensor.data_ptr(), tensor.stride()) for tensor in (query, key.data, value.data, out))
    _kernels.module.decode_int8(problem, *tensors)
    return out


def attend_rows(call: CheckedCall, key: Int8Rows, value: Int8Rows) -> Tensor | None:
    """(B, Hq, Lq, Dv) of a call whose own key and value only have the shapes of `key` and `value`. None for what the
    kernel lacks: gradients, dropout, a score function that reads outside of a tensor."""
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors())
    if recorded or call.dropout is not None or refuses(call) is not None:
        return None
    settings = _kernels.KernelSettings.of(call, lowered(call.mask, call.query, call.key))
    parameter = None if call.bias is None else call.bias.parameter
    try:
        return _kernels.decode_int8(settings, call, key.data, value.data, parameter)
    except IndexError:
        return None
