"""Makes a `CheckedCall` of a caller's arguments. Every error names the argument, the value and the expected one."""

from __future__ import annotations

import math
import sys
import warnings
from numbers import Real

import torch
from torch import Tensor

from ._biases import Bias, as_bias
from ._call import CheckedCall
from ._dropout import Dropout, as_dropout
from ._int8_rows import Int8Rows, as_floats
from ._masks import Mask, as_mask
from ._masks._data import dense, plain
from ._scores._binding import bind
from ._scores._score import Score
from ._scores._terms import ScoreProblem

_ONE_IN_BFLOAT16 = 0x3F80
_INSIDE = ("saccade.", "torch.nn.modules.")  # calls of a module pass through the latter
_LAYOUT = {"query": "(B, Hq, Lq, D)", "key": "(B, Hkv, Lk, D)", "value": "(B, Hkv, Lk, Dv)"}


def make_call(
    query: Tensor,
    key: Tensor | Int8Rows,
    value: Tensor | Int8Rows,
    mask: Mask | Tensor | None = None,
    *,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float | Dropout = 0.0,
    needs_lse: bool = False,
) -> CheckedCall:
    """Check every argument against the contract; nothing is computed and no value of a tensor is read."""
    query, key, value = check_inputs(query, key, value)
    batch, heads, length_q, width = query.shape
    length_k = key.shape[2]
    mask = as_mask(mask)
    if mask is not None:
        mask.check(batch, heads, length_q, length_k, query.device)
    scaling, cap, description = _scale(scale, width), _softcap(softcap), None
    if isinstance(bias, Score):
        problem = ScoreProblem(query, length_k, mask, scaling, cap, bias.offset)
        mask, bias, scaling, cap, description = bind(bias, problem)
    return CheckedCall(
        query,
        key,
        value,
        mask,
        _check_bias(bias, query, length_k),
        scaling,
        cap,
        _sink(sink, query),
        as_dropout(dropout),
        needs_lse=needs_lse,
        score=description,
    )


def check_inputs(query: Tensor, key: Tensor | Int8Rows, value: Tensor | Int8Rows) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value as autocast casts them, 8 bits as floats; TypeError or ValueError unless dtypes, devices and
    shapes fit."""
    if isinstance(query, Tensor):
        key, value = as_floats(key, query.dtype), as_floats(value, query.dtype)
    _check_tensors(query, key, value)
    query, key, value = _autocast(query, key, value)
    _check_dtypes(query, key, value)
    _check_shapes(query, key, value)
    return query, key, value


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor {_LAYOUT[name]}, got {type(tensor).__name__}")
        dense(tensor, name)
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be 4-D {_LAYOUT[name]}, got shape {tuple(tensor.shape)}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, expected query's device {query.device}")


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, cast as F.sdpa does under autocast: all except float64 to the autocast dtype."""
    kind = tensors[0].device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def _check_dtypes(query: Tensor, key: Tensor, value: Tensor) -> None:
    known = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if query.dtype not in known:
        raise TypeError(f"query must be float32, bfloat16, float16 or float64, got {query.dtype}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} is {tensor.dtype}, expected query's dtype {query.dtype}")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    batch, heads, _, width = query.shape
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[0] != batch:
            raise ValueError(f"{name} has batch (axis 0) {tensor.shape[0]}, expected query's {batch}")
    if key.shape[3] != width:
        raise ValueError(f"key has width (axis 3) {key.shape[3]}, expected query's {width}")
    if width == 0:
        raise ValueError("query has width (axis 3) 0, expected at least 1")
    for axis, what in ((1, "heads"), (2, "length")):
        if value.shape[axis] != key.shape[axis]:
            raise ValueError(f"value has {what} (axis {axis}) {value.shape[axis]}, expected key's {key.shape[axis]}")
    kv_heads = key.shape[1]
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(
            f"query has {heads} heads (axis 1), expected a positive multiple of key's {kv_heads}; the layout is "
            "(batch, heads, length, width), which .transpose(1, 2) makes of (batch, length, heads, width)"
        )


