"""What a call of F.scaled_dot_product_attention means in Saccade's terms.

    softmax(scale q.k + attn_mask) v        attn_mask boolean (True = attend) or added, is_causal from the top left

Shapes: `...` leading axes, B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv key and value width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._masks import Causal, Mask
from ._masks import mask_of

_TOP_LEFT = Causal().at(0)
_CAUSAL = Causal()


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
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> SdpaCall:  # fmt: skip
        """Positional and by keyword, as PyTorch takes them. TypeError where PyTorch would raise one."""
        return SdpaCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def meaning(self) -> Meaning | str:
        """The call in Saccade's terms, or in a few words why it has none (what PyTorch would refuse, mostly).

        Rows that see no key are 0 in Saccade. In PyTorch they are 0, NaN or a mean, as the kernel has it.
        A float mask is a bias: -inf hides a key, and `finfo.min` is a number like any other, as in PyTorch.
        """
        query, key, value = self.query, self.key, self.value
        if not query.layout == key.layout == value.layout == torch.strided:
            return "nested, sparse or otherwise not strided"
        if min(query.dim(), key.dim(), value.dim()) < 2:
            return "query, key or value has fewer than two axes"
        if not (query.dtype == key.dtype == value.dtype and query.is_floating_point()):
            return "dtypes that differ or are not floating point"
        leading = tuple(query.shape[:-1])
        if not query.dim() == key.dim() == value.dim() == 4 or not _fit(query, key, value):
            found = _four_axes(query, key, value, self.enable_gqa)
            if isinstance(found, str):
                return found
            (query, key, value), leading = found
        elif not self.enable_gqa and query.shape[1] != key.shape[1] != 1:
            return "key has other heads than query, and enable_gqa is not set"
        whole = (*leading, key.shape[2])
        mask: Mask | None = None
        bias: Tensor | None = None
        if self.attn_mask is not None:
            given = _broadcast(self.attn_mask, whole, query.shape[1])
            if isinstance(given, str):
                return given
            if given.dtype == torch.bool:
                mask = mask_of(given, self.attn_mask)
            elif given.dtype in (torch.float32, query.dtype):
                bias = given
            else:
                return f"attn_mask is {given.dtype}, which PyTorch refuses for {query.dtype}"
        if self.is_causal:
            # From the top left, whatever the lengths.
            causal = _CAUSAL if query.shape[2] == key.shape[2] else _TOP_LEFT
            mask = causal if mask is None else causal & mask
        return Meaning(query, key, value, mask, bias, self.scale, float(self.dropout_p), leading)


class Meaning(NamedTuple):
    """A call in Saccade's terms: what `saccade.attention` takes."""

    query: Tensor  # (B, Hq, Lq, D)
    key: Tensor  # (B, Hkv, Lk, D)
    value: Tensor  # (B, Hkv, Lk, Dv)
    mask: Mask | None
    bias: Tensor | None  # 4-D
    scale: float | None
    dropout: float
    leading: tuple[int, ...]  # the output's axes but the last, as the caller counts them: (..., Hq, Lq)

    def shaped(self, out: Tensor) -> Tensor:
        """Saccade's (B, Hq, Lq, Dv) with the axes that F.sdpa's caller expects."""
        return out if len(self.leading) == 3 else out.reshape(*self.leading, out.shape[-1])


def _fit(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether 4-D tensors are what Saccade takes as they are."""
    batch, heads, _, width = query.shape
    kv_batch, kv_heads, keys, key_width = key.shape
    return (
        batch == kv_batch
        and width == key_width
        and value.shape[:3] == (batch, kv_heads, keys)
        and kv_heads > 0
        and heads % kv_heads == 0
    )


def _four_axes(
    query: Tensor, key: Tensor, value: Tensor, grouped: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, ...]] | str:
    """query, key and value with leading axes broadcast and made one, and the output's axes but the last."""
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return "widths or lengths that do not fit"
    axes = max(query.dim(), key.dim(), value.dim())
    if grouped and not query.dim() == key.dim() == value.dim() >= 3:
        return "enable_gqa with fewer than three axes, or different numbers of them"
    lead = axes - (3 if grouped else 2)  # heads of groups are not broadcast
    given = [_with_axes(tensor, max(axes, 4)) for tensor in (query, key, value)]
    lead += max(4 - axes, 0)
    try:
        shared = torch.broadcast_shapes(*(tensor.shape[:lead] for tensor in given))
    except RuntimeError:
        return "leading axes that do not broadcast"
    given = [tensor.expand(*shared, *tensor.shape[lead:]) for tensor in given]
    if grouped:
        heads, kv_heads, value_heads = (tensor.shape[-3] for tensor in given)
        if kv_heads != value_heads or kv_heads == 0 or heads % kv_heads:
            return "enable_gqa with heads that do not divide"
    folded = [tensor.flatten(0, -4) if tensor.dim() > 4 else tensor for tensor in given]
    leading = tuple(given[0].shape[:-1])[max(4 - axes, 0) :]
    return (folded[0], folded[1], folded[2]), leading


def _with_axes(tensor: Tensor, axes: int) -> Tensor:
    return tensor[(None,) * (axes - tensor.dim())] if tensor.dim() < axes else tensor


def _broadcast(mask: Tensor, whole: tuple[int, ...], heads: int) -> Tensor | str:
    """A mask that broadcasts to `whole` (..., Hq, Lq, Lk) as one with four axes that broadcasts to (B, Hq, Lq, Lk)."""
    if mask.dim() == len(whole) == 4:
        fits = all(have == 1 or have == need for have, need in zip(mask.shape, whole, strict=True))
        return mask if fits else f"attn_mask of shape {tuple(mask.shape)} does not broadcast to {whole}"
    if not 2 <= mask.dim() <= len(whole) or any(
        have not in (1, need) for have, need in zip(mask.shape, whole[len(whole) - mask.dim() :], strict=True)
    ):
        return f"attn_mask of shape {tuple(mask.shape)} does not broadcast to {whole}"
    mask = _with_axes(mask, max(len(whole), 4))
    if mask.dim() == 4:
        return mask
    batch = mask.shape[:-3]
    if math.prod(batch) != 1:
        mask = mask.expand(*whole[:-3], *mask.shape[-3:])
    return mask.flatten(0, -4)
