"""Converts calls of F.scaled_dot_product_attention to Saccade's arguments.

    softmax(scale q.k + attn_mask) v        attn_mask boolean (True = attend) or added, is_causal from the top left

Shape legend: `...` leading axes, B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv key and value
width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...operator._call import AttentionCall
from ...operator._masks import Causal, Mask
from ._masks import broadcast, hiding, mask_of

_CAUSAL = Causal()
_TOP_LEFT = Causal().at(0)


class SdpaCall(NamedTuple):
    """The arguments of one call, with PyTorch's names and defaults."""

    query: Tensor  # (..., Hq, Lq, D)
    key: Tensor  # (..., Hkv, Lk, D)
    value: Tensor  # (..., Hkv, Lk, Dv)
    attn_mask: Tensor | None = None  # broadcastable to (..., Hq, Lq, Lk): boolean, True = attend, or added
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @staticmethod
    def of(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> SdpaCall:
        """The call with these arguments, which PyTorch accepts. Raises TypeError if PyTorch does."""
        return SdpaCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def meaning(self) -> SdpaMeaning | str:
        """The call in Saccade's terms, or in a few words why it has none (mostly calls on which PyTorch raises an
        error).

        Rows that see no key are 0 in Saccade; in PyTorch they are 0, NaN or a mean, as the kernel has it. A float mask
        is a bias: -inf hides a key, `finfo.min` is a number like any other, as in PyTorch. One that holds only 0 and
        -inf may be given as a mask, which means the same. A mask and `is_causal`
        together hide what either hides, as PyTorch's fused kernel for CPUs has it; its other kernels do not accept
        both.
        """
        found = _tensors(_cast(self.query), _cast(self.key), _cast(self.value), self.enable_gqa)
        if isinstance(found, str):
            return found
        query, key, value, leading = found
        mask: Mask | None = None
        bias: Tensor | None = None
        if self.attn_mask is not None:
            hidden = _hidden(_cast(self.attn_mask), (*leading, key.shape[2]), query.dtype)
            if isinstance(hidden, str):
                return hidden
            mask, bias = hidden
        if self.is_causal:
            # From the top left, whatever the lengths.
            causal = _CAUSAL if query.shape[2] == key.shape[2] else _TOP_LEFT
            mask = causal if mask is None else causal & mask
        return SdpaMeaning(query, key, value, mask, bias, self.scale, dropout=float(self.dropout_p), leading=leading)


@dataclass(frozen=True, eq=False)
class SdpaMeaning(AttentionCall):
    """A call of F.scaled_dot_product_attention in Saccade's terms. Its bias is 4-D."""

    leading: tuple[int, ...] = ()  # (..., Hq, Lq): the output's axes but the last, as the caller counts them

    def shaped(self, out: Tensor) -> Tensor:
        """Reshape an output (B, Hq, Lq, ...) to the axes that the caller of F.sdpa expects."""
        return out if len(self.leading) == 3 else out.reshape(*self.leading, *out.shape[3:])


def _cast(tensor: Tensor) -> Tensor:
    """Cast the tensors as autocast does for F.sdpa."""
    kind = tensor.device.type
    if not torch._C._is_any_autocast_enabled() or not torch.is_autocast_enabled(kind):
        return tensor
    as_it_is = tensor.dtype == torch.float64 or not tensor.is_floating_point()
    return tensor if as_it_is else tensor.to(torch.get_autocast_dtype(kind))


def _hidden(given: Tensor, whole: tuple[int, ...], dtype: torch.dtype) -> tuple[Mask | None, Tensor | None] | str:
    """attn_mask as (mask, bias), one of which is None, or the reason why attn_mask is invalid."""
    if given.dtype == torch.bool:
        mask = mask_of(given, whole)
        return mask if isinstance(mask, str) else (mask, None)
    if given.dtype not in (torch.float32, dtype):
        return f"attn_mask is {given.dtype}, which PyTorch does not accept with {dtype}"
    mask_only = hiding(given, whole)
    if mask_only is not None:
        return mask_only if isinstance(mask_only, str) else (mask_only, None)
    bias = broadcast(given, whole)
    return bias if isinstance(bias, str) else (None, bias)


_Tensors = tuple[Tensor, Tensor, Tensor, tuple[int, ...]]


def _tensors(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> _Tensors | str:
    """query, key and value with four axes, and their leading axes; or the reason why they are invalid."""
    if not query.layout == key.layout == value.layout == torch.strided or query.is_nested:
        return "tensors that are nested or sparse"
    if not (query.dtype == key.dtype == value.dtype and query.is_floating_point()):
        return "dtypes that differ or are not floating point"
    if query.dim() == key.dim() == value.dim() == 4:
        shape = query.shape
        batch, heads, rows, width = shape
        kv_batch, kv_heads, keys, key_width = key.shape
        if (
            (batch, width) == (kv_batch, key_width)
            and tuple(value.shape[:3]) == (kv_batch, kv_heads, keys)
            and (heads == kv_heads or (kv_heads > 0 and (heads % kv_heads == 0 if grouped else kv_heads == 1)))
        ):
            return query, key, value, (batch, heads, rows)
    return _four_axes(query, key, value, grouped)


def _four_axes(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> _Tensors | str:
    """Broadcast the leading axes and flatten them into one."""
    axes = [tensor.dim() for tensor in (query, key, value)]
    if min(axes) < (3 if grouped else 2):
        return f"enable_gqa={grouped} with query, key and value of {axes[0]}, {axes[1]} and {axes[2]} axes"
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return "widths or lengths that do not fit"
    kept = 3 if grouped else 2  # grouped heads are not broadcast
    most = max(*axes, 4)
    wide = [tensor[(None,) * (most - tensor.dim())] for tensor in (query, key, value)]
    try:
        shared = torch.broadcast_shapes(*(tensor.shape[:-kept] for tensor in wide))
    except RuntimeError:
        return "leading axes that do not broadcast"
    query, key, value = (tensor.expand(*shared, *tensor.shape[-kept:]) for tensor in wide)
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if value.shape[-3] != kv_heads or kv_heads == 0 or heads % kv_heads:
        return "numbers of heads that do not fit"
    leading = tuple(query.shape[most - max(axes) : -1])
    query, key, value = (tensor.flatten(0, -4) if most > 4 else tensor for tensor in (query, key, value))
    return query, key, value, leading