def _check_bias(bias: Tensor | Bias | None, query: Tensor, length_k: int) -> Bias | None:
    checked = as_bias(bias)
    if checked is None:
        return None
    parameter = checked.parameter
    if parameter.device != query.device:
        raise ValueError(f"bias is on {parameter.device}, expected query's device {query.device}")
    if parameter.dtype == torch.float64 and query.dtype != torch.float64:
        raise TypeError(f"bias is {parameter.dtype}, expected query's dtype {query.dtype} or torch.float32")
    checked._check(query.shape[0], query.shape[1], query.shape[2], length_k)
    if isinstance(bias, Tensor) and _looks_like_a_mask(bias):
        _warn_of_a_mask()
    return checked


def _looks_like_a_mask(bias: Tensor) -> bool:
    """Whether every value is 0 or 1, and both occur: a mask in a dtype of numbers, and no scores.

    A few values decide nearly always. Learned scores are not read, nor tensors on an accelerator, which would wait.
    """
    if bias.requires_grad or bias.device.type != "cpu" or bias.numel() < 2 or not plain(bias):
        return False
    if bias.is_neg() or bias.dtype.itemsize < 2:  # no NumPy array: a view of a complex tensor, float8
        return False
    # NumPy looks at a few values in a tenth of PyTorch's time. It has no bfloat16, whose bits do as well.
    short = bias.dtype == torch.bfloat16
    values, one = (bias.view(torch.int16).numpy(), _ONE_IN_BFLOAT16) if short else (bias.numpy(), 1)
    # The first row's ends: of scores of a triangle or of padding, one is -inf.
    if values.item(0) not in (0, one) or values.item(values.shape[-1] - 1) not in (0, one):
        return False
    block = values[(0,) * (values.ndim - 2)]
    some = block[:: max(block.shape[0] // 8, 1), :: max(block.shape[1] // 8, 1)].ravel().tolist()
    if one not in some or any(value not in (0, one) for value in some):
        return False
    return bool((values == 0).any()) and bool(((values == 0) | (values == one)).all())


def _warn_of_a_mask() -> None:
    """Warn at the caller's line, so that Python shows the warning once for each line."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        "bias: all its values are 0 and 1, as in a mask, but a bias is added to the scores and hides nothing. "
        "For a mask write mask=bias.bool() (1 = attend)",
        stacklevel=level,
    )


def _scale(scale: float | None, width: int) -> float:
    if scale is None:
        return float(width**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(
            f"scale must be a float or None, got {type(scale).__name__} (fold a learned one into the query)"
        )
    if not _finite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def _finite(number: Real) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an int beyond every float
        return False


def _softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    if isinstance(softcap, bool) or not isinstance(softcap, Real):
        raise TypeError(f"softcap must be a float or None, got {type(softcap).__name__}")
    if not (_finite(softcap) and softcap > 0):
        raise ValueError(f"softcap must be positive and finite, got {softcap} (None switches it off)")
    return float(softcap)


def _sink(sink: Tensor | None, query: Tensor) -> Tensor | None:
    if sink is None:
        return None
    if not isinstance(sink, Tensor) or not sink.is_floating_point():
        raise TypeError(f"sink must be a floating-point tensor (Hq,), got {_kind(sink)}")
    dense(sink, "sink")
    if sink.shape != (query.shape[1],):
        raise ValueError(f"sink must have shape (Hq,) = ({query.shape[1]},), got {tuple(sink.shape)}")
    if sink.device != query.device:
        raise ValueError(f"sink is on {sink.device}, expected query's device {query.device}")
    if sink.dtype == torch.float64 and query.dtype != torch.float64:
        raise TypeError(f"sink is {sink.dtype}, expected query's dtype {query.dtype} or torch.float32")
    return sink


def _kind(thing: object) -> str:
    return str(thing.dtype) if isinstance(thing, Tensor) else type(thing).__name__
