"""One token after a state of linear attention, by the compiled kernel (native/linear_step.h).

Decoding asks for it once a layer and token, and what it computes takes less time than the checks around a call. So the
common call is recognised here by a few comparisons; of every other one, also of each that is wrong, the ordinary way
says what it is.

Shape legend: B batch, Hq / Hkv query and key-value heads, D width, M features, Dv value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._backends.native import _kernels
from .._backends.native._run import interrupted, is_plain
from ._causal import LinearState, least_weight
from ._causal_native import ELU_PLUS_ONE, IDENTITY
from .feature_maps import EluPlusOne, FeatureMap

_HAS_STEP = hasattr(_kernels.module, "linear_step")  # an older build has not
_LEAST = least_weight(torch.float32)
_NOTHING = (0,) * 6


def quick_step(
    query: Any, key: Any, value: Any, state: Any, feature_map: Callable[[Tensor], Tensor], normalise: bool
) -> tuple[Tensor, LinearState] | None:
    """As `linear_step` for one token without padding and without a graph; None for any other call.

    Args:
        query: (B, Hq, 1, D).
        key: (B, Hkv, 1, D).
        value: (B, Hkv, 1, Dv).
        state, feature_map, normalise: as in `linear_step`.
    """
    if not _HAS_STEP or interrupted() or not (is_plain(query) and is_plain(key) and is_plain(value)):
        return None
    shape, value_shape, dtype = query.shape, value.shape, query.dtype
    if not (len(shape) == len(value_shape) == 4 and shape[2] == 1) or 0 in shape or 0 in value_shape:
        return None
    batch, heads, _, width = shape
    kv_heads, value_width = value_shape[1], value_shape[3]
    if key.shape != (batch, kv_heads, 1, width) or value_shape[::2] != (batch, 1) or heads % kv_heads:
        return None
    if not (key.dtype is dtype is value.dtype and dtype in _kernels.TYPES):
        return None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return None
    kind = ELU_PLUS_ONE
    if type(feature_map) is not EluPlusOne:
        if not isinstance(feature_map, FeatureMap):
            return None
        # One call of the map for both: it reads each token by itself.
        features = feature_map(torch.cat((query, key), 1).float())
        query, key, value, kind = features[:, :heads], features[:, heads:], value.float(), IDENTITY
        width = features.shape[3]
    before = _location(state, (batch, kv_heads, width, value_width))
    strides = at_query, at_key, at_value = query.stride(), key.stride(), value.stride()
    if before is None or not all(stride[3] == 1 for stride in strides):
        return None
    out = query.new_empty(batch, heads, 1, value_width)
    like = query.float() if state is None else state.sums  # new_empty with a dtype takes 2 us longer
    sums, weights = like.new_empty(batch, kv_heads, width, value_width), like.new_empty(batch, kv_heads, width)
    addresses, state_strides = before
    _kernels.module.linear_step(
        (batch, heads, kv_heads, width, value_width),
        (_kernels.TYPES[query.dtype], kind, int(normalise), torch.get_num_threads()),
        _LEAST,
        (query.data_ptr(), at_query),
        (key.data_ptr(), at_key),
        (value.data_ptr(), at_value),
        (out.data_ptr(), out.stride()),
        (*addresses, sums.data_ptr(), weights.data_ptr()),
        state_strides,
    )
    return out if kind == ELU_PLUS_ONE else out.to(dtype), LinearState(sums, weights)


def _location(state: Any, shape: tuple[int, int, int, int]) -> tuple[tuple[int, int], tuple[int, ...]] | None:
    """The addresses and strides of a state of this shape (addresses 0 if there is no state); None if the state needs a
    gradient or cannot be read."""
    if state is None:
        return (0, 0), _NOTHING
    if type(state) is not LinearState:
        return None
    sums, weights = state
    if not (is_plain(sums) and is_plain(weights)) or sums.shape != shape or weights.shape != shape[:3]:
        return None
    if not sums.dtype is weights.dtype is torch.float32:
        return None
    if torch.is_grad_enabled() and (sums.requires_grad or weights.requires_grad):
        return None
    strides = sums.stride()
    return None if strides[3] != 1 else ((sums.data_ptr(), weights.data_ptr()), (*strides[:3], *weights.stride()))
